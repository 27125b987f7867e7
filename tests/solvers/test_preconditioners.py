"""Low-rank preconditioners: their algebra against inverses, and the steps they save."""

import pytest
import torch

from gpext.solvers import LowRankPreconditioner, conjugate_gradients, nystrom, partial_cholesky

F64 = torch.float64


def matrix(n=300, lengthscale=1.0, seed=0):
    x = 3 * torch.rand(n, 3, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return torch.exp(-0.5 * torch.cdist(x, x).square() / lengthscale**2)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("pivots", ["random", "largest"])
def test_a_partial_factor_leaves_a_positive_semidefinite_rest(pivots):
    K = matrix()
    last = torch.inf
    for rank in (10, 50, 120):
        L = partial_cholesky(lambda i: K[:, i], K.diagonal(), rank=rank, pivots=pivots, generator=generator())
        assert L.size(-1) <= rank
        rest = torch.linalg.eigvalsh(K - L @ L.mT)
        assert float(rest[0]) > -1e-9
        best = torch.linalg.eigvalsh(K)[:-rank].sum()  # the minimum for a factor of this rank
        assert best <= rest.sum() < min(last, 20 * best + 1e-6)
        last = rest.sum()


def test_greedy_pivots_are_those_of_the_textbook():
    K = matrix(30)
    L = partial_cholesky(lambda i: K[:, i], K.diagonal(), rank=8, pivots="largest")
    rest, order = K.clone(), []
    for _ in range(8):
        i = int(rest.diagonal().argmax())
        order.append(i)
        rest = rest - rest[:, [i]] @ rest[[i]] / rest[i, i]
    torch.testing.assert_close(K - L @ L.mT, rest, rtol=1e-8, atol=1e-9)


def test_nystrom_is_the_projection_it_says():
    K = matrix(100)
    L = nystrom(lambda v: K @ v, 100, 20, like=K, generator=generator())
    Q = torch.linalg.qr(torch.randn(100, 20, dtype=F64, generator=generator())).Q
    expected = K @ Q @ torch.linalg.inv(Q.mT @ K @ Q) @ Q.mT @ K
    torch.testing.assert_close(L @ L.mT, expected, rtol=1e-6, atol=1e-7)
    assert float(torch.linalg.eigvalsh(K - L @ L.mT)[0]) > -1e-9


def test_its_inverse_and_determinant():
    K, noise = matrix(60), 0.1 + torch.rand(60, generator=generator(), dtype=F64)
    L = partial_cholesky(lambda i: K[:, i], K.diagonal(), rank=15, generator=generator())
    P = LowRankPreconditioner.of(L, noise)
    dense = L @ L.mT + torch.diag(noise)
    r = torch.randn(2, 60, 3, generator=generator(), dtype=F64)
    torch.testing.assert_close(P(r), torch.linalg.solve(dense, r), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(P.log_det, torch.logdet(dense), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="positive noise; the smallest is 0"):
        LowRankPreconditioner.of(L, 0 * noise)


@pytest.mark.parametrize("lengthscale", [0.5, 1.5])
def test_the_rank_that_is_chosen_saves_most_of_the_steps(lengthscale):
    K, noise = matrix(800, lengthscale), 1e-2
    A = K + noise * torch.eye(800, dtype=F64)
    b = torch.randn(800, 2, generator=generator(), dtype=F64)
    L = partial_cholesky(lambda i: K[:, i], K.diagonal(), noise=noise, generator=generator())
    P = LowRankPreconditioner.of(L, torch.full((800,), noise, dtype=F64))
    assert 0 < P.rank < 800
    steps = [conjugate_gradients(lambda v: A @ v, b, precondition=p).num_steps for p in (P, None)]
    assert steps[0] < steps[1] / 4


def test_one_for_few_solves_has_fewer_columns():
    K = matrix(800, 0.5)
    ranks = [
        partial_cholesky(
            lambda i: K[:, i], K.diagonal(), noise=1e-2, is_for_few_solves=few, generator=generator()
        ).size(-1)
        for few in (True, False)
    ]
    assert 100 <= ranks[0] < ranks[1] < 800


def test_duplicates_and_a_single_datum():
    K = matrix(50)
    K = torch.cat([torch.cat([K, K], 0), torch.cat([K, K], 0)], 1)
    L = partial_cholesky(lambda i: K[:, i], K.diagonal(), rank=100, generator=generator())
    torch.testing.assert_close(L @ L.mT, K, rtol=0, atol=1e-6)
    one = torch.full((1, 1), 2.0, dtype=F64)
    torch.testing.assert_close(partial_cholesky(lambda i: one[:, i], one.diagonal(), noise=0.1).square(), one)
    with pytest.raises(ValueError, match="expected a rank, or the noise"):
        partial_cholesky(lambda i: K[:, i], K.diagonal())
