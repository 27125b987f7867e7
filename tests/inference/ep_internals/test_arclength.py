"""Branches of EP's solutions are followed around their turns to their ends, at bounded cost."""

import math
from functools import partial

import pytest
import torch

from benchmarks.ep_convergence import inferred
from benchmarks.ep_map import grid
from benchmarks.ep_problems import EXAMPLES
from gpext.inference import EP
from gpext.inference.ep_internals.arclength import follow_arc
from gpext.inference.ep_internals.moment_matching import match
from gpext.inference.problem import Problem
from gpext.likelihoods import BernoulliLogitLikelihood
from gpext.likelihoods.tilted_moments import tilt
from gpext.sites import GaussianSites
from tests.latent_cases import CASES
from tests.seeds import as_written

SETTINGS = {(i, j): (a, b) for i, j, a, b in grid(EXAMPLES[2], "near", 20)}


@as_written()
def at_setting(i, j):
    """Example 2 at one point of its map: the problem, and its path in powers, where t is the power itself."""
    example = EXAMPLES[2].problem(*SETTINGS[i, j])
    problem = Problem.of(example.prior, example.likelihood, example.targets, 0.0)
    return example, problem, partial(by_power, problem)


def by_power(problem, t):
    return tilt(problem.likelihood, problem.targets, t), t


def matched_at(problem, example, power):
    """The solution that EP finds at a power."""
    with torch.no_grad():
        result = EP(power=power, tolerance=1e-9).infer(example.prior, example.likelihood, example.targets)
    found = match(problem, tilt(problem.likelihood, problem.targets, power), power, result.sites)
    assert float(found.size) < 1e-7
    return found


def cavities(found):
    return GaussianSites(found.cavity_mean / found.cavity_variance, 1 / found.cavity_variance)


def test_a_concave_likelihood_has_one_straight_branch_and_log_z_is_that_of_the_sites():
    likelihood, prior, y = CASES["bernoulli_logit"].problem(12)
    assert isinstance(likelihood, BernoulliLogitLikelihood)
    problem = Problem.of(prior(), likelihood, y, 0.0)
    low = EP(power=0.2, tolerance=1e-9).infer(prior(), likelihood, y)
    found = match(problem, tilt(likelihood, y, 0.2), 0.2, low.sites)
    path, begin = partial(by_power, problem), cavities(found)
    branch = follow_arc(problem, path, begin, 0.2, lowest=0.05, max_evaluations=100, tolerance=1e-6)
    assert branch.reason == "converged"
    assert len(branch.trace) <= 12
    steps = [place.t for place in branch.places]
    assert steps == sorted(steps)
    again = EP(tolerance=1e-9).infer(prior(), likelihood, y)
    torch.testing.assert_close(branch.end.value, again.log_evidence.detach(), rtol=1e-8, atol=1e-7)
    torch.testing.assert_close(branch.end.sites.precision, again.sites.precision, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("step_scale", [1.0, 0.2])
def test_a_branch_is_followed_around_its_turns(step_scale):
    example, problem, path = at_setting(10, 0)
    begin = cavities(matched_at(problem, example, 0.8))
    branch = follow_arc(
        problem, path, begin, 0.8, lowest=0.02, max_evaluations=300, tolerance=1e-6, step_scale=step_scale
    )
    assert branch.reason == "converged"
    steps = torch.tensor([place.t for place in branch.places]).diff()
    assert int((steps[1:].sign() != steps[:-1].sign()).sum()) == 2
    end = match(problem, tilt(problem.likelihood, problem.targets, 1.0), 1.0, branch.end.sites)
    assert float(end.size) < 1e-6
    torch.testing.assert_close(branch.end.value, end.value, rtol=1e-8, atol=1e-7)


def test_a_branch_that_ends_says_how():
    example, problem, path = at_setting(17, 10)
    found = matched_at(problem, example, 0.5)
    follow = partial(follow_arc, problem, path, cavities(found), 0.5, lowest=0.02, tolerance=1e-6, step_scale=0.2)
    branch = follow(max_evaluations=300)
    assert branch.reason == "turned back"
    assert branch.end is None
    assert 0.6 < max(place.t for place in branch.places) < 0.7
    assert branch.farthest.t == pytest.approx(max(place.t for place in branch.places), abs=0.02)
    assert branch.farthest.size < 1e-8
    unsettled = follow(max_evaluations=300, partway=False)
    assert unsettled.reason == "turned back"
    assert unsettled.farthest is None
    assert len(unsettled.trace) < len(branch.trace)
    short = follow(max_evaluations=50)
    assert short.reason == "budget"
    assert len(short.trace) <= 50


def test_cavities_that_are_no_solution_lead_nowhere():
    _, problem, path = at_setting(17, 10)
    nothing = match(problem, tilt(problem.likelihood, problem.targets, 0.5), 0.5, problem.no_sites())
    branch = follow_arc(problem, path, cavities(nothing), 0.5, lowest=0.02, max_evaluations=50, tolerance=1e-6)
    assert branch.end is None


@pytest.mark.parametrize("place", [(12, 0), (17, 10)])
def test_ep_arrives_at_power_one_where_its_branch_turns(place):
    row = inferred(EXAMPLES[2].problem(*SETTINGS[place]), EP())
    assert row["status"] == "CONVERGED", row["message"]
    assert row["power"] == 1
    assert row["residual"] < 1e-5
    assert math.isfinite(row["evidence"])
