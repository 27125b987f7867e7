"""Unbiased solves, against direct ones: by enumeration of every truncation, and by draws."""

import sys
from functools import partial

import pytest
import torch

from gpext.solvers import (
    Geometric,
    LinearSolve,
    Matched,
    NoSurvival,
    SolveStatus,
    Ulisse,
    conjugate_gradients,
    estimator_diagnostics,
    unbiased_cg,
)
from tests.solvers.test_conjugate_gradients import system
from tests.statistics import frequency_is, misfit

F64 = torch.float64


def jacobi(A):
    diagonal = A.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * torch.linspace(0.5, 2, A.size(-1), dtype=A.dtype).unsqueeze(
        -1
    )
    return lambda r: r / diagonal


def enumerated(monkeypatch, A, b, log_p, **options):
    """Return every truncation's estimate (T, n, R) and its probability (T, R); later ones count for the last."""
    levels = (-log_p).clamp_max(700)  # the level of row e reaches increments 0 .. e
    monkeypatch.setattr(
        sys.modules["gpext.solvers.unbiased_cg"], "_levels", lambda shape, generator: levels[..., : shape[-1]]
    )
    found = unbiased_cg(lambda v: A @ v, b, num_estimates=len(log_p), **options)
    monkeypatch.undo()
    p = log_p.exp()
    return found, p - torch.cat([p[1:], torch.zeros_like(p[:1])])


LAWS = {
    "matched": None,
    "matched, slower": Matched(0.5),
    "matched, faster": Matched(2.0, steepest=3.0),
    "geometric": Geometric(0.05),
    "of a cost": Geometric.of_cost(10),
    "published": Ulisse(1.0),
    "slow": Ulisse(1e-3),
}


@pytest.mark.parametrize("share_columns", [False, True])
@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", LAWS)
def test_the_mean_over_all_truncations_is_the_solution(monkeypatch, name, warm, preconditioned, share_columns):
    A, b = system(20, 2, noise=0.1)
    exact = torch.linalg.solve(A, b)
    options = {
        "start": exact + 0.3 * b if warm else None,
        "precondition": jacobi(A) if preconditioned else None,
        "tolerance": 0.3,
        "survival": LAWS[name],
        "share_columns": share_columns,
    }
    diagnostics = estimator_diagnostics(lambda v: A @ v, b, **options)
    found, weights = enumerated(monkeypatch, A, b, diagnostics.log_probability, **options)
    assert (
        found.num_steps == diagnostics.num_steps < 36
    )  # soon after, the published P_j is the smallest number there is
    mean = (weights.unsqueeze(-2) * found.estimates).sum(0)
    torch.testing.assert_close(mean, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("preconditioned", [False, True])
def test_the_default_falls_as_the_smallest_residual_in_the_krylov_space(preconditioned):
    """By least squares, in the norm of P^-1; the condition number is small enough to keep the recursion conjugate."""
    A, b = system(30, 2, noise=1.0)
    inverse = jacobi(A)(torch.eye(30, dtype=F64)) if preconditioned else torch.eye(30, dtype=F64)
    root = torch.linalg.cholesky(inverse).mT  # |r| in the norm of P^-1 is |root r|
    found = estimator_diagnostics(
        lambda v: A @ v, b, precondition=lambda r: inverse @ r, tolerance=0.3, survival=Matched(1.0, steepest=10.0)
    )
    first, p = found.first_steps, found.log_probability.exp()
    assert first > 1
    for column in range(2):
        basis, smallest = [inverse @ b[:, column]], []
        for _ in range(first + 5):
            V = torch.linalg.qr(torch.stack(basis, -1)).Q
            left = root @ (b[:, column] - A @ V @ torch.linalg.lstsq(root @ A @ V, root @ b[:, column]).solution)
            smallest.append(left.norm())
            basis = [*V.mT, inverse @ (A @ V[:, -1])]
        expected = torch.stack(smallest)[first - 1 :] / smallest[first - 1]
        torch.testing.assert_close(p[: len(expected), column], expected, rtol=1e-6, atol=0)


def test_draws_of_the_default_show_the_mean():
    A, b = system(60, 2, noise=0.1)
    generator = torch.Generator().manual_seed(0)
    found = unbiased_cg(lambda v: A @ v, b, num_estimates=4000, tolerance=0.3, generator=generator)
    assert found.status is SolveStatus.CONVERGED
    x = found.estimates
    assert misfit(x, torch.linalg.solve(A, b)) < 1
    quadratic = (x[:2000] * (A @ x[2000:])).sum(1)  # two independent truncations
    expected = (b * torch.linalg.solve(A, b)).sum(0)
    assert misfit(quadratic, expected) < 1


def test_one_truncation_in_both_factors_is_biased_and_early_stopping_too():
    A, b = system(60, 1, noise=0.1)
    generator = torch.Generator().manual_seed(0)
    exact = torch.linalg.solve(A, b)
    x = unbiased_cg(lambda v: A @ v, b, num_estimates=4000, tolerance=0.3, generator=generator).estimates
    shared = (x * (A @ x)).sum(1)
    expected = (b * exact).sum(0)
    assert bool((shared.mean(0) > expected).all())
    assert misfit(shared, expected) > 1
    stopped = unbiased_cg(lambda v: A @ v, b, tolerance=0.3, survival=NoSurvival()).estimates[0]
    assert float((stopped - exact).norm() / exact.norm()) > 0.02


def test_truncations_are_independent_by_column_and_estimate_or_shared_by_columns():
    A, b = system(60, 400, noise=0.1)
    solve = partial(unbiased_cg, lambda v: A @ v, b, num_estimates=2, survival=Geometric(0.5))
    found = solve(generator=torch.Generator().manual_seed(0))
    J = found.truncations.double()
    assert J.shape == (2, 400)
    assert abs(float(torch.corrcoef(J)[0, 1])) < 4.5 / 20
    same = solve(generator=torch.Generator().manual_seed(0))
    assert torch.equal(found.estimates, same.estimates)
    shared = solve(share_columns=True, generator=torch.Generator().manual_seed(0))
    assert shared.truncations.shape == (2, 400)
    assert bool((shared.truncations == shared.truncations[:, :1]).all())
    assert shared.num_steps < found.num_steps


@pytest.mark.parametrize("law", [Geometric(0.3), Ulisse(1.0), Ulisse(0.01)])
def test_draws_of_the_truncation_follow_their_law(law):
    A, b = system(60, 1, noise=1e-4)
    J = unbiased_cg(
        lambda v: A @ v, b, num_estimates=20_000, survival=law, generator=torch.Generator().manual_seed(0)
    ).truncations
    for j in (1, 2, 5):
        p = law.log_probability(j, torch.ones(1, dtype=F64)).exp()
        assert frequency_is(p, (j <= J).sum(), 20_000)


def test_a_cost_is_kept():
    A, b = system(200, 1, noise=1e-6)
    found = estimator_diagnostics(lambda v: A @ v, b, survival=Geometric.of_cost(10))
    assert found.expected_steps - found.first_steps == pytest.approx(10, rel=1e-3)


def test_what_ends_the_run_is_said():
    A, b = system(60, 1, noise=1e-3)
    cut = unbiased_cg(lambda v: A @ v, b, survival=Geometric(1e-3), max_steps=5)
    assert (cut.status, cut.num_steps) == (SolveStatus.MAX_STEPS, 5)
    assert unbiased_cg(lambda v: A @ v - 0.5 * v, b).status is SolveStatus.NOT_POSITIVE_DEFINITE
    with pytest.raises(ValueError, match="num_estimates"):
        unbiased_cg(lambda v: A @ v, b, num_estimates=0)
    for bad in (
        lambda: Geometric(0.0),
        lambda: Ulisse(-1.0),
        lambda: Matched(0.0),
        lambda: Matched(1.0, -1.0),
        lambda: Geometric.of_cost(1.0),
    ):
        with pytest.raises(ValueError, match="must be"):
            bad()


@pytest.mark.parametrize("solve", [conjugate_gradients, unbiased_cg, estimator_diagnostics])
def test_bad_input_is_refused(solve):
    A, b = system(10, 1)
    for bad, error, match in (
        (
            b.index_fill(0, torch.tensor(3), torch.nan),
            ValueError,
            r"b must be finite; got nan at index \(3, 0\). Remove",
        ),
        (torch.ones(10, 1, dtype=torch.int64), TypeError, "b must be of a floating type; got torch.int64"),
    ):
        with pytest.raises(error, match=match):
            solve(lambda v: A @ v, bad)
    for tolerance in (-1.0, torch.nan):
        with pytest.raises(ValueError, match="tolerance must not be negative"):
            solve(lambda v: A @ v, b, tolerance=tolerance)
    if solve is estimator_diagnostics:
        with pytest.raises(ValueError, match=r"got \(10,\). One column is b.unsqueeze"):
            solve(lambda v: A @ v, b[:, 0])
    broken = A.index_put((torch.tensor(2), torch.tensor(2)), torch.tensor(torch.nan, dtype=F64))
    assert solve(lambda v: broken @ v, b).status is SolveStatus.NOT_FINITE
    assert solve(lambda v: A @ v, b, start=b, max_steps=0).status is SolveStatus.MAX_STEPS


@pytest.mark.parametrize("n", [1, 2, 3])
def test_tiny_systems(n):
    A, b = system(n, 2)
    found = unbiased_cg(lambda v: A @ v, b, num_estimates=3, share_columns=True)
    assert found.status is SolveStatus.CONVERGED
    torch.testing.assert_close(found.estimates, torch.linalg.solve(A, b).expand(3, n, 2), rtol=1e-8, atol=1e-8)


def test_a_condition_number_of_1e12_needs_a_preconditioner_and_says_so():
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(50, 50, dtype=F64, generator=generator)).Q
    values = torch.logspace(0, -12, 50, dtype=F64)
    A, b = Q * values @ Q.mT, torch.randn(50, 1, dtype=F64, generator=generator)
    for solve in (conjugate_gradients, unbiased_cg):
        found = solve(lambda v: A @ v, b)
        assert found.status is SolveStatus.MAX_STEPS
        assert "take a preconditioner" in found.status.value
    near = Q * (1 / (1.1 * values)) @ Q.mT
    found = conjugate_gradients(lambda v: A @ v, b, precondition=lambda r: near @ r, tolerance=1e-4)
    assert found.status is SolveStatus.CONVERGED


def test_the_result_is_a_linear_solve_of_one_column_or_several():
    A, b = system(60, 2, noise=0.1)
    found = unbiased_cg(A.matmul, b, num_estimates=3, generator=torch.Generator().manual_seed(0))
    assert isinstance(found, LinearSolve)
    torch.testing.assert_close(found.solution, found.estimates.mean(0))
    assert found.residual_norm.shape == (2,)
    assert bool((found.residual_norm < 0.1).all())
    one, column = (
        unbiased_cg(A.matmul, rhs, num_estimates=3, generator=torch.Generator().manual_seed(0))
        for rhs in (b[:, 0], b[:, :1])
    )
    assert (one.solution.shape, one.estimates.shape, one.truncations.shape) == ((60,), (3, 60), (3,))
    assert torch.equal(one.estimates, column.estimates.squeeze(-1))
    assert one.residual_norm.shape == ()
    with pytest.raises(TypeError, match="matvec must be a function"):
        unbiased_cg(A, b)
    with pytest.raises(ValueError, match="max_steps"):
        unbiased_cg(A.matmul, b, max_steps=-1)


@pytest.mark.parametrize("solve", [unbiased_cg, estimator_diagnostics])
def test_a_number_is_no_law(solve):
    with pytest.raises(TypeError, match=r"survival must be a law such as gpext.solvers.Matched\(\).*got 0.5"):
        solve(lambda v: v, torch.ones(3, 1), survival=0.5)
