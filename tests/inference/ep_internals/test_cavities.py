"""The equations of EP in its cavities: their derivatives against finite differences."""

from functools import partial

import pytest
import torch

from gpext.inference import EP
from gpext.inference.ep_internals.cavities import differentiate, evaluate, seen_from
from gpext.inference.ep_internals.moment_matching import match
from gpext.inference.problem import Problem
from gpext.likelihoods.tilted_moments import tilt
from gpext.sites import GaussianSites
from tests.latent_cases import CASES
from tests.members import F64


def by_power(likelihood, y, t):
    return tilt(likelihood, y, t), t


def some_point(likelihood_name, power, n=7):
    """Cavities that do not match, and the function that evaluates others."""
    likelihood, prior, y = CASES[likelihood_name].problem(n)
    path = partial(by_power, likelihood, y)
    see = partial(evaluate, Problem.of(prior(), likelihood, y, 0.0), path)
    generator = torch.Generator().manual_seed(2)
    precision = 0.3 + torch.rand(n, generator=generator, dtype=F64)
    shift = 0.4 * torch.randn(n, generator=generator, dtype=F64)
    point = see(power, GaussianSites(shift, precision))
    assert point.size < torch.inf
    return path, see, point


def solution(likelihood_name, power, n=7):
    """Cavities that do match, and the function that evaluates others."""
    likelihood, prior, y = CASES[likelihood_name].problem(n)
    path, problem = partial(by_power, likelihood, y), Problem.of(prior(), likelihood, y, 0.0)
    found = EP(power=power, tolerance=1e-11).infer(prior(), likelihood, y)
    there = match(problem, tilt(likelihood, y, power), power, found.sites)
    see = partial(evaluate, problem, path)
    point = see(power, GaussianSites(there.cavity_mean / there.cavity_variance, 1 / there.cavity_variance))
    assert point.size < 1e-9
    return path, see, point


@pytest.mark.parametrize("power", [0.9, 0.4])
@pytest.mark.parametrize("name", ["student_t", "bernoulli_logit"])
@torch.no_grad()
def test_the_derivatives_at_a_solution_agree_with_finite_differences(name, power):
    path, see, point = solution(name, power)
    n = len(point.residual)
    columns = []
    for j in range(n):
        step = torch.zeros(n, dtype=F64)
        step[j] = 1e-5
        ahead, behind = (see(power, point.moved(point.cavity, sign * step)).residual for sign in (1, -1))
        columns.append((ahead - behind) / 2e-5)
    row = torch.arange(n + 1, dtype=F64)
    inverse = differentiate(point, path, 2.0).across(row)(torch.eye(n + 1, dtype=F64)).mT
    found = torch.linalg.inv(inverse)
    torch.testing.assert_close(found[-1], row, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found[:-1, :-1], torch.stack(columns, -1), rtol=1e-5, atol=1e-6)
    ahead, behind = (see(power + h, point.cavity).residual for h in (1e-5, -1e-5))
    torch.testing.assert_close(found[:-1, -1], (ahead - behind) / 1e-5, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["student_t", "bernoulli_logit"])
@torch.no_grad()
def test_newton_steps_converge_quadratically(name):
    _, see, point = solution(name, 0.9)
    n = len(point.residual)
    fixed = torch.zeros(n + 1, dtype=F64)
    fixed[-1] = 1
    direction = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=F64)
    missed = []
    for size in (1e-2, 1e-3):
        off = see(0.9, point.moved(point.cavity, size * direction))
        right = torch.cat([-off.residual, fixed[:1]])
        step = differentiate(off).across(fixed)(right.unsqueeze(0)).squeeze(0)
        missed.append(see(0.9, off.moved(off.cavity, step[:-1])).size)
    assert missed[0] < 1e-3
    assert missed[1] < 0.03 * missed[0]


@torch.no_grad()
def test_a_product_with_a_vector_is_the_same_in_the_units_of_another_point():
    _, see, origin = some_point("student_t", 0.8)
    generator = torch.Generator().manual_seed(0)
    vector, normal = torch.randn(2, 15, generator=generator, dtype=F64)
    point = see(0.7, origin.moved(origin.cavity, 0.1 * vector[:-1]))
    small = 1e-6 * vector[:-1]
    moved = point.moved(point.cavity, small)  # the same small step from the origin
    p = (moved.precision / point.cavity.precision).log()
    shift = moved.shift - point.cavity.shift - origin.tilted.mean * (moved.precision - point.cavity.precision)
    there = torch.cat([p, origin.tilted.variance.sqrt() * shift, 1e-6 * vector[-1:]])
    here = torch.cat([small, 1e-6 * vector[-1:]])
    torch.testing.assert_close(seen_from(origin, point, normal) @ here, normal @ there, rtol=1e-4, atol=1e-10)


@pytest.mark.parametrize("entry", [(torch.inf, torch.inf), (1.0, 0.0), (1.0, -1.0), (1.0, 1e-320), (torch.nan, 1.0)])
def test_cavities_that_are_none_are_no_solution_and_no_error(entry):
    _, see, point = some_point("poisson", 1.0)
    shift, precision = point.cavity.shift.clone(), point.cavity.precision.clone()
    shift[2], precision[2] = entry
    beyond = see(1.0, GaussianSites(shift, precision))
    assert beyond.size == torch.inf
    assert beyond.value == -torch.inf
