"""Cholesky factors by nested dissection, against dense matrices."""

import pytest
import torch

from gpext.linalg import dissection
from gpext.linalg.dissection import Dissection
from gpext.linalg.sparse_factor import columns_at, factorise_sparse
from tests.members import F64

N = 60


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch):
    monkeypatch.setattr(dissection, "_LEAF", 4)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def problem(*, batch=(), parts=1, seed=0, named=False, together=None):
    """A tree, the parts of Q, and Q: rows of near points, of several clouds of points that no row connects.

    With `named` the tree is told which they are.
    """
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(N, 2, generator=generator, dtype=F64) + 5 * (torch.arange(N) % parts).unsqueeze(-1)
    near = torch.cdist(points, points).argsort(-1)[:, :5]
    pairs = torch.stack([torch.arange(N), near[:, 1]], -1)
    tree = Dissection.of(points, near, pairs, region=torch.arange(N) % parts if named else None, together=together)
    weights, scale = randn(*batch, N, 5, seed=1), 1 + randn(*batch, N, seed=2).square()
    diagonal = 0.5 - randn(*batch, N, seed=3).square().clamp_max(1)
    blocks = randn(*batch, N, 2, 2, seed=4)
    blocks = 0.1 * (blocks + blocks.mT)
    rows = columns_at(near, weights, N).mT
    Q = (rows.mT * scale.unsqueeze(-2)) @ rows + torch.diag_embed(diagonal)
    for i, (a, b) in enumerate(pairs.tolist()):
        Q[..., [[a], [b]], [a, b]] += blocks[..., i, :, :]
    shift = 0.1 - torch.linalg.eigvalsh(Q).amin().clamp_max(0)
    return tree, (weights, scale, diagonal + shift, blocks), Q + shift * torch.eye(N, dtype=F64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch": (2,)},
        {"parts": 3},
        {"parts": N},
        {"parts": 3, "named": True},
        {"together": True},
        {"together": True, "batch": (2,)},
        {"together": True, "parts": 3, "named": True},
    ],
    ids=str,
)
def test_everything_is_that_of_the_dense_matrix(options):
    tree, parts, Q = problem(**options)
    assert len(tree.fronts) > 5
    factor = factorise_sparse(tree, *parts)
    assert bool(factor.positive_definite.all())
    assert factor.positive_definite.shape == Q.shape[:-2]
    inverse, right = torch.linalg.inv(Q), randn(*Q.shape[:-2], N, 3, seed=5)
    torch.testing.assert_close(factor.log_det, torch.logdet(Q))
    torch.testing.assert_close(factor.solve(right), inverse @ right)
    one = randn(N, 3, seed=6)  # of all of a batch
    torch.testing.assert_close(factor.solve(one), inverse @ one)
    half = factor.half_solve(torch.eye(N, dtype=F64))
    torch.testing.assert_close(half.mT @ half, inverse)
    torch.testing.assert_close(factor.transposed_half_solve(right), half.mT @ right)
    seen = torch.zeros(N + 1, dtype=torch.bool)
    around = torch.nn.functional.pad(inverse, (0, 1, 0, 1))
    for batch, Z in factor.inverse_entries():
        index = torch.cat([batch.own, batch.boundary], -1)
        there = (index < N).unsqueeze(-1) & (index < N).unsqueeze(-2)
        found = Z[..., : index.size(-1), : index.size(-1)]
        torch.testing.assert_close(found[..., there], around[..., index.unsqueeze(-1), index.unsqueeze(-2)][..., there])
        seen[batch.own] = True
    assert bool(seen[:N].all())
    assert options.get("together", False) == bool(seen[N])


@pytest.mark.parametrize("together", [False, True])
def test_few_columns_visit_their_own_paths_alone(together):
    tree, parts, Q = problem(together=together)
    factor = factorise_sparse(tree, *parts)
    index = tree.fronts[0].own[:1]
    right = torch.zeros(N, 1, dtype=F64).index_fill(0, index, 1.0)
    assert len(tree.paths(index)) < len(tree.fronts)
    assert len(tree.batches_on_paths(index)) < len(tree.batches)
    torch.testing.assert_close(factor.half_solve(right, index).square().sum(), torch.linalg.inv(Q)[index, index].sum())


@pytest.mark.parametrize("which", range(0, N, 17))
def test_an_indefinite_matrix_is_reported(which):
    tree, (weights, scale, diagonal, blocks), Q = problem()
    diagonal = diagonal.clone()
    diagonal[which] -= 1 / torch.linalg.inv(Q)[which, which] + 1e-6  # of all, the least that makes it so
    assert not bool(factorise_sparse(tree, weights, scale, diagonal, blocks).positive_definite)
    diagonal[which] += 2e-6
    assert bool(factorise_sparse(tree, weights, scale, diagonal, blocks).positive_definite)


def test_one_of_a_batch_may_be_indefinite():
    tree, (weights, scale, diagonal, blocks), _ = problem(batch=(2,))
    diagonal = diagonal.clone()
    diagonal[1] -= 100.0
    assert factorise_sparse(tree, weights, scale, diagonal, blocks).positive_definite.tolist() == [True, False]


def test_a_single_index():
    tree = Dissection.of(torch.zeros(1, 2), torch.zeros(1, 3, dtype=torch.long))
    one, zero = torch.ones(1, dtype=F64), torch.tensor([[1.0, 0.0, 0.0]], dtype=F64)
    factor = factorise_sparse(tree, zero, one, one)
    torch.testing.assert_close(factor.log_det, torch.tensor(2.0, dtype=F64).log())


def test_a_separator_grows_with_the_root_of_the_number_of_points(monkeypatch):
    monkeypatch.setattr(dissection, "_LEAF", 50)
    work = []
    for n in (1000, 4000):
        points = torch.rand(n, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
        near = torch.cdist(points, points).topk(6, largest=False).indices
        work.append(Dissection.of(points, near).work)
    assert work[1] / work[0] < 4**1.7  # n^(3/2) and the fringe of leaves; 64 for a dense factor


def test_regions_have_trees_of_their_own():
    points = torch.rand(N, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    region = torch.arange(N) % 3
    near = torch.cdist(points, points).masked_fill(region.unsqueeze(-1) != region, torch.inf).argsort(-1)[:, :5]
    one, several = Dissection.of(points, near), Dissection.of(points, near, region=region)
    assert several.work < one.work  # which has to separate what overlaps
    for front in several.fronts:
        assert len(region[torch.cat([front.own, front.boundary])].unique()) <= 1


def test_a_separator_is_the_smallest_cover_of_the_connections_across_a_cut():
    """Against every subset: of few points, some in large groups, some connected to one other alone."""
    generator = torch.Generator().manual_seed(0)
    active = torch.ones(10, dtype=torch.bool)
    active[[2, 7]] = False
    upper = torch.arange(10) >= 5
    sizes = []
    for _ in range(30):
        groups = torch.randint(10, (4, 3), generator=generator)
        pairs = torch.randint(10, (3, 2), generator=generator)
        lists = [groups.numpy(), pairs.numpy()]
        found = torch.from_numpy(dissection._smallest_cover(upper.numpy(), active.numpy(), lists))
        edges = [
            {int(i), int(j)}
            for group in (*groups, *pairs)
            for i in group
            for j in group
            if active[i] and active[j] and upper[i] != upper[j]
        ]
        covers = [bits for bits in range(2**10) if all(any(bits >> i & 1 for i in edge) for edge in edges)]
        assert all(bool(found[list(edge)].any()) for edge in edges)
        assert int(found.sum()) == min(bits.bit_count() for bits in covers)
        assert not bool((found & ~active).any())
        sizes.append(int(found.sum()))
    assert len(set(sizes)) > 2
