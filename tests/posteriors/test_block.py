"""Unstructured blocks against structured ones, which are tested separately, and against explicit inverses."""

import pytest
import torch

from gpext.posteriors import condition_blocks, condition_coupled
from gpext.sites import BlockSites, CoupledSites
from tests.posteriors.test_coupled import F64, dense, problem


def unstructured(sites):
    w = sites.direction
    coupled = sites.coupling[..., None, None, :] * w.unsqueeze(-2) * w.unsqueeze(-3)
    blocks = coupled + torch.diag_embed(sites.precision.mT).movedim(-3, -1)
    return BlockSites(sites.shift, blocks)


def both(latents, size, *batch, kind="mixed"):
    mean, covariance, sites = problem(latents, size, *batch, kind=kind)
    one = condition_blocks(mean, covariance, unstructured(sites))
    return one, condition_coupled(mean, covariance, sites), (mean, covariance, sites)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["multinomial", "positive", "mixed"])
@pytest.mark.parametrize("latents", [2, 4])
def test_agrees_with_the_structured_posterior(latents, kind):
    ours, theirs, (mean, covariance, sites) = both(latents, 20, kind=kind)
    for name in ("positive_definite", "mean", "weights", "blocks", "variance", "log_det", "log_normalizer"):
        close(getattr(ours, name), getattr(theirs, name))
    for a, b in zip(ours.gradient + ours.leave_one_out, theirs.gradient + theirs.leave_one_out, strict=True):
        close(a, b)
    x = torch.randn(latents, 20, dtype=F64, generator=torch.Generator().manual_seed(1))
    close(ours.covariance_times(x), theirs.covariance_times(x))
    close(ours.distribution(F64).mean, theirs.distribution(F64).mean)
    close(ours.distribution(F64).covariance_matrix, theirs.distribution(F64).covariance_matrix)
    close(ours.distribution(F64).covariance_matrix, dense(mean, covariance, sites)[1])


def test_predictions_and_batches():
    mean, covariance, sites = problem(3, 10, 2, kind="mixed")
    some = CoupledSites(*(t[..., :8] for t in (sites.shift, sites.precision, sites.coupling, sites.direction)))
    train = mean[..., :8], covariance[..., :8, :8]
    there = mean[..., 8:], covariance[..., :8, 8:], covariance[..., 8:, 8:]
    ours = condition_blocks(*train, unstructured(some)).predict(*there)
    theirs = condition_coupled(*train, some).predict(*there)
    close(ours.mean, theirs.mean)
    close(ours.covariance_matrix, theirs.covariance_matrix)


def test_sites_are_those_of_the_structured_kind():
    _, _, sites = problem(3, 7, kind="mixed")
    ours = unstructured(sites)
    f, blocks = torch.randn(3, 7, dtype=F64), torch.randn(3, 3, 7, dtype=F64)
    blocks = blocks + blocks.transpose(0, 1)
    close(ours.times(f), sites.times(f))
    close(ours.expected_log(f, blocks), sites.expected_log(f, blocks))
    none = BlockSites(torch.zeros_like(ours.shift), torch.zeros_like(ours.precision))
    chosen = none.choose(ours, torch.tensor(True))
    close(chosen.precision, ours.precision)
    with pytest.raises(ValueError, match=r"precision \(\.\.\., D, D, N\); got \(3, 7\) and \(3, 7\)"):
        BlockSites(f, f)


def test_says_so_if_there_is_no_posterior():
    mean, covariance, sites = problem(2, 9)
    bad = CoupledSites(sites.shift, sites.precision, 4 * sites.coupling, sites.direction)
    assert not bool(condition_blocks(mean, covariance, unstructured(bad)).positive_definite)
