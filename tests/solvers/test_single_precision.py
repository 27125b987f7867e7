"""The Cholesky factor in single precision, against the matrix that it represents, and its failures."""

import math

import pytest
import torch

from gpext.solvers import (
    LowRankPreconditioner,
    SinglePrecisionPreconditioner,
    automatic_preconditioner,
    choose_preconditioner,
    conjugate_gradients,
    estimator_diagnostics,
    lanczos_log_det,
    partial_cholesky,
    single_precision,
)
from gpext.solvers.single_precision import cost_of_single_precision
from tests.solvers.test_choose_preconditioner import system
from tests.solvers.test_neighbour_roots import entries_of, generator, rough
from tests.solvers.test_unbiased_cg import enumerated
from tests.statistics import t_threshold

F64 = torch.float64
EPS = torch.finfo(torch.float32).eps


@pytest.fixture
def small_panels(monkeypatch):
    """Split small matrices into several panels, the last one short, each read in several parts."""
    monkeypatch.setattr(single_precision, "_HEIGHT", 32)
    monkeypatch.setattr(single_precision, "_WIDTH", 50)


@pytest.fixture
def free(monkeypatch):
    """Make few data enough."""
    monkeypatch.setattr(single_precision, "_FEWEST", 1)


def block_of(K):
    return lambda rows, columns, scale: (scale[rows].unsqueeze(-1) * K[rows, columns] * scale[columns]).float()


def made(K, noise):
    return SinglePrecisionPreconditioner.of(block_of(K), K.diagonal(), noise)


def automatically(x, K, noise, **options):
    options = {"block": block_of(K), "generator": generator(), **options}
    return automatic_preconditioner(lambda i: K[:, i], entries_of(K), K.diagonal(), noise, x, **options)


def upper(P):
    """Return U (n, n)."""
    U, start = torch.zeros(P.rank, P.rank, dtype=F64), 0
    for N, panel in zip(P.inverses, P.panels, strict=True):
        stop = start + len(N)
        U[start:stop, start:stop], U[start:stop, stop:] = torch.linalg.inv(N).mT, panel
        start = stop
    return U


def uneven(n=150, seed=1):
    return 0.05 * (0.5 + torch.rand(n, generator=generator(seed), dtype=F64))


def test_it_is_the_inverse_and_the_determinant_of_what_it_says(small_panels):
    (_, K), noise = rough(150), uneven()
    P = made(K, noise)
    assert P.rank == 150
    assert [len(panel) for panel in P.panels] == [32, 32, 32, 32, 22]
    U, S = upper(P), P.scale
    says = (U.mT @ U) / S / S.unsqueeze(-1)
    A, eye = K + torch.diag(noise), torch.eye(150, dtype=F64)
    r = torch.randn(2, 150, 3, generator=generator(), dtype=F64)
    before = r.clone()
    torch.testing.assert_close(P(r), torch.linalg.solve(says, r), rtol=1e-9, atol=1e-10)
    assert torch.equal(r, before)
    one = torch.randn(150, 1, generator=generator(), dtype=F64)
    torch.testing.assert_close(P(one), torch.linalg.solve(says, one), rtol=1e-9, atol=1e-10)
    inverse = P(eye)
    torch.testing.assert_close(inverse, inverse.mT, rtol=1e-12, atol=1e-12)
    assert float(torch.linalg.eigvalsh(inverse)[0]) > 0
    torch.testing.assert_close(P.log_det, torch.logdet(says), rtol=1e-11, atol=1e-10)
    torch.testing.assert_close(P.whitened(lambda v: says @ v)(eye), eye, rtol=1e-10, atol=1e-10)
    whitened = P.whitened(lambda v: A @ v)(eye)
    torch.testing.assert_close(torch.logdet(whitened) + P.log_det, torch.logdet(A), rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(P.log_det, torch.logdet(A), rtol=0, atol=1e-2)
    estimate, error = lanczos_log_det(P.whitened(lambda v: A @ v), 150, num_probes=40, num_steps=10, like=A)
    assert abs(float(estimate + P.log_det - torch.logdet(A))) < t_threshold(39) * float(error) + 1e-9


@pytest.mark.parametrize("height", [7, 32, 200])
def test_it_is_the_matrix_to_rounding_in_single_precision(monkeypatch, height):
    monkeypatch.setattr(single_precision, "_HEIGHT", height)
    (_, K), noise = rough(150), uneven()
    P = made(K, noise)
    U, S = upper(P), (K.diagonal() + noise).rsqrt()
    torch.testing.assert_close(P.scale, S, rtol=1e-15, atol=0)
    scaled = S * (K + torch.diag(noise)) * S.unsqueeze(-1)
    largest = float(torch.linalg.matrix_norm(scaled, 2))
    assert float(torch.linalg.matrix_norm(U.mT @ U - scaled, 2)) < EPS * largest
    assert all(panel.dtype == torch.float32 for panel in P.panels)


def test_it_is_linear_to_rounding_in_double_precision(small_panels):
    (_, K), noise = rough(150), uneven()
    P = made(K, noise)
    a, b = torch.randn(2, 150, 1, generator=generator(), dtype=F64)
    torch.testing.assert_close(P(a + math.pi * b), P(a) + math.pi * P(b), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("spread", [False, True])
def test_neither_scales_nor_uneven_noise_leave_the_range(small_panels, scale, spread):
    _, K = rough(200, lengthscale=0.3)
    decades = torch.linspace(-8, 8, 200, dtype=F64) if spread else torch.full((200,), -2.0, dtype=F64)
    noise = 10 ** decades[torch.randperm(200, generator=generator())]
    P = made(scale * K, scale * noise)
    A = scale * (K + torch.diag(noise))
    assert P.log_det.isfinite()
    b = torch.randn(200, 2, generator=generator(), dtype=F64)
    found = conjugate_gradients(A.matmul, b, precondition=P)
    assert found.residual_norm.max() < 1e-8
    assert found.num_steps <= 4


def test_a_matrix_that_rounding_makes_indefinite_has_none(small_panels):
    _, K, _, D, _ = system("rbf", 5.0, 1e-8, n=200)
    assert made(K, D) is None
    assert made(torch.nan * K, D) is None
    assert isinstance(made(K, 1e6 * D), SinglePrecisionPreconditioner)
    with pytest.raises(ValueError, match="positive noise; the smallest is 0"):
        made(K, 0 * D)


def test_nothing_is_stored_whose_products_are_denormal(small_panels):
    """Such numbers, in A or in the factor itself, make products many times as slow."""
    x = torch.linspace(0, 150, 100, dtype=F64).unsqueeze(-1)
    far_apart = torch.exp(-0.5 * (x - x.mT).square())
    assert bool(((far_apart.float() > 0) & (far_apart.float() < torch.finfo(torch.float32).tiny)).any())
    like_one_alone = torch.eye(100, dtype=F64)
    like_one_alone[0, 1:] = like_one_alone[1:, 0] = 1e-10  # 1e-20 between the others, given that one
    for K in (far_apart, like_one_alone):
        P = made(K, torch.full((100,), 0.1, dtype=F64))
        stored = torch.cat([panel[panel != 0].abs() for panel in P.panels])
        assert float(stored.min()) > 1e-14


def test_vectors_in_single_precision_stay_so(small_panels):
    (_, K), noise = rough(150), uneven()
    P = made(K.float(), noise.float())
    b = torch.randn(150, 2, generator=generator())
    assert P(b).dtype == P.whitened(lambda v: v)(b).dtype == torch.float32
    expected = torch.linalg.solve(K + torch.diag(noise), b.double())
    assert float((P(b) - expected).norm() / expected.norm()) < 1e-4


def test_the_mean_over_all_truncations_is_the_solution(monkeypatch, small_panels):
    """With a factor of another matrix, so that steps are needed; exact because P^-1 is one fixed matrix."""
    (_, K), D = rough(100, lengthscale=0.5), torch.full((100,), 0.1, dtype=F64)
    A, b = K + torch.diag(D), torch.randn(100, 2, generator=generator(), dtype=F64)
    for other in (K.square(), K):
        options = {"tolerance": 0.3, "precondition": made(other, D)}
        diagnostics = estimator_diagnostics(A.matmul, b, **options)
        found, weights = enumerated(monkeypatch, A, b, diagnostics.log_probability, **options)
        assert found.num_steps == diagnostics.num_steps > (2 if other is K else 10)
        mean = (weights.unsqueeze(-2) * found.estimates).sum(0)
        torch.testing.assert_close(mean, torch.linalg.solve(A, b), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("profile", "lengthscale", "is_taken"),
    [("matern12", 1.0, True), ("matern32", 0.5, True), ("rbf", 0.5, True), ("rbf", 5.0, False)],
)
def test_it_is_taken_where_a_low_rank_leaves_much(free, profile, lengthscale, is_taken):
    x, K, A, D, b = system(profile, lengthscale, 1e-2)
    P = automatically(x, K, D)
    assert isinstance(P, SinglePrecisionPreconditioner) == is_taken
    found = conjugate_gradients(A.matmul, b, precondition=P)
    assert found.residual_norm.max() < 1e-8
    if is_taken:
        assert found.num_steps <= 4
    else:  # the same columns as without the choice
        L = partial_cholesky(lambda i: K[:, i], K.diagonal(), noise=1e-2, is_for_few_solves=True, generator=generator())
        assert torch.equal(P.root, L)
    assert not isinstance(automatically(x, K, D, block=None), SinglePrecisionPreconditioner)


def test_few_data_and_too_many_do_without(monkeypatch):
    x, K, _, D, _ = system("matern12", 1.0, 1e-2)
    assert not isinstance(automatically(x, K, D), SinglePrecisionPreconditioner)
    monkeypatch.setattr(single_precision, "_FEWEST", len(x))
    assert isinstance(automatically(x, K, D), SinglePrecisionPreconditioner)
    monkeypatch.setattr(single_precision, "MOST_STORED", len(x) * (len(x) + 1) // 2 - 1)
    assert not isinstance(automatically(x, K, D), SinglePrecisionPreconditioner)


def test_too_ill_a_condition_is_not_tried(free, monkeypatch):
    x, K, _, D, _ = system("rbf", 3.0, 1e-9)
    monkeypatch.setattr(SinglePrecisionPreconditioner, "of", lambda *args: pytest.fail("tried"))
    assert not isinstance(automatically(x, K, D), SinglePrecisionPreconditioner)


@pytest.mark.parametrize(("profile", "lengthscale"), [("matern32", 0.5), ("rbf", 1.0)])
def test_a_failure_leaves_what_there_would_be_without_it(free, monkeypatch, profile, lengthscale):
    """Columns that have ended by themselves, and some that are then completed."""
    x, K, A, D, b = system(profile, lengthscale, 1e-2)
    tried = []
    monkeypatch.setattr(SinglePrecisionPreconditioner, "of", lambda *args: tried.append(args))
    P, without = automatically(x, K, D), automatically(x, K, D, block=None)
    assert len(tried) == 1
    assert isinstance(P, LowRankPreconditioner)
    if without.rank < choose_preconditioner.JUDGED:
        assert torch.equal(P.root, without.root)
    else:
        assert abs(P.rank - without.rank) <= 100 < P.rank - choose_preconditioner.JUDGED
    steps = [conjugate_gradients(A.matmul, b, precondition=each).num_steps for each in (P, without)]
    assert abs(steps[0] - steps[1]) <= 0.2 * steps[1]


def test_its_cost_counts_the_steps_that_its_error_leaves():
    costs = [cost_of_single_precision(5000, 1000.0, smallest, 1e-8) for smallest in (1e-1, 1e-2, 1e-3, 1e-6)]
    assert costs == sorted(costs)
    assert costs[2] < 1.5 * costs[0]
    assert costs[3] == math.inf
    assert cost_of_single_precision(10000, 1000.0, 1e-2, 1e-8) > 5 * costs[1]
