"""The automatic preconditioner: neighbours where they save steps, and nowhere else."""

from functools import partial

import pytest
import torch

from gpext.solvers import (
    LowRankPreconditioner,
    NeighbourPreconditioner,
    automatic_preconditioner,
    choose_preconditioner,
    conjugate_gradients,
    estimator_diagnostics,
    partial_cholesky,
)
from gpext.solvers.choose_preconditioner import share_of_steps, with_neighbours
from tests.solvers.test_neighbour_roots import entries_of, generator, rough
from tests.solvers.test_unbiased_cg import enumerated

F64 = torch.float64
N = 1000


@pytest.fixture
def cheap(monkeypatch):
    """Make neighbours cost nothing: at the sizes of tests they would never pay."""
    monkeypatch.setattr(choose_preconditioner, "_TRIAL", 0.0)
    monkeypatch.setattr(choose_preconditioner, "_GROUPED", 0.0)


def system(profile, lengthscale, noise, n=N):
    x = torch.rand(n, 5, generator=generator(), dtype=F64)
    x = (x - x.mean(0)) / x.std(0)
    r = torch.cdist(x, x) / lengthscale
    if profile == "rbf":
        K = torch.exp(-0.5 * r.square())
    elif profile == "matern12":
        K = torch.exp(-r)
    else:
        K = (1 + 3**0.5 * r) * torch.exp(-(3**0.5) * r)
    b = torch.randn(n, 2, generator=generator(1), dtype=F64)
    return x / lengthscale, K, K + noise * torch.eye(n, dtype=F64), torch.full((n,), noise, dtype=F64), b


def made(x, K, noise, **options):
    return automatic_preconditioner(
        lambda i: K[:, i], entries_of(K), K.diagonal(), noise, x, generator=generator(), **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("noise", [1e-1, 1e-3])
@pytest.mark.parametrize("lengthscale", [0.7, 2.0, 5.0])
@pytest.mark.parametrize("profile", ["rbf", "matern12", "matern32"])
def test_steps_are_never_more_than_by_the_low_rank_alone(cheap, profile, lengthscale, noise):
    x, K, A, D, b = system(profile, lengthscale, noise)
    P = made(x, K, D)
    L = partial_cholesky(lambda i: K[:, i], K.diagonal(), noise=noise, is_for_few_solves=True, generator=generator())
    assert P.rank == L.size(-1)
    low_rank = LowRankPreconditioner.of(L, D)
    ours, alone = (conjugate_gradients(A.matmul, b, precondition=each) for each in (P, low_rank))
    assert ours.residual_norm.max() < 1e-8
    if isinstance(P, LowRankPreconditioner):
        assert torch.equal(P.root, L)
    else:
        assert ours.num_steps <= 0.9 * alone.num_steps


@pytest.mark.parametrize(("profile", "lengthscale", "helps"), [("matern12", 1.0, True), ("rbf", 2.0, False)])
def test_they_are_taken_where_data_are_rough_and_not_where_smooth(cheap, monkeypatch, profile, lengthscale, helps):
    """In addition to a low rank that leaves much."""
    monkeypatch.setattr(choose_preconditioner, "partial_cholesky", partial(partial_cholesky, rank=60))
    x, K, A, D, b = system(profile, lengthscale, 1e-2)
    P = made(x, K, D)
    assert isinstance(P, NeighbourPreconditioner) == helps
    L = partial_cholesky(lambda i: K[:, i], K.diagonal(), rank=60, generator=generator())
    left = (1 - L.square().sum(-1)).clamp_min(0)
    share = share_of_steps(entries_of(K), L, left, D, x, tolerance=1e-8, generator=generator())
    near = with_neighbours(entries_of(K), L, left, D, x, generator=generator())
    assert near.rest.explained > 0.05
    both = LowRankPreconditioner.of(L, D), near
    alone, ours = (conjugate_gradients(A.matmul, b, precondition=each).num_steps for each in both)
    assert (share < 0.85) == (ours < 0.85 * alone) == helps


def test_far_from_each_other_data_have_no_neighbours_to_speak_of(cheap):
    """In 16 dimensions, where the trial alone, whose data are closer together, would accept them."""
    x = torch.randn(N, 16, generator=generator(), dtype=F64) / 3
    K = torch.exp(-torch.cdist(x, x))
    D, b = torch.full((N,), 0.1, dtype=F64), torch.randn(N, 2, generator=generator(1), dtype=F64)
    P = made(x, K, D)
    assert isinstance(P, LowRankPreconditioner)
    left = (1 - P.root.square().sum(-1)).clamp_min(0)
    options = {"tolerance": 1e-8, "generator": generator()}
    assert share_of_steps(entries_of(K), P.root, left, D, x, **options) < 0.85
    near = with_neighbours(entries_of(K), P.root, left, D, x, generator=generator())
    A = K + torch.diag(D)
    alone, with_them = (conjugate_gradients(A.matmul, b, precondition=each).num_steps for each in (P, near))
    assert alone < with_them


def test_the_same_seed_makes_the_same(cheap):
    x, K, _, D, b = system("matern32", 1.0, 1e-2)
    first, second = made(x, K, D), made(x, K, D)
    assert isinstance(first, NeighbourPreconditioner)
    assert torch.equal(first(b), second(b))


def test_a_small_system_is_not_worth_a_trial(monkeypatch):
    x, K, _, D, _ = system("matern32", 1.0, 1e-2, n=300)
    monkeypatch.setattr(choose_preconditioner, "share_of_steps", lambda *args, **options: pytest.fail("tried"))
    assert isinstance(made(x, K, D), LowRankPreconditioner)


def test_one_datum_and_duplicates(cheap):
    x, K, D = torch.zeros(3, 1, dtype=F64), torch.ones(3, 3, dtype=F64), torch.full((3,), 0.1, dtype=F64)
    for n in (1, 3):
        P = made(x[:n], K[:n, :n], D[:n])
        b = torch.ones(n, 1, dtype=F64)
        torch.testing.assert_close(P(b), torch.linalg.solve(K[:n, :n] + 0.1 * torch.eye(n, dtype=F64), b))


def test_nothing_to_go_by(cheap):
    x, K, _, D, _ = system("matern12", 1.0, 1e-2, n=50)
    for nothing in (torch.nan * K, 0 * K):
        P = made(torch.nan * x, nothing, D)
        assert isinstance(P, LowRankPreconditioner)
        assert P.rank == 0
    with pytest.raises(ValueError, match="positive noise; the smallest is 0"):
        made(x, K, D * (torch.arange(50) > 0))


def test_the_mean_over_all_truncations_is_the_solution(monkeypatch):
    x, K = rough(60, lengthscale=0.5)
    D = torch.full((60,), 0.1, dtype=F64)
    A, b = K + torch.diag(D), torch.randn(60, 2, generator=generator(), dtype=F64)
    L = partial_cholesky(lambda i: K[:, i], K.diagonal(), rank=5, generator=generator())
    left = (1 - L.square().sum(-1)).clamp_min(0)
    options = {"tolerance": 0.3, "precondition": with_neighbours(entries_of(K), L, left, D, x, generator=generator())}
    diagnostics = estimator_diagnostics(A.matmul, b, **options)
    found, weights = enumerated(monkeypatch, A, b, diagnostics.log_probability, **options)
    assert found.num_steps == diagnostics.num_steps > 5
    mean = (weights.unsqueeze(-2) * found.estimates).sum(0)
    torch.testing.assert_close(mean, torch.linalg.solve(A, b), rtol=1e-10, atol=1e-10)
