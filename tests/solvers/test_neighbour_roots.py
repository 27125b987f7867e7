"""Roots by nearest neighbours, and preconditioners with them: against inverses and divergences of dense matrices."""

import pytest
import torch

from gpext.solvers import NeighbourPreconditioner, partial_cholesky
from gpext.solvers import neighbour_roots as roots
from gpext.solvers.choose_preconditioner import with_neighbours
from gpext.solvers.neighbour_roots import data_with_neighbours, neighbour_root, neighbours_before

F64 = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def rough(n=150, d=3, lengthscale=1.0, dtype=F64):
    """Return inputs and a Matern-3/2 matrix."""
    x = torch.rand(n, d, generator=generator(), dtype=F64)
    r = 3**0.5 * torch.cdist(x, x) / lengthscale
    return x, ((1 + r) * torch.exp(-r)).to(dtype)


def parts(K, rank, noise=0.05):
    """Return L, the residual diagonal, and noise that differs from datum to datum."""
    L = partial_cholesky(lambda i: K[:, i], K.diagonal(), rank=rank, generator=generator())
    left = (K.diagonal() - L.square().sum(-1)).clamp_min(0)
    return L, left, noise * (0.5 + torch.rand(len(K), generator=generator(1), dtype=F64)).to(K)


def entries_of(K):
    return lambda i, j: K[i, j]


def dense(root, n):
    return root(torch.eye(n, dtype=root.rows.entries.dtype))


def test_rows_whiten_a_datum_by_its_neighbours_and_all_before_make_the_inverse():
    _, K = rough(40)
    L, left, noise = parts(K, 8)
    V = K - L @ L.mT + torch.diag(noise)
    order = torch.randperm(40, generator=generator(2))
    place = order.argsort()
    neighbours = torch.arange(40).unsqueeze(-1).repeat(1, 39)
    for i in range(40):
        before = order[: place[i]]
        neighbours[i, : len(before)] = before
    all_before = neighbour_root(entries_of(K), L, left, noise, neighbours)
    G = dense(all_before, 40)
    torch.testing.assert_close(G.mT @ G, torch.linalg.inv(V), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(all_before.log_det, -0.5 * torch.logdet(V), rtol=1e-10, atol=1e-10)
    few = neighbour_root(entries_of(K), L, left, noise, neighbours[:, :3])
    G = dense(few, 40)
    torch.testing.assert_close(few.transposed(torch.eye(40, dtype=F64)), G.mT, rtol=0, atol=0)
    torch.testing.assert_close((G @ V @ G.mT).diagonal(), torch.ones(40, dtype=F64), rtol=1e-12, atol=0)
    shares = []
    for i in range(40):
        N = order[: min(int(place[i]), 3)]
        a = torch.linalg.solve(V[N][:, N], V[N, i])
        expected = torch.zeros(40, dtype=F64)
        expected[i], expected[N] = 1.0, -a
        expected /= (V[i, i] - a @ V[N, i]).sqrt()
        torch.testing.assert_close(G[i], expected, rtol=1e-10, atol=1e-12)
        shares.append(float(a @ V[N, i] / V[i, i]))
    assert few.explained == pytest.approx(sum(shares) / 39, rel=1e-10)  # the first has no neighbours
    G.requires_grad_()  # no other entries in these places are better: the divergence is stationary
    divergence = 0.5 * (G @ V @ G.mT).trace() - G.diagonal().log().sum()
    (slope,) = torch.autograd.grad(divergence, G)
    assert float((slope * (G != 0)).abs().max()) < 1e-9


@pytest.mark.parametrize("d", [1, 3, 12])
def test_neighbours_come_before_and_are_nearly_the_nearest(d):
    x = torch.randn(500, d, generator=generator(), dtype=F64) * torch.linspace(1, 0.01, d, dtype=F64)
    order = torch.randperm(500, generator=generator(1))[:450]
    neighbours, m = neighbours_before(x, order), roots.NUM_NEIGHBOURS
    place = torch.full((500,), 1000).scatter(0, order, torch.arange(450))
    own = torch.arange(500).unsqueeze(-1)
    is_one = neighbours != own
    assert not is_one[place == 1000].any()  # the others have none
    assert bool((place[neighbours] < place.unsqueeze(-1))[is_one].all())
    assert bool((is_one[order].sum(-1)[: 8 * m] >= torch.arange(8 * m).clamp_max(m)).all())
    assert float(is_one[order].sum(-1).double().mean()) > 0.97 * m
    distance = torch.cdist(x, x)
    for i in order[50:].tolist():
        found = neighbours[i][is_one[i]]
        assert len(found.unique()) == len(found)
        before = distance[i, order[: place[i]]].sort().values
        assert float(distance[i, found].max()) <= 2.1 * float(before[2 * m])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_few_have_few_neighbours(number):
    x = torch.randn(4, 12, generator=generator(), dtype=F64)
    found = neighbours_before(x, torch.tensor([2, 0])[:number])
    expected = torch.arange(4).unsqueeze(-1).repeat(1, roots.NUM_NEIGHBOURS)
    if number == 2:
        expected[0, 0] = 2
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rank", [0, 30])
def test_the_preconditioner_is_the_inverse_and_the_determinant_of_what_it_says(rank):
    x, K = rough()
    L, left, noise = parts(K, rank)
    P = with_neighbours(entries_of(K), L, left, noise, x, generator=generator())
    assert isinstance(P, NeighbourPreconditioner)
    assert P.rank == rank
    G = dense(P.rest, 150)
    says = L @ L.mT + torch.linalg.inv(G.mT @ G)
    r = torch.randn(2, 150, 3, generator=generator(), dtype=F64)
    torch.testing.assert_close(P(r), torch.linalg.solve(says, r), rtol=1e-10, atol=1e-10)
    inverse = P(torch.eye(150, dtype=F64))
    torch.testing.assert_close(inverse, inverse.mT, rtol=1e-12, atol=1e-12)
    assert float(torch.linalg.eigvalsh(inverse)[0]) > 0
    torch.testing.assert_close(P.log_det, torch.logdet(says), rtol=1e-11, atol=1e-10)
    A = K + torch.diag(noise)
    one = P.whitened(lambda v: says @ v)(torch.eye(150, dtype=F64))
    torch.testing.assert_close(one, torch.eye(150, dtype=F64), rtol=1e-9, atol=1e-9)
    whitened = P.whitened(lambda v: A @ v)(torch.eye(150, dtype=F64))
    torch.testing.assert_close(torch.logdet(whitened) + P.log_det, torch.logdet(A), rtol=1e-10, atol=1e-8)
    low_rank = L @ L.mT + torch.diag(noise)

    def divergence(Q):  # of N(0, A) from N(0, Q)
        return torch.linalg.solve(Q, A).trace() - 150 - torch.logdet(A) + torch.logdet(Q)

    assert divergence(says) < 0.5 * divergence(low_rank)


def test_float32_and_groups_of_any_size(monkeypatch):
    x, K = rough()
    L, left, noise = parts(K, 20)
    P = with_neighbours(entries_of(K), L, left, noise, x, generator=generator())
    monkeypatch.setattr(roots, "_NUMBERS", 1000)
    by_few = with_neighbours(entries_of(K), L, left, noise, x, generator=generator())
    torch.testing.assert_close(by_few.root, P.root, rtol=1e-12, atol=1e-12)
    single = with_neighbours(
        entries_of(K.float()), L.float(), left.float(), noise.float(), x.float(), generator=generator()
    )
    r = torch.ones(150, 2)
    assert single(r).dtype == torch.float32
    torch.testing.assert_close(single(r).double(), P(r.double()), rtol=1e-3, atol=1e-3)


def test_who_has_nothing_left_has_no_neighbours():
    x, K = rough(30)
    x, K = torch.cat([x, x]), K.repeat(2, 2)  # each twice
    L, left, noise = parts(K, 30)
    assert float(left.max()) < 1e-9
    assert len(data_with_neighbours(left, noise, generator())) == 0
    P = with_neighbours(entries_of(K), L, left, noise, x, generator=generator())
    r = torch.randn(60, 1, generator=generator(), dtype=F64)
    torch.testing.assert_close(P(r), torch.linalg.solve(K + torch.diag(noise), r), rtol=1e-8, atol=1e-8)
    L, left, noise = parts(K, 10)
    P = with_neighbours(entries_of(K), L, left, noise, x, generator=generator())
    assert bool(torch.linalg.eigvalsh(P(torch.eye(60, dtype=F64)))[0] > 0)


def test_a_block_that_is_not_definite_by_rounding_stays_alone():
    K = torch.ones(4, 4, dtype=F64)
    K[0, 1] = K[1, 0] = 1.5  # not a covariance, as with rounding
    neighbours = torch.tensor([[0], [0], [0], [3]])
    noise = torch.full((4,), 0.1, dtype=F64)
    root = neighbour_root(entries_of(K), K[:, :0], K.diagonal(), noise, neighbours)
    G = dense(root, 4)
    assert torch.equal(G[1], torch.tensor([0.0, 1.1**-0.5, 0.0, 0.0], dtype=F64))
    assert float(G[2, 0]) != 0
