"""Low-rank-plus-diagonal priors of several latents with coupled sites, against the dense posterior."""

import pytest
import torch
from linear_operator import to_linear_operator

from gpext.posteriors import DensePrior, LowRankPrior, condition_low_rank_joint
from gpext.posteriors.joint import precision_blocks
from gpext.sites import BlockSites, CoupledSites
from tests.members import F64


def problem(latents, size=9, rank=3, *, batch=(), kind="coupled", seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*batch, *shape, generator=generator, dtype=F64)

    mean, root, diagonal = randn(latents, size), randn(latents, size, rank), 0.1 + randn(latents, size).square()
    diagonal[..., 0] = 0.0  # as at an inducing point
    shift, w = randn(latents, size), randn(latents, size).softmax(-2)
    if kind == "coupled":  # a softmax, singular
        return mean, root, diagonal, CoupledSites(shift, 3 * w, -3 * torch.ones_like(w[..., 0, :]), w)
    factor = 0.5 * randn(size, latents, latents)
    precision = (factor @ factor.mT).movedim(-3, -1)
    if kind == "indefinite":
        precision[..., 0, 0, ::3] -= 0.02
    return mean, root, diagonal, BlockSites(shift, precision)


CASES = {
    "two": {"latents": 2},
    "three": {"latents": 3},
    "blocks": {"latents": 3, "kind": "blocks"},
    "indefinite": {"latents": 2, "kind": "indefinite"},
    "batch": {"latents": 2, "batch": (2,)},
    "wide": {"latents": 2, "size": 3, "rank": 5},
}


@pytest.fixture(params=CASES)
def case(request):
    return problem(**CASES[request.param])


def both(mean, root, diagonal, sites):
    dense = DensePrior(mean, root @ root.mT + torch.diag_embed(diagonal))
    return condition_low_rank_joint(mean, root, diagonal, sites), dense.condition(sites)


@pytest.mark.parametrize(
    "name", ["mean", "weights", "variance", "blocks", "log_det", "log_normalizer", "leave_one_out"]
)
def test_everything_agrees_with_the_dense_posterior(case, name):
    low_rank, dense = both(*case)
    assert bool(low_rank.positive_definite.all())
    torch.testing.assert_close(getattr(low_rank, name), getattr(dense, name), rtol=1e-9, atol=1e-9)


def test_products_predictions_and_the_whole_distribution_agree(case):
    mean, root = case[:2]
    low_rank, dense = both(*case)
    vector = torch.linspace(-1, 1, mean.size(-1), dtype=F64).expand(mean.shape)
    torch.testing.assert_close(low_rank.covariance_times(vector), dense.covariance_times(vector), rtol=1e-9, atol=1e-9)
    new_root = root[..., :2, :].flip(-1)
    extra = torch.diag_embed(torch.full_like(new_root[..., 0], 0.3))
    there = low_rank.predict(mean[..., :2], new_root, to_linear_operator(extra))
    exact = dense.predict(mean[..., :2], root @ new_root.mT, new_root @ new_root.mT + extra)
    for ours, theirs in ((there, exact), (low_rank.distribution(F64), dense.distribution(F64))):
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(ours.covariance_matrix, theirs.covariance_matrix, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("respond", [False, True])
def test_derivatives_agree_with_those_through_the_dense_covariance(case, respond):
    mean, root, diagonal, sites = case
    parts = [part.clone().requires_grad_() for part in (mean, root, diagonal)]
    response = torch.linspace(-1, 1, mean.size(-1), dtype=F64).expand(mean.shape) if respond else None
    low_rank = LowRankPrior(*parts)
    dense = DensePrior(parts[0], parts[1] @ parts[1].mT + torch.diag_embed(parts[2]))
    found, exact = (
        torch.autograd.grad(prior.follow(prior.condition(sites), response).sum(), parts) for prior in (low_rank, dense)
    )
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("which", ["a datum", "the whole"])
def test_says_where_there_is_no_posterior(which):
    mean, root, diagonal, sites = problem(2, kind="blocks")
    precision = precision_blocks(sites).clone()
    if which == "the whole":
        diagonal, precision[0, 0, 1] = torch.zeros_like(diagonal), -1e3
    else:
        precision[0, 0, 1] = -1.5 / diagonal[0, 1]
    assert not bool(condition_low_rank_joint(mean, root, diagonal, BlockSites(sites.shift, precision)).is_proper)
