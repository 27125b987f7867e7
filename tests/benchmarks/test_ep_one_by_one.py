"""EP site by site has the fixed points of the parallel schedule."""

import gpytorch
import pytest
import torch

from benchmarks.ep_one_by_one import _visit_all
from benchmarks.ep_schedules import SequentialEP
from gpext.inference import EP, KL, Status
from gpext.inference.ep_internals.moment_matching import match
from gpext.inference.problem import Problem
from gpext.likelihoods.tilted_moments import tilt
from gpext.sites import GaussianSites
from tests.inference.test_ep import hard_problem
from tests.latent_cases import CASES
from tests.members import F64

pytestmark = pytest.mark.slow

SEQUENTIAL = SequentialEP(tolerance=1e-8)


@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize("name", ["bernoulli_logit", "stock_bernoulli", "student_t", "laplace", "stock_gaussian"])
def test_ends_where_the_parallel_schedule_does(name, power):
    likelihood, prior, y = CASES[name].problem(15)
    one_by_one = SequentialEP(power=power, tolerance=1e-8).infer(prior(), likelihood, y)
    together = EP(power=power, tolerance=1e-8).infer(prior(), likelihood, y)
    assert one_by_one.status is Status.CONVERGED
    assert "sequential sweeps" in one_by_one.message
    torch.testing.assert_close(one_by_one.log_evidence, together.log_evidence, rtol=0, atol=1e-6)
    torch.testing.assert_close(one_by_one.posterior.mean, together.posterior.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(one_by_one.posterior.variance, together.posterior.variance, rtol=1e-6, atol=0)
    torch.testing.assert_close(one_by_one.sites.precision, together.sites.precision, rtol=1e-6, atol=1e-6)


def each(likelihood, y, power):
    return [tilt(likelihood, y[i : i + 1], power) for i in range(len(y))]


def test_a_sweep_is_what_it_is_with_the_posterior_made_anew_for_every_datum():
    likelihood, prior, y = CASES["student_t"].problem(8)
    problem, power, damping = Problem.of(prior(), likelihood, y, 0.0), 0.7, 0.6
    moments = tilt(likelihood, y, power)
    generator = torch.Generator().manual_seed(0)
    precision = torch.rand(8, generator=generator, dtype=F64)
    sites = GaussianSites(precision * y, precision)
    with torch.no_grad():
        found = _visit_all(match(problem, moments, power, sites), each(likelihood, y, power), damping)
        for i in range(8):
            target = match(problem, moments, power, sites).proposal
            sites = sites.choose(sites.lerp(target, damping), torch.arange(8) == i)
    torch.testing.assert_close(found.precision, sites.precision, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.shift, sites.shift, rtol=1e-9, atol=1e-10)


def test_every_cavity_stays_proper_on_hard_problems():
    widening = 0
    for seed in (8, 20, 26):
        p, likelihood, y = hard_problem(seed)
        problem = Problem.of(p, likelihood, y, 0.0)
        moments, parts = tilt(likelihood, y, 1.0), each(likelihood, y, 1.0)
        with torch.no_grad():
            current = match(problem, moments, 1.0, problem.no_sites())
            for _ in range(12):
                sites = _visit_all(current, parts, 1.0)
                current = match(problem, moments, 1.0, sites)
                assert bool(current.proper), seed
                widening += int((sites.precision < 0).any())
    assert widening > 0  # some sites have a negative precision


@pytest.mark.parametrize("damping", [0.8, 0.2])
def test_converges_on_outliers_however_damped(damping):
    p, likelihood, y = hard_problem(3)
    with torch.no_grad():
        result = SequentialEP(damping=damping).infer(p, likelihood, y)
        assert result.status is Status.CONVERGED
        again = SEQUENTIAL.infer(p, likelihood, y, start=result.sites)
    assert again.num_steps < result.num_steps
    torch.testing.assert_close(again.log_evidence, result.log_evidence, rtol=1e-6, atol=1e-5)


def test_where_it_does_not_converge_it_says_so():
    p, likelihood, y = hard_problem(20)
    with torch.no_grad():
        result = SequentialEP().infer(p, likelihood, y)
        assert result.status is Status.STALLED
        assert bool(result.log_evidence.isfinite())
        assert SequentialEP(max_steps=2).infer(p, likelihood, y).status is Status.MAX_STEPS


def test_a_batch_is_refused():
    likelihood, prior, y = CASES["student_t"].problem(5)
    with pytest.raises(ValueError, match=r"one posterior of one latent; got means of shape \(2, 5\)"):
        SEQUENTIAL.infer(prior(), likelihood, torch.stack([y, -y]))


class LaplaceNoise(gpytorch.likelihoods.Likelihood):
    """Noise with a scale per datum, which does not match a slice of the data."""

    def __init__(self, size):
        super().__init__()
        self.scale = torch.linspace(0.1, 1, size, dtype=F64)

    def forward(self, f):
        return torch.distributions.Laplace(f, self.scale)


def test_noise_of_each_datum_is_not_visited_one_by_one():
    _, prior, y = CASES["laplace"].problem(9)
    for rule, one_by_one in ((EP, SequentialEP()), (KL, KL(schedule="sequential"))):
        with pytest.raises(ValueError, match="parameters of each datum"):
            one_by_one.infer(prior(), LaplaceNoise(9), y)
        assert rule().infer(prior(), LaplaceNoise(9), y).status is Status.CONVERGED
    fixed = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.ones(9, dtype=F64))
    with pytest.raises(ValueError, match="parameters of each datum"):
        SEQUENTIAL.infer(prior(), fixed, y)


class Slopes(gpytorch.likelihoods.Likelihood):
    """Classes whose latents are multiplied by a factor per datum."""

    def forward(self, f):
        return torch.distributions.Bernoulli(logits=torch.linspace(0.1, 1, 130, dtype=F64) * f)


def test_kl_does_not_turn_to_single_data_with_parameters_of_each():
    """By default it continues one by one where sixty parallel steps are not enough, as under this wide prior."""
    y = (torch.arange(130) % 2).to(F64)
    wide = gpytorch.distributions.MultivariateNormal(0 * y, 1e8 * torch.eye(130, dtype=F64))
    result = KL(max_steps=70).infer(wide, Slopes(), y)
    assert result.num_steps > 60
    assert result.log_evidence.isfinite()
