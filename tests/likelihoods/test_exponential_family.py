"""User-defined exponential families, against the likelihoods that are special cases."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch.nn.functional import one_hot, softplus

from gpext.distributions import CompoundDistribution, with_cdf
from gpext.inference import DenseBlocksWarning, Laplace, Taylor
from gpext.likelihoods import (
    DirichletLikelihood,
    ExponentialFamilyLikelihood,
    MultinomialLogitLikelihood,
    VonMisesLikelihood,
)
from gpext.special import log_gamma, log_i0
from tests.latent_cases import CASES, NOISE
from tests.members import F64


def von_mises():
    family = ExponentialFamilyLikelihood(
        2,
        lambda y: torch.stack([y.cos(), y.sin()], -2),
        lambda theta: log_i0(theta.square().sum(-2)),
        lambda y, a: torch.full_like(y, 2 * torch.pi).log().neg(),
    )
    return VonMisesLikelihood(), family, lambda g: 3 * torch.rand(6, generator=g, dtype=F64)


def dirichlet():
    family = ExponentialFamilyLikelihood(
        3,
        lambda y: y.log().mT,
        lambda theta: log_gamma(theta).sum(-2) - log_gamma(theta.sum(-2)),
        lambda y, a: -y.log().sum(-1),
        softplus,
        num_targets=3,
    )
    return DirichletLikelihood(3), family, lambda g: torch.randn(6, 3, generator=g, dtype=F64).softmax(-1)


def multinomial():
    family = ExponentialFamilyLikelihood(
        3, lambda y: one_hot(y.long(), 3).to(F64).mT, lambda theta: theta.logsumexp(-2)
    )
    return MultinomialLogitLikelihood(3), family, lambda g: torch.randint(3, (6,), generator=g)


@pytest.fixture(params=[von_mises, dirichlet, multinomial], ids=lambda make: make.__name__)
def member(request):
    """A member with closed forms, the same as a family, targets and latent values."""
    closed, family, draw = request.param()
    generator = torch.Generator().manual_seed(0)
    return closed, family, draw(generator), torch.randn(closed.num_latents, 6, generator=generator, dtype=F64)


def test_the_members_are_special_cases(member):
    closed, family, y, f = member
    torch.testing.assert_close(family.log_prob(y, f), closed.log_prob(y, f), rtol=1e-12, atol=1e-12)
    ours, theirs = family.curvature(y, f), closed.curvature(y, f)
    for name in ("log_prob", "gradient", "blocks", "expected_blocks"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-10, atol=1e-10)
    assert not ours.blocks.requires_grad or torch.is_grad_enabled()
    with torch.no_grad():
        assert not family.curvature(y, f).blocks.requires_grad


def prior(latents, size=6):
    x = torch.linspace(0, 2, size, dtype=F64)
    K = 2 * torch.exp(-0.5 * (x.unsqueeze(-1) - x).square()) + 1e-3 * torch.eye(size, dtype=F64)
    return MultivariateNormal(
        torch.full((latents, size), 0.3, dtype=F64), to_linear_operator(K.expand(latents, -1, -1))
    )


@pytest.mark.parametrize("rule", [Laplace(tolerance=1e-10), Taylor(lambda y: torch.zeros(1, 1, dtype=F64))])
def test_inference_by_blocks_is_that_of_the_structured_member(member, rule):
    closed, family, y, _ = member
    expected = rule.infer(prior(closed.num_latents), closed, y)
    with pytest.warns(DenseBlocksWarning, match=r"O\(\(n D\)\^3\) ="):
        result = rule.infer(prior(closed.num_latents), family, y)
    torch.testing.assert_close(result.log_evidence, expected.log_evidence, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(result.posterior.mean, expected.posterior.mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(
        result.posterior.covariance_matrix, expected.posterior.covariance_matrix, rtol=1e-7, atol=1e-7
    )
    torch.testing.assert_close(result.log_loo, expected.log_loo, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore::gpext.inference.DenseBlocksWarning")
@pytest.mark.parametrize("rule", [Laplace(), Taylor()])
def test_a_gaussian_with_correlated_noise_is_exact(rule):
    likelihood, known, y = CASES["family_gaussian"].problem(12)
    p = known()
    result = rule.infer(p, likelihood, y)
    noisy = torch.block_diag(*p.covariance_matrix) + torch.kron(likelihood.dispersion * NOISE, torch.eye(12, dtype=F64))
    exact = torch.distributions.MultivariateNormal(p.mean.flatten(), noisy)
    value = exact.log_prob(y.T.flatten())
    torch.testing.assert_close(result.log_evidence, value, rtol=1e-9, atol=1e-9)
    (ours,) = torch.autograd.grad(result.log_evidence, likelihood.raw_dispersion)
    (theirs,) = torch.autograd.grad(value, likelihood.raw_dispersion)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)
    gain = torch.linalg.inv(noisy.detach())  # leave one out: the joint of a datum given the others
    a = gain @ (y.T.flatten() - p.mean.detach().flatten())
    for i in range(0, 12, 5):
        pick = torch.tensor([i, 12 + i])
        covariance = torch.linalg.inv(gain[pick][:, pick])
        mean = y[i] - covariance @ a[pick]
        expected = torch.distributions.MultivariateNormal(mean, covariance).log_prob(y[i])
        assert result.log_loo[i].item() == pytest.approx(expected.item(), abs=1e-7)


def gaussian_partition(theta):
    return 0.5 * theta.square().sum(-2)


def transpose(y):
    return y.mT


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_and_the_dispersion(clone):
    likelihood = ExponentialFamilyLikelihood(2, transpose, gaussian_partition, dispersion=0.7, num_targets=2).double()
    likelihood.dispersion = 0.6
    assert likelihood.dispersion.item() == pytest.approx(0.6, rel=1e-12)
    y, f = torch.randn(4, 2, dtype=F64), torch.randn(2, 4, dtype=F64)
    other = clone(likelihood)
    assert torch.equal(other.log_prob(y, f), likelihood.log_prob(y, f))
    likelihood.dispersion = 2.0
    assert not torch.equal(other.log_prob(y, f), likelihood.log_prob(y, f))


def test_errors_say_what_to_do():
    likelihood = ExponentialFamilyLikelihood(2, transpose, gaussian_partition, num_targets=2)
    with pytest.raises(ValueError, match=r"targets must have shape \(..., N, 2\); got shape \(3,\)"):
        likelihood.log_prob(torch.zeros(3), torch.zeros(2, 3))
    wrong = ExponentialFamilyLikelihood(2, transpose, gaussian_partition, num_targets=3)
    with pytest.raises(ValueError, match=r"P, N\) = \(..., 2, 4\), .*; it made \(3, 4\) of targets \(4, 3\)\.$"):
        wrong.log_prob(torch.zeros(4, 3), torch.zeros(2, 4))
    with pytest.raises(NotImplementedError, match="needs `conditional`"):
        likelihood(torch.zeros(2, 3))
    with pytest.raises(NotImplementedError, match=r"needs `conditional`. Set it.* Without it log_marginal"):
        likelihood(MultivariateNormal(torch.zeros(2, 3), torch.eye(3).expand(2, 3, 3)))
    with pytest.raises(ValueError, match="dispersion must be positive; got 0"):
        ExponentialFamilyLikelihood(2, transpose, gaussian_partition, dispersion=0.0)
    with pytest.raises(ValueError, match="num_latents must be at least 1"):
        ExponentialFamilyLikelihood(0, transpose, gaussian_partition)


def test_functions_of_wrong_shapes_are_refused():
    prior = MultivariateNormal(torch.zeros(2, 5, dtype=F64), torch.eye(5, dtype=F64).expand(2, 5, 5))
    targets = torch.rand(5, 2, dtype=F64)
    family = ExponentialFamilyLikelihood(2, lambda y: y.mT, torch.exp, num_targets=2)
    with pytest.raises(ValueError, match=r"log_partition must map .* it made \(2, 5\) of \(2, 5\). Sum over"):
        Laplace().infer(prior, family, targets)
    family = ExponentialFamilyLikelihood(
        2, lambda y: y.mT, lambda theta: theta.exp().sum(-2), lambda y, a: y, num_targets=2
    )
    with pytest.raises(ValueError, match=r"log_base must give \(..., N\), here \(2,\); got \(2, 2\)"):
        family.log_prob(targets[:2], torch.zeros(2, 2, dtype=F64))
    family.log_base = lambda y, a: -(y + 1).lgamma().sum()  # summed over all data, and would count once for each
    with pytest.raises(ValueError, match=r"log_base must give \(..., N\), here \(5,\); got \(\)"):
        family.log_prob(targets, torch.zeros(2, 5, dtype=F64))


@pytest.mark.parametrize("size", [5, 2])  # a square, too
def test_a_statistic_with_its_axes_the_wrong_way_round_is_told_so(size):
    family = ExponentialFamilyLikelihood(2, lambda y: torch.stack([y, y.square()], -1), gaussian_partition)
    y, f = torch.rand(size, dtype=F64), torch.zeros(2, size, dtype=F64)
    with pytest.raises(ValueError, match=r"the data last; it made \(\d, 2\) .* the other way round: return its .mT."):
        family.log_prob(y, f)
    right = ExponentialFamilyLikelihood(2, lambda y: torch.stack([y, y.square()], -2), gaussian_partition)
    assert right.log_prob(y, f).shape == (size,)


def test_a_link_with_its_axes_the_wrong_way_round_is_told_so():
    family = ExponentialFamilyLikelihood(2, transpose, gaussian_partition, link=transpose, num_targets=2)
    with pytest.raises(ValueError, match=r"the 5 data last; it made \(5, 2\) of \(2, 5\)\. .* return its .mT."):
        family.log_prob(torch.rand(5, 2, dtype=F64), torch.zeros(2, 5, dtype=F64))


def two_latents():
    covariance = torch.diag_embed(torch.tensor([[0.4, 0.9, 0.1], [0.3, 0.1, 0.6]], dtype=F64))
    return MultivariateNormal(torch.tensor([[0.3, -1.0, 0.5], [0.1, 0.4, 1.0]], dtype=F64), covariance)


def total(f):
    return f.sum(-2, keepdim=True)


def row(y):
    return y.unsqueeze(-2)


OF_THE_SUM = {  # of two latents: p(y | f), log-partition and log-base
    "normal": (
        lambda f: torch.distributions.Normal(f.sum(-2), 1.0),
        gaussian_partition,
        lambda y, a: -0.5 * (y.square() + math.log(2 * math.pi)),
    ),
    "counts": (
        lambda f: torch.distributions.Poisson(f.sum(-2).exp()),
        lambda theta: theta.exp().sum(-2),
        lambda y, a: -(y + 1).lgamma(),
    ),
}


@pytest.mark.parametrize("name", OF_THE_SUM)
def test_quantiles_where_the_conditional_has_a_cdf(name):
    """They are those of one latent with the mean and the variance of the sum."""
    conditional, log_partition, log_base = OF_THE_SUM[name]
    family, latents = ExponentialFamilyLikelihood(2, row, log_partition, log_base, link=total), two_latents()
    remedy = r"Set it, likelihood.conditional = .* nothing has to be trained again"
    with pytest.raises(NotImplementedError, match=remedy):
        family(latents)
    family.conditional = conditional
    predicted = family(latents)
    mean, variance = latents.mean.sum(-2), latents.variance.sum(-2)
    one_latent = CompoundDistribution(lambda f: with_cdf(conditional(f.unsqueeze(-2))), mean, variance)
    q = torch.tensor([[0.05], [0.99]], dtype=F64)
    expected = one_latent.icdf(q)
    torch.testing.assert_close(predicted.quantile(q), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(predicted.cdf(expected), one_latent.cdf(expected), rtol=1e-7, atol=1e-8)
    assert predicted.quantile(0.5).shape == (3,)


def test_no_quantiles_of_vectors_or_without_a_cdf():
    family = ExponentialFamilyLikelihood(
        2,
        transpose,
        gaussian_partition,
        num_targets=2,
        conditional=lambda f: torch.distributions.Independent(torch.distributions.Normal(f.mT, 1.0), 1),
    )
    with pytest.raises(
        NotImplementedError, match=r"a distribution of vectors, event shape \(2,\), has neither cdf nor quantiles"
    ):
        family(two_latents()).quantile(0.5)
    family = ExponentialFamilyLikelihood(
        2, transpose, gaussian_partition, conditional=lambda f: torch.distributions.VonMises(f[0], f[1].exp())
    )
    with pytest.raises(NotImplementedError, match=r"VonMises, p.* as `conditional` has it, has no cdf"):
        family(two_latents()).cdf(torch.zeros(3, dtype=F64))


def test_the_warning_of_dense_blocks_points_at_the_caller():
    family = ExponentialFamilyLikelihood(2, transpose, gaussian_partition, num_targets=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Laplace().infer(prior(2), family, torch.rand(6, 2, dtype=F64))
    assert [(w.category, w.filename) for w in caught] == [(DenseBlocksWarning, __file__)]


def test_a_vector_for_one_latent_says_what_is_wanted():
    family = ExponentialFamilyLikelihood(1, lambda y: y.unsqueeze(-2), lambda theta: theta.exp().squeeze(-2))
    covariance, targets = torch.eye(5, dtype=F64), torch.ones(5, dtype=F64)
    with pytest.raises(ValueError, match=r"got \(\). Give the mean and the kernel batch_shape=torch.Size\(\[1\]\)"):
        Laplace().infer(MultivariateNormal(torch.zeros(5, dtype=F64), covariance), family, targets)
    with pytest.raises(ValueError, match=r"targets of shape \(..., 5\) like the prior; got \(5, 1\)"):
        Laplace().infer(
            MultivariateNormal(torch.zeros(1, 5, dtype=F64), covariance.unsqueeze(0)), family, targets.unsqueeze(-1)
        )
