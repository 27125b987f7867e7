"""The low-rank-plus-diagonal posterior, against the dense one under the same prior."""

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

from gpext.inference.problem import Problem
from gpext.likelihoods import StudentTLikelihood
from gpext.posteriors import DensePrior, LowRankPrior, condition_dense, condition_low_rank
from gpext.sites import GaussianSites
from tests.members import F64


def random_prior(n=8, m=3, *, batch=(), seed=0, negative=True):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*batch, *shape, generator=generator, dtype=F64)

    mean, root, diagonal = randn(n), randn(n, m), 0.1 + randn(n).square()
    diagonal[..., 0] = 0.0  # as at an inducing point
    precision = randn(n).abs()
    if negative:
        largest = torch.linalg.eigvalsh(root @ root.mT + torch.diag_embed(diagonal))[..., -1:]
        precision = torch.where(torch.arange(n) % 3 == 0, -0.7 * precision.clamp_max(1) / largest, precision)
    return mean, root, diagonal, GaussianSites(randn(n), precision)


CASES = {"mixed": {}, "positive": {"negative": False}, "batch": {"batch": (2,)}, "wide": {"n": 3, "m": 5}}


@pytest.fixture(params=CASES)
def case(request):
    return random_prior(**CASES[request.param])


def both(mean, root, diagonal, sites):
    dense = condition_dense(mean, root @ root.mT + torch.diag_embed(diagonal), sites)
    return condition_low_rank(mean, root, diagonal, sites), dense


@pytest.mark.parametrize(
    "name",
    [
        "mean",
        "weights",
        "variance",
        "cavity_share",
        "covariance",
        "log_det",
        "log_normalizer",
        "log_peak",
        "leave_one_out",
    ],
)
def test_everything_agrees_with_the_dense_posterior(case, name):
    low_rank, dense = both(*case)
    assert bool(low_rank.positive_definite.all())
    torch.testing.assert_close(getattr(low_rank, name), getattr(dense, name), rtol=1e-9, atol=1e-9)


def test_products_and_predictions_agree(case):
    mean, root = case[:2]
    low_rank, dense = both(*case)
    vector = torch.ones_like(mean)
    torch.testing.assert_close(low_rank.covariance_times(vector), dense.covariance_times(vector), rtol=1e-9, atol=1e-9)
    new_root = root[..., :2, :].flip(-1)
    extra = torch.diag_embed(torch.full_like(new_root[..., 0], 0.3))
    there = low_rank.predict(mean[..., :2], new_root, to_linear_operator(extra))
    exact = dense.predict(mean[..., :2], root @ new_root.mT, new_root @ new_root.mT + extra)
    torch.testing.assert_close(there.mean, exact.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(there.covariance_matrix, exact.covariance_matrix, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("respond", [False, True])
def test_derivatives_agree_with_those_through_the_dense_covariance(case, respond):
    mean, root, diagonal, sites = case
    parts = [part.clone().requires_grad_() for part in (mean, root, diagonal)]
    response = torch.linspace(-1, 1, mean.size(-1), dtype=F64).expand(mean.shape) if respond else None
    low_rank = LowRankPrior(*parts)
    dense = DensePrior(parts[0], parts[1] @ parts[1].mT + torch.diag_embed(parts[2]))
    for prior in (low_rank, dense):
        assert bool((prior.follow(prior.condition(sites), response) == 0).all())
    found, exact = (
        torch.autograd.grad(prior.follow(prior.condition(sites), response).sum(), parts) for prior in (low_rank, dense)
    )
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("which", ["a conditional variance", "the whole"])
def test_says_where_there_is_no_posterior(which):
    mean, root, diagonal, sites = random_prior()
    precision = sites.precision.clone()
    if which == "the whole":
        diagonal, precision[1] = torch.zeros_like(diagonal), -1e3
    else:
        precision[1] = -1.5 / diagonal[1]
    assert not bool(condition_low_rank(mean, root, diagonal, GaussianSites(sites.shift, precision)).positive_definite)


def test_a_problem_keeps_the_structure_of_its_prior():
    mean, root, diagonal, _ = random_prior()
    likelihood, y = StudentTLikelihood().double(), torch.zeros(8, dtype=F64)

    def problem(prior, jitter=0.0):
        return Problem.of(prior, likelihood, y, jitter)

    prior = LowRankPrior(mean, root, diagonal)
    distribution = prior.distribution
    torch.testing.assert_close(prior.variance, distribution.variance)
    kept = problem(distribution, 0.5).prior
    assert isinstance(kept, LowRankPrior)
    torch.testing.assert_close(kept.diagonal, diagonal + 0.5)
    dense = MultivariateNormal(mean, to_linear_operator(distribution.covariance_matrix))
    assert isinstance(problem(dense).prior, DensePrior)
    bad = LowRankPrior(mean, root, diagonal * torch.nan).distribution
    with pytest.raises(ValueError, match="NaN or infinite"):
        problem(bad)
