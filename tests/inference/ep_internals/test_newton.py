"""Newton's method near a solution of EP, with derivatives that are reused for several steps."""

from functools import partial

import pytest
import torch

from gpext.inference import EP
from gpext.inference.ep_internals.newton import broyden_updated, cavities_of, newton
from gpext.inference.problem import Problem
from gpext.likelihoods.tilted_moments import tilt
from gpext.sites import GaussianSites
from tests.latent_cases import CASES
from tests.members import F64


def solved(power, n=12):
    """A problem, its path at a fixed power, and a result."""
    likelihood, prior, y = CASES["student_t"].problem(n)
    result = EP(power=power, tolerance=1e-11).infer(prior(), likelihood, y)
    problem = Problem.of(prior(), likelihood, y, 0.0)
    return partial(newton, problem, lambda t: (tilt(likelihood, y, power), power)), result


@pytest.mark.parametrize("power", [1.0, 0.5])
@torch.no_grad()
def test_the_cavities_of_a_solution_need_no_step(power):
    solve, result = solved(power)
    end, trace, derivatives = solve(cavities_of(result.conditioned, power), max_evaluations=5, tolerance=1e-7)
    assert (len(trace), derivatives) == (1, 0)
    torch.testing.assert_close(end.sites.precision, result.sites.precision, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(end.value, result.log_evidence, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_derivatives_are_taken_less_often_than_there_are_steps():
    solve, result = solved(1.0)
    cavity = cavities_of(result.conditioned, 1.0)
    near = GaussianSites(cavity.shift + 0.3 * cavity.precision.sqrt(), 1.5 * cavity.precision)
    end, trace, derivatives = solve(near, max_evaluations=14, tolerance=1e-8)
    assert derivatives < len(trace) - 1
    torch.testing.assert_close(end.sites.precision, result.sites.precision, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(end.sites.shift, result.sites.shift, rtol=1e-5, atol=1e-6)
    short, trace, _ = solve(near, max_evaluations=2, tolerance=1e-8)
    assert short is None
    assert len(trace) == 2


def test_improper_cavities_are_refused():
    likelihood, prior, y = CASES["student_t"].problem(12)
    precision = torch.full_like(y, 3.0)
    precision[0] = -1e3
    posterior = Problem.of(prior(), likelihood, y, 0.0).condition(GaussianSites(y, precision))
    assert not bool(posterior.positive_definite)
    assert cavities_of(posterior, 1.0) is None


def test_the_updates_are_those_of_broydens_matrix():
    """B + (y - B s) s' / s's for each step s and change y of the residuals, by its definition."""
    generator = torch.Generator().manual_seed(0)
    J = torch.eye(4, dtype=F64) + 0.3 * torch.randn(4, 4, generator=generator, dtype=F64)
    B, residual, steps = torch.eye(4, dtype=F64), torch.randn(4, generator=generator, dtype=F64), []
    for _ in range(5):
        step = broyden_updated(-residual, steps)
        torch.testing.assert_close(step, -torch.linalg.solve(B, residual), rtol=1e-8, atol=1e-10)
        after = residual + J @ step
        B = B + torch.outer(after - residual - B @ step, step) / step.square().sum()
        residual = after
        steps.append(step)
