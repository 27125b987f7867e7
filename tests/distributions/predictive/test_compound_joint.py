"""Predictions of several correlated latents: moments and densities against sums over all outcomes."""

import copy
import itertools
import pickle

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal

from gpext.distributions import CompoundJointDistribution, CompoundMultinomial
from gpext.likelihoods import (
    ExponentialFamilyLikelihood,
    MultinomialLogitLikelihood,
    MultivariatePoissonLikelihood,
    PoissonLikelihood,
)
from tests.members import F64
from tests.statistics import misfit

MEAN = torch.tensor([[-0.8, 0.0], [-0.5, -1.0]], dtype=F64)  # (N, D)
BLOCKS = torch.tensor([[[0.2, 0.1], [0.1, 0.3]], [[0.4, -0.2], [-0.2, 0.2]]], dtype=F64)


def correlated(mean=MEAN, blocks=BLOCKS):
    return MultitaskMultivariateNormal(mean, torch.block_diag(*blocks))


def poisson_by_squares(y):
    return (y + 1).lgamma().neg().sum(-1)


def transpose(y):
    return y.mT


def exp_sum(theta):
    return theta.exp().sum(-2)


def two_poissons(f):
    return torch.distributions.Independent(torch.distributions.Poisson(f.mT.exp()), 1)


def log_base(y, a):
    return poisson_by_squares(y)


@pytest.fixture(params=["counts", "family"])
def poissons(request):
    if request.param == "counts":
        return MultivariatePoissonLikelihood(2)
    return ExponentialFamilyLikelihood(2, transpose, exp_sum, log_base, num_targets=2, conditional=two_poissons)


def test_correlated_counts(poissons):
    predicted = poissons(correlated())
    assert isinstance(predicted, CompoundJointDistribution)
    first = (MEAN + 0.5 * BLOCKS.diagonal(dim1=-2, dim2=-1)).exp()
    torch.testing.assert_close(predicted.mean, first)
    second = first.square() * BLOCKS.diagonal(dim1=-2, dim2=-1).expm1()
    torch.testing.assert_close(predicted.variance, first + second, rtol=1e-6, atol=1e-8)
    y = torch.tensor([[1.0, 3.0], [0.0, 2.0]], dtype=F64)
    torch.testing.assert_close(predicted.log_prob(y), poissons.log_marginal(y, correlated()))
    counts = torch.cartesian_prod(*[torch.arange(20, dtype=F64)] * 2).unsqueeze(-2).expand(-1, 2, 2)
    probs = predicted.log_prob(counts).exp()
    torch.testing.assert_close(probs.sum(0), torch.ones(2, dtype=F64), rtol=1e-5, atol=1e-5)
    product = (counts.prod(-1) * probs).sum(0)
    both = first.prod(-1) * BLOCKS[:, 0, 1].exp()
    torch.testing.assert_close(product, both, rtol=1e-3, atol=1e-4)  # the sum ends at 19


def test_draws_are_correlated_as_the_latents(poissons):
    torch.manual_seed(0)
    draws = poissons(correlated()).sample((40_000,))
    assert draws.shape == (40_000, 2, 2)
    first = (MEAN + 0.5 * BLOCKS.diagonal(dim1=-2, dim2=-1)).exp()
    covariance = first.prod(-1) * BLOCKS[:, 0, 1].expm1()
    products = (draws - first).prod(-1)
    assert misfit(products, covariance) < 1


def test_scalar_targets_of_one_latent():
    family = ExponentialFamilyLikelihood(
        1,
        lambda y: y.unsqueeze(-2),
        exp_sum,
        lambda y, a: (y + 1).lgamma().neg(),
        conditional=lambda f: torch.distributions.Poisson(f.squeeze(-2).exp()),
    )
    mean, variance = torch.tensor([0.3, 1.2], dtype=F64), torch.tensor([0.5, 0.1], dtype=F64)
    predicted = family(MultivariateNormal(mean.unsqueeze(0), torch.diag(variance).unsqueeze(0)))
    known = PoissonLikelihood()(MultivariateNormal(mean, torch.diag(variance)))
    torch.testing.assert_close(predicted.mean, known.mean, rtol=1e-8, atol=0)
    torch.testing.assert_close(predicted.variance, known.variance, rtol=1e-8, atol=0)
    y = torch.tensor([2.0, 5.0], dtype=F64)
    torch.testing.assert_close(predicted.log_prob(y), known.log_prob(y), rtol=1e-8, atol=0)
    assert predicted.sample((3,)).shape == (3, 2)
    with pytest.raises(ValueError, match=r"of batch shape \(2,\) .*; got batch shape \(1, 2\)"):
        CompoundJointDistribution(lambda f: torch.distributions.Poisson(f.exp()), mean[None], torch.ones(1, 1, 2), None)


@pytest.mark.parametrize("is_correlated", [True, False])
def test_counts_of_several_trials(is_correlated):
    n, K = 4, 3
    likelihood = MultinomialLogitLikelihood(K, n)
    mean = torch.tensor([[0.3, -0.5, 0.8], [3.0, 0.0, 1.0]], dtype=F64)
    root = torch.tensor([[0.9, 0.0, 0.0], [0.5, 0.7, 0.0], [-0.6, 0.2, 1.1]], dtype=F64)
    block = root @ root.T if is_correlated else torch.diag(torch.tensor([0.5, 1.0, 2.0], dtype=F64))
    q = correlated(mean, block.expand(2, K, K))
    predicted = likelihood(q)
    assert isinstance(predicted, CompoundMultinomial)
    counts = [c for c in itertools.product(range(n + 1), repeat=K) if sum(c) == n]
    values = torch.tensor(counts, dtype=F64).unsqueeze(-2).expand(-1, 2, K)
    probs = predicted.log_prob(values).exp()
    torch.testing.assert_close(probs.sum(0), torch.ones(2, dtype=F64), rtol=1e-8, atol=0)
    torch.testing.assert_close(predicted.log_prob(values[3]), likelihood.log_marginal(values[3], q), rtol=1e-8, atol=0)
    first = (values * probs.unsqueeze(-1)).sum(0)
    torch.testing.assert_close(predicted.mean, first, rtol=1e-7, atol=0)
    torch.testing.assert_close(predicted.probs, likelihood.class_probs(q), rtol=1e-7, atol=0)
    spread = ((values - first).square() * probs.unsqueeze(-1)).sum(0)
    torch.testing.assert_close(predicted.variance, spread, rtol=1e-7, atol=0)
    draws = predicted.sample((20_000,), generator=torch.Generator().manual_seed(1))
    assert bool((draws.sum(-1) == n).all())
    assert misfit(draws, first, variance=spread) < 1
    assert misfit((draws - first).square(), spread) < 1
    for wrong, message in ((values[0] + 1, "within the support"), (0 * values[0], "sum to total_count=4")):
        with pytest.raises(ValueError, match=message):
            predicted.log_prob(wrong)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))])
def test_copies(copied):
    for likelihood, y in (
        (MultivariatePoissonLikelihood(2), torch.ones(2, 2, dtype=F64)),
        (MultinomialLogitLikelihood(2, 2), torch.ones(2, 2, dtype=F64)),
    ):
        predicted = likelihood(correlated())
        assert torch.equal(copied(predicted).log_prob(y), predicted.log_prob(y))
