"""The distribution of a solve with a random end, against enumeration of every truncation, and against draws."""

import math
import pickle

import pytest
import torch

from gpext.solvers import (
    Geometric,
    Matched,
    NoSurvival,
    SolveStatus,
    Ulisse,
    estimator_diagnostics,
    unbiased_cg,
)
from tests.solvers.test_conjugate_gradients import system
from tests.solvers.test_unbiased_cg import enumerated, jacobi
from tests.statistics import misfit, z_threshold

F64 = torch.float64


def close(found, expected, rtol=1e-9):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize(
    "law", [Matched(), Geometric(0.3), Ulisse(0.05), NoSurvival()], ids=lambda law: type(law).__name__
)
def test_moments_are_those_of_all_truncations(monkeypatch, law, preconditioned, warm):
    A, b = system(20, 2, noise=0.1)
    B = A @ A + torch.eye(20, dtype=F64)
    exact = torch.linalg.solve(A, b)
    options = {
        "start": exact + 0.3 * b if warm else None,
        "precondition": jacobi(A) if preconditioned else None,
        "tolerance": 0.3,
        "survival": law,
    }
    found = estimator_diagnostics(lambda v: A @ v, b, **options)
    assert found.status is SolveStatus.CONVERGED
    runs, p = enumerated(monkeypatch, A, b, found.log_probability, **options)
    x, p = runs.estimates, p.unsqueeze(-2)  # (T, n, R), (T, 1, R)
    mean = (p * x).sum(0)
    close(found.mean, mean)
    torch.testing.assert_close(found.bias, mean - exact, rtol=1e-7, atol=1e-10)
    assert (float(found.bias.abs().max()) > 1e-3) is isinstance(law, NoSurvival)
    close(found.variance, (p * (x - mean).square()).sum(0))
    v = torch.linspace(-1, 1, 20, dtype=F64).unsqueeze(-1)
    close(found.linear_variance(v), (p.squeeze(-2) * (v * (x - mean)).sum(-2).square()).sum(0))
    pairs = torch.einsum("jnr,nm,kmr->jkr", x, B, x)
    joint = torch.einsum("jr,kr->jkr", p.squeeze(-2), p.squeeze(-2))
    expected = (joint * pairs).sum((0, 1))
    close(expected, (mean * (B @ mean)).sum(-2))
    close(found.quadratic_variance(lambda v: B @ v), (joint * (pairs - expected).square()).sum((0, 1)), rtol=1e-8)


@pytest.mark.parametrize("share_columns", [False, True])
def test_expected_steps_are_those_of_draws(share_columns):
    A, b = system(60, 3, noise=0.01)
    options = {"num_estimates": 2, "tolerance": 0.3, "share_columns": share_columns}
    found = estimator_diagnostics(lambda v: A @ v, b, **options)
    generator = torch.Generator().manual_seed(0)
    steps = torch.tensor(
        [unbiased_cg(lambda v: A @ v, b, generator=generator, **options).num_steps for _ in range(300)]
    )
    steps = steps.double()
    assert misfit(steps.unsqueeze(-1), found.expected_steps) < 1
    assert found.first_steps < found.expected_steps < found.num_steps


def test_conjugate_increments_make_the_error_a_sum():
    A, b = system(20, 1, noise=1.0)
    found = estimator_diagnostics(lambda v: A @ v, b, survival=Geometric(0.3))
    d = found.left - torch.cat([found.left[1:], torch.zeros_like(found.left[:1])])
    squares = (d * (A @ d)).sum(-2)
    expected = (squares * torch.expm1(-found.log_probability)).sum()
    variance = sum(w * (R * (A @ R)).sum() for w, R in zip(found.weight, found.left, strict=True))
    close(variance.squeeze(), expected, rtol=1e-6)


def test_says_whether_draws_can_show_the_mean():
    A, b = system(200, 3, noise=1e-3)
    exact = torch.linalg.solve(A, b)
    for law, can in ((Matched(), True), (Geometric(0.01), True), (Ulisse(1.0), False), (NoSurvival(), False)):
        found = estimator_diagnostics(lambda v: A @ v, b, survival=law, tolerance=0.3)
        solve = unbiased_cg(
            lambda v: A @ v,
            b,
            num_estimates=4000,
            survival=law,
            tolerance=0.3,
            generator=torch.Generator().manual_seed(0),
        )
        x = solve.estimates
        assert bool((found.shows_mean == can).all())
        assert (misfit(x, exact, rounding=1e-12) < 1) is can
        assert ("cannot show" in found.message) is not can
        if not can:  # the draws lack the part that they were predicted to reach almost never
            number = (found.log_probability.exp() * 4000 >= 1).sum(0)
            short = (solve.truncations < number).all(0)
            missing = (x.mean(0) - exact).norm(dim=0) / exact.norm(dim=0)
            allowed = z_threshold(3) * found.standard_error + 1e-6 * found.unseen
            assert bool(((missing - found.unseen).abs() < allowed)[short].all())
            assert bool((4000 * found.reach < 1)[found.unseen > 0.01].all())
    many = estimator_diagnostics(lambda v: A @ v, b, survival=Ulisse(0.01), tolerance=0.3, num_draws=10**12)
    few = estimator_diagnostics(lambda v: A @ v, b, survival=Ulisse(0.01), tolerance=0.3, num_draws=10)
    assert bool((many.unseen < few.unseen).all())


def test_weights_beyond_the_largest_number_are_infinite_and_never_nan():
    A, b = system(200, 1, noise=1e-4)
    found = estimator_diagnostics(lambda v: A @ v, b, survival=Ulisse(1.0))
    assert bool(found.variance.isinf().all())
    assert not bool(found.weight.isnan().any())
    assert not bool(found.quadratic_variance(lambda v: A @ v).isnan().any())
    last = 0.5 * (math.sqrt(1 - 8 * math.log(found.reach)) - 1)  # P_j = exp(-j (j + 1) / 2) of the last that matters
    assert last == pytest.approx(round(last), abs=1e-9)
    assert 10 <= last < len(found.weight)  # the exact one depends on the rounding of conjugate gradients
    assert "cannot show the mean" in found.message
    assert float(found.bias.abs().max()) == 0.0  # P_j does not underflow, so there is no bias


def test_a_run_that_never_gets_to_its_end_says_so():
    A, b = system(60, 1, noise=1e-3)
    found = estimator_diagnostics(lambda v: A @ v, b, max_steps=5)
    assert found.status is SolveStatus.MAX_STEPS
    assert "raise max_steps" in found.message.lower()
    with pytest.raises(ValueError, match="num_draws"):
        estimator_diagnostics(lambda v: A @ v, b, num_draws=0)


def test_batches_float32_a_solution_at_the_start_and_a_zero():
    A, b = system(30, 2, noise=1.0, batch=(2,), dtype=torch.float32)
    found = pickle.loads(pickle.dumps(estimator_diagnostics(lambda v: A @ v, b, num_estimates=2)))
    assert found.variance.shape == b.shape
    assert found.variance.dtype == torch.float32
    assert found.quadratic_variance(lambda v: A @ v).shape == (2, 2)
    for i in range(2):  # each matrix has its own diagnostics
        one = estimator_diagnostics(lambda v, i=i: A[i] @ v, b[i])
        assert one.num_steps <= found.num_steps
    arrived = estimator_diagnostics(lambda v: A @ v, torch.zeros_like(b))
    assert (arrived.num_steps, arrived.expected_steps) == (0, 0)
    assert bool(arrived.shows_mean.all())
    assert float(arrived.variance.max()) == 0
