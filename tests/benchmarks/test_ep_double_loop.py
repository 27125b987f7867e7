"""EP's double loop: its objective never falls, and it reaches the fixed points of the other schedules."""

import itertools

import pytest
import torch
from gpytorch.constraints import Positive
from gpytorch.likelihoods import GaussianLikelihood

from benchmarks.ep_double_loop import _evaluate, _first, _marginals, _newton, _step, _toward, loop_doubly
from benchmarks.ep_schedules import DoubleLoopEP
from gpext.inference import EP, Status
from gpext.inference.ep_internals.moment_matching import match
from gpext.inference.problem import Problem
from gpext.likelihoods.tilted_moments import tilt
from gpext.sites import GaussianSites
from tests.inference.test_ep import gaussian, smooth, student_t
from tests.latent_cases import CASES
from tests.members import F64

pytestmark = pytest.mark.slow


def two_that_disagree():
    """Two contradictory outliers in a gap, where undamped EP fails [JVV11 Fig. 1]."""
    x = torch.cat([torch.tensor([1.9, 2.1]), torch.linspace(-3, 1, 12), torch.linspace(3, 5, 6)]).double()
    y = torch.cat([torch.tensor([3.0, -3.0]).double(), torch.sin(x[2:])])
    return gaussian(smooth(x.unsqueeze(-1), 0.9, 3.0)), student_t(2.0, 0.1), y


@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize("name", ["bernoulli_logit", "stock_bernoulli", "student_t", "laplace", "stock_gaussian"])
def test_ends_where_the_parallel_schedule_does(name, power):
    likelihood, prior, y = CASES[name].problem(12)
    found = DoubleLoopEP(power=power).infer(prior(), likelihood, y)
    expected = EP(power=power, tolerance=1e-9).infer(prior(), likelihood, y)
    assert found.status is Status.CONVERGED
    assert "double loop" in found.message
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.posterior.mean, expected.posterior.mean, rtol=0, atol=1e-5)


def test_a_hard_problem_converges_too():
    prior, likelihood, y = two_that_disagree()
    found = DoubleLoopEP(max_steps=20_000, tolerance=1e-5).infer(prior, likelihood, y)
    assert found.status is Status.CONVERGED, found.message
    # EP may have several fixed points, and other schedules find others of them
    at = match(Problem.of(prior, likelihood, y, 0.0), tilt(likelihood, y, 1.0), 1.0, found.sites)
    assert float(at.size) < 2e-5


@pytest.mark.parametrize("noise", [0.02, 1e-4])
def test_under_noise_much_narrower_than_the_prior(noise):
    """Here the cavities at the minimum of G could be improper, and targets are hundreds of noise scales apart."""
    x = torch.linspace(0, 5, 14, dtype=torch.float64)
    y = torch.sin(2 * x).index_add(0, torch.tensor([3, 9]), torch.tensor([4.0, -2.5], dtype=torch.float64))
    likelihood, prior = GaussianLikelihood(noise_constraint=Positive()).double(), gaussian(smooth(x[:, None], 0.3, 1.7))
    likelihood.noise = noise
    found = DoubleLoopEP().infer(prior, likelihood, y)
    assert found.status is Status.CONVERGED, found.message
    exact = likelihood(prior).log_prob(y)
    torch.testing.assert_close(found.log_evidence, exact, rtol=0, atol=1e-8)


@torch.no_grad()
def outer_values(problem, moments, power, looks):
    """F after each outer step, its inner loop run to the end by hand."""
    sites, values = problem.no_sites(), []
    outer = _first(problem, moments, power, problem.condition(sites))
    for _ in range(looks):
        inner = _evaluate(problem, moments, power, problem.condition(sites), outer)
        for _ in range(60):
            step, slope = _newton(inner, power)
            rate = 1.0
            while True:
                candidate = _evaluate(problem, moments, power, problem.condition(_step(inner.sites, step, rate)), outer)
                if float(candidate.value) <= float(inner.value) + 1e-4 * rate * float(slope) or rate < 1e-6:
                    break
                rate = rate / 2
            if float(-slope) < 1e-18 or rate < 1e-6:
                break
            inner = candidate
        partition = 0.5 * outer.shift.square() / outer.precision - 0.5 * outer.precision.log()
        values.append(float(inner.value - partition.sum() / power))
        sites = inner.sites
        outer = _toward(_marginals(problem.condition(sites)), outer, sites, power)
        assert bool((outer.precision > power * sites.precision).all())
    return values


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_the_outer_loop_never_lowers_its_objective(power):
    prior, likelihood, y = two_that_disagree()
    problem = Problem.of(prior, likelihood, y, 0.0)
    values = outer_values(problem, tilt(likelihood, y, power), power, 15)
    assert all(after >= before - 1e-9 for before, after in itertools.pairwise(values))
    assert values[-1] > values[0] + 1


@pytest.mark.parametrize("power", [1.0, 0.4])
def test_slope_and_curvature_agree_with_finite_differences(power):
    prior, likelihood, y = two_that_disagree()
    problem = Problem.of(prior, likelihood, y, 0.0)
    moments = tilt(likelihood, y, power)
    generator = torch.Generator().manual_seed(0)
    precision = 0.3 + 0.1 * torch.rand(len(y), generator=generator, dtype=F64)
    sites = GaussianSites(precision * y, precision)
    posterior = problem.condition(sites)
    wide = _marginals(posterior)
    outer = GaussianSites(wide.shift, 1.3 * wide.precision)
    inner = _evaluate(problem, moments, power, posterior, outer)
    step, slope = _newton(inner, power)

    @torch.no_grad()
    def value(t):
        return float(_evaluate(problem, moments, power, problem.condition(_step(sites, step, t)), outer).value)

    h = 1e-4
    ahead, here, behind = value(h), value(0.0), value(-h)
    assert (ahead - behind) / (2 * h) == pytest.approx(float(slope), rel=1e-6)
    # along a Newton step the second derivative is minus the first
    assert (ahead - 2 * here + behind) / h**2 == pytest.approx(-float(slope), rel=1e-4)


def test_stops_where_it_is_told_to():
    prior, likelihood, y = two_that_disagree()
    result = DoubleLoopEP(max_steps=5).infer(prior, likelihood, y)
    assert result.status is Status.MAX_STEPS
    assert bool(result.log_evidence.isfinite())
    problem = Problem.of(prior, likelihood, y, 0.0)
    _, trace = loop_doubly(
        problem, tilt(likelihood, y, 1.0), 1.0, problem.no_sites(), max_evaluations=7, tolerance=1e-6
    )
    assert len(trace) == 7


def test_a_batch_too():
    likelihood, prior, y = CASES["student_t"].problem(10)
    together = DoubleLoopEP().infer(prior(), likelihood, torch.stack([y, -2 * y]))
    alone = EP().infer(prior(), likelihood, -2 * y)
    torch.testing.assert_close(together.log_evidence[1], alone.log_evidence, rtol=0, atol=1e-5)
