"""Covariances of sparse vectors by the fronts in which they meet, against dense matrices."""

import pytest
import torch

from gpext.linalg import dissection, sparse_quadratics
from gpext.linalg.dissection import Dissection
from gpext.linalg.sparse_factor import columns_at, factorise_sparse
from gpext.linalg.sparse_quadratics import sparse_covariances
from tests.members import F64

N, S = 120, 90


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(dissection, "_LEAF", 4)
    monkeypatch.setattr(sparse_quadratics, "_COLUMNS", 3)
    monkeypatch.setattr(sparse_quadratics, "_WORTHWHILE", 1)


def problem(*, batch=(), regions=1, together=None, width=3):
    """A tree, a factor of Q, Q^-1, and groups of near points."""
    generator = torch.Generator().manual_seed(0)
    points, region = torch.rand(N, 2, generator=generator, dtype=F64), torch.arange(N) % regions
    apart = 9.0 * (region.unsqueeze(-1) != region)
    rows = (torch.cdist(points, points) + apart).argsort(-1)[:, :4]
    tree = Dissection.of(points, rows, region=region, together=together)
    weights, scale = torch.randn(*batch, N, 4, generator=generator, dtype=F64), torch.ones(N, dtype=F64)
    factor = factorise_sparse(tree, weights, scale, scale)
    dense = columns_at(rows, weights, N)
    Q = dense @ dense.mT + torch.eye(N, dtype=F64)
    new = torch.rand(S, 2, generator=generator, dtype=F64)
    return tree, factor, torch.linalg.inv(Q), torch.cdist(new, points).argsort(-1)[:, :width], generator


@pytest.mark.parametrize(
    "options",
    [{}, {"batch": (2,)}, {"regions": 3}, {"together": True}, {"width": 1}, {"width": N}],
    ids=str,
)
@pytest.mark.parametrize("vectors", [1, 2, 5])
def test_they_are_those_of_the_dense_inverse(options, vectors):
    _, factor, inverse, near, generator = problem(**options)
    index = torch.stack([near.roll(c, 0)[:, : near.size(-1)] if c == 4 else near for c in range(vectors)], 1)
    entries = torch.randn(S, vectors, near.size(-1), generator=generator, dtype=F64)
    columns = columns_at(index.flatten(0, 1), entries.flatten(0, 1), N)
    expected = (columns.mT @ inverse @ columns).unflatten(-1, (S, vectors)).unflatten(-3, (S, vectors))
    expected = expected.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    torch.testing.assert_close(sparse_covariances(factor, index, entries), expected, rtol=1e-9, atol=1e-9)
    entries = entries.expand(2, *entries.shape) * torch.tensor([1.0, 2.0], dtype=F64).view(-1, 1, 1, 1)
    found = sparse_covariances(factor, index, entries)
    torch.testing.assert_close(found[1], 4 * expected if expected.dim() == 3 else 4 * expected[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("regions", [1, 3])
def test_fronts_meet_at_the_first_that_holds_all(regions):
    """On the way up from the front that eliminates the first of a group, by what each front and those below it hold."""
    tree, _, _, near, _ = problem(regions=regions)
    held = [set(front.own.tolist()) | set(front.boundary.tolist()) for front in tree.fronts]
    for i, front in enumerate(tree.fronts):
        if front.parent is not None:
            held[front.parent] |= held[i] - set(front.boundary.tolist())
    level = [front.level for front in tree.fronts]
    for group, top in zip(near.tolist(), tree.meeting(near).tolist(), strict=True):
        at = max((int(tree.node[i]) for i in group), key=level.__getitem__)
        while at is not None and not set(group) <= held[at]:
            at = tree.fronts[at].parent
        assert top == (-1 if at is None else at)


def test_few_fronts_are_eliminated_for_a_near_group():
    tree, _, _, near, _ = problem()
    meeting = tree.meeting(near)
    ways = [len(tree.ways(group, top)) for group, top in zip(near, meeting.tolist(), strict=True)]
    assert sum(ways) < 0.5 * sum(len(tree.paths(group)) for group in near)


def test_derivatives_in_the_entries():
    _, factor, _, near, generator = problem()
    entries = torch.randn(S, 2, 3, generator=generator, dtype=F64, requires_grad=True)
    index = near.unsqueeze(1).expand(-1, 2, -1)
    assert torch.autograd.gradcheck(lambda e: sparse_covariances(factor, index, e)[::9].sum(0), entries, fast_mode=True)
