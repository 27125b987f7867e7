"""The status of `fit` names the outcome of training: numerical failures do not raise, and work is bounded."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import VariationalELBO

import gpext
from gpext import FitStatus, fit
from gpext.inference import CAVI, EP, KL, Laplace, Status, Taylor
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    LaplaceLikelihood,
    Matern32Likelihood,
    NoiseFloor,
    PoissonLikelihood,
    StudentTLikelihood,
)
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.training import latent_inference
from tests.members import F64, tensor
from tests.sparse_models import SparseGP

RULES = {"KL": KL(), "Laplace": Laplace(), "EP": EP(), "CAVI": CAVI(), "Taylor": Taylor()}


class Curve(gpext.models.LatentGP):
    def __init__(self, x, y, likelihood, rule=None, **options):
        super().__init__(x, y, likelihood, rule, **options)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.to(x)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def data(n=20):
    x = torch.linspace(0, 4, n, dtype=F64).unsqueeze(-1)
    return x, x[:, 0].sin() + 0.2 * torch.randn(n, dtype=F64, generator=torch.Generator().manual_seed(0))


class Ending:
    """A rule with a given status from some inference on, which records its numbers of steps."""

    def __init__(self, rule, status=None, after=0):
        self.rule, self.status, self.after = rule, status, after
        self.num_steps = []

    def infer(self, *arguments, **options):
        result = self.rule.infer(*arguments, **options)
        self.num_steps.append(result.num_steps)
        if self.status is not None and len(self.num_steps) > self.after:
            result = replace(result, status=self.status)
        return result


def fitted(x, y, likelihood, rule=None, *, max_steps=None, model=None, **options):
    model = Curve(x, y, likelihood, rule, **options) if model is None else model
    return fit(LatentMarginalLogLikelihood(likelihood, model), x, y, progress=False, max_steps=max_steps), model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::gpext.inference.InferenceWarning")
@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_training_has_converged_only_where_its_inference_has(rule, status):
    x, y = data(8)
    likelihood = StudentTLikelihood(noise_prior=gpytorch.priors.LogNormalPrior(-2.0, 0.3))
    model = Curve(x, y, likelihood, Ending(rule, status, after=1))
    mll = LatentMarginalLogLikelihood(likelihood, model)
    result = fit(mll, x, y, tolerance=0.05, progress=False)
    if status in (Status.CONVERGED, Status.REDUCED_POWER):
        assert result.status is FitStatus.CONVERGED
    elif status in (Status.NOT_POSITIVE_DEFINITE, Status.NOT_FINITE):
        assert result.status is FitStatus.NO_POSTERIOR
    else:
        assert result.status is FitStatus.INFERENCE_UNFINISHED
    assert model.result.status is status
    assert model.result.message.rstrip(".") in result.message or status is Status.CONVERGED


def test_a_start_without_a_posterior_is_a_status_and_nothing_is_lost():
    x, y = data()
    model = Curve(x, y, StudentTLikelihood(noise_constraint=GreaterThan(0.0)))
    with torch.no_grad():
        model.covar_module.base_kernel.raw_lengthscale.fill_(-800.0)  # softplus: zero
    before = copy.deepcopy(dict(model.named_parameters()))
    result, _ = fitted(x, y, model.likelihood, model=model)
    assert result.status is FitStatus.BREAKDOWN
    assert "NaN or infinite" in result.message
    assert result.num_steps == 0
    assert math.isnan(result.objective)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert fitted(x, y, model.likelihood, model=model)[0].status is FitStatus.NO_POSTERIOR


@pytest.mark.parametrize("batch_size", [None, 5])
@pytest.mark.parametrize("inducing", [1, 3])
def test_a_count_of_a_million_among_few_trains(inducing, batch_size):
    """The best sites of one datum alone overshoot so far that the bound is minus infinity there."""
    x, y = torch.zeros(5, 1, dtype=F64), tensor(0.0, 0.0, 1.0, 1e6, 2.0)
    model = SparseGP(0.5 * torch.arange(inducing, dtype=F64).unsqueeze(-1))
    mll = VariationalELBO(PoissonLikelihood(), model, num_data=5)
    result = fit(mll, x, y, batch_size=batch_size, max_steps=60, progress=False)
    assert math.isfinite(result.objective)
    if batch_size is None:
        rate = y.mean()  # of all five, which have one f
        best = (y * rate.log() - rate - torch.lgamma(y + 1)).mean()
        assert result.status in (FitStatus.CONVERGED, FitStatus.MAX_STEPS)
        assert best - 1e-3 * abs(best) < result.objective < best
    with torch.no_grad():
        assert bool(model(x).mean.isfinite().all())


def test_a_bound_that_is_nowhere_finite_leaves_everything_as_it_was():
    x, y = torch.zeros(3, 1, dtype=F64), tensor(0.0, 1.0, 2.0)
    model = SparseGP(torch.zeros(1, 1, dtype=F64))
    with torch.no_grad():
        model.mean_module.bias.fill_(1e4)  # the rate is its exp
    mll = VariationalELBO(PoissonLikelihood(), model, num_data=3)
    before = copy.deepcopy(dict(mll.named_parameters()))
    result = fit(mll, x, y, progress=False)
    assert result.status is FitStatus.BREAKDOWN
    assert "rescale the data" in result.message
    assert all(torch.equal(value, before[name]) for name, value in mll.named_parameters())


LIKELIHOODS = {"student_t": StudentTLikelihood, "laplace": LaplaceLikelihood, "matern32": Matern32Likelihood}


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["constant", "noiseless"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_work_of_an_iteration_is_bounded_where_there_is_no_noise(name, targets):
    x, y = data(12)
    y = torch.full_like(y, 2.5) if targets == "constant" else x[:, 0].sin()
    likelihood = LIKELIHOODS[name]()
    rule = Ending(KL())
    model, evaluations = Curve(x, y, likelihood, rule), []
    mll = LatentMarginalLogLikelihood(likelihood, model)
    result = fit(mll, x, y, progress=False, callback=lambda *_: evaluations.append(len(rule.num_steps)))
    assert result.status is FitStatus.NOISE_FLOOR
    assert "likelihood.noise ended at its floor" in result.message
    assert model.result.status is Status.CONVERGED
    assert max(b - a for a, b in itertools.pairwise(evaluations)) < 40  # a few line searches
    assert sum(rule.num_steps) < 1500  # it was tens of thousands


def test_a_rule_that_maximises_a_bound_goes_on_at_the_next_evaluation():
    x, y = data()
    seen = []

    class Watched(KL):
        def infer(self, *arguments, **options):
            seen.append((self.max_steps, self.tolerance, self.norm))
            return super().infer(*arguments, **options)

    model = Curve(x, y, StudentTLikelihood(), rule := Watched())
    fitted(x, y, model.likelihood, model=model, max_steps=3)
    rough = 1e-3, "rms"  # the square of the tolerance's hundredth, 1e-6
    assert model.inference is rule
    assert seen[0] == (rule.max_steps, *rough)
    assert seen[-1] == (rule.max_steps, rule.tolerance, "max")  # at the end
    assert set(seen) == {seen[0], (latent_inference.MOST_STEPS, *rough), seen[-1]}


@pytest.mark.parametrize("rule", [KL(), CAVI(), EP()], ids=lambda rule: type(rule).__name__)
def test_rough_inference_while_training_finds_the_optimum_of_the_exact_one(rule, monkeypatch):
    x, y = data(60)
    chance = torch.rand(60, dtype=F64, generator=torch.Generator().manual_seed(1))
    targets = (chance < (2 * y).sigmoid()).to(F64)
    objectives = []
    for is_rough in (True, False):
        if not is_rough:
            monkeypatch.setattr(latent_inference, "ROUGHEST", 0.0)
            monkeypatch.setattr(latent_inference, "ROUGHEST_RMS", 0.0)
        model = Curve(x, targets, BernoulliLogitLikelihood(), rule)
        mll = LatentMarginalLogLikelihood(model.likelihood, model)
        result = fit(mll, x, targets, tolerance=1e-7, progress=False)
        assert result.status is FitStatus.CONVERGED
        objectives.append(result.objective)
    assert objectives[0] == pytest.approx(objectives[1], abs=1e-5)  # flat directions end where they may


def test_the_floor_follows_the_spread_and_no_outlier():
    y = torch.randn(101, dtype=F64, generator=torch.Generator().manual_seed(0))
    spread = (y - y.median()).abs().median()

    def floor(targets, likelihood=None):
        likelihood = StudentTLikelihood().to(targets) if likelihood is None else likelihood
        Curve(torch.zeros(len(targets), 1, dtype=targets.dtype), targets, likelihood)
        constraint = likelihood.raw_noise_constraint
        return float(constraint.lower_bound) if isinstance(constraint, NoiseFloor) else None

    share = torch.finfo(F64).eps ** 0.5
    assert floor(y) == pytest.approx(share * float(spread) ** 2)
    assert floor(100 * y) == pytest.approx(1e4 * floor(y))
    assert floor(y + 1e3) == pytest.approx(floor(y), rel=1e-6)
    far = y.clone()
    far[7] = 1e9
    assert floor(far) == pytest.approx(floor(y), rel=0.1)
    assert 10 * floor(y) < floor(y.float()) < 1e-5 * float(spread) ** 2  # the kernel has fewer digits
    assert floor(torch.full_like(y, 3.0)) == pytest.approx(9 * share)
    assert floor(torch.zeros_like(y)) == pytest.approx(share)
    assert floor(torch.zeros_like(y).index_fill(0, torch.tensor(3), 2.0)) == pytest.approx(4 * share)
    for constraint in (GreaterThan(0.0), GreaterThan(1e-4), gpytorch.constraints.Positive(torch.exp, torch.log)):
        assert floor(y, StudentTLikelihood(noise_constraint=constraint).double()) is None
    frozen = StudentTLikelihood().double()
    frozen.raw_noise.requires_grad_(False)
    assert floor(y, frozen) is None
    precise = StudentTLikelihood().double()
    precise.noise = 1e-12
    assert floor(y, precise) is None
    assert float(precise.noise.detach()) == pytest.approx(1e-12)


def test_new_targets_on_a_smaller_scale_lower_the_floor():
    x, y = data()
    model = Curve(x, y, StudentTLikelihood())
    noise, floor = model.likelihood.noise.clone(), model.likelihood.raw_noise_constraint.lower_bound.clone()
    model.set_train_data(targets=1e-3 * y)
    torch.testing.assert_close(model.likelihood.noise, noise)
    torch.testing.assert_close(model.likelihood.raw_noise_constraint.lower_bound, 1e-6 * floor)
    model.set_train_data(targets=y)
    torch.testing.assert_close(model.likelihood.raw_noise_constraint.lower_bound, 1e-6 * floor)


@pytest.mark.parametrize("name", ["StudentTLikelihood", "LaplaceLikelihood"])
def test_parameters_travel_between_gpytorch_and_a_likelihood_with_a_floor(name):
    x, y = data()
    theirs, ours = getattr(gpytorch.likelihoods, name)().double(), getattr(gpext.likelihoods, name)().double()
    theirs.noise = 0.037
    before = float(ours.noise.detach())
    Curve(x, y, ours)
    assert isinstance(ours.raw_noise_constraint, NoiseFloor)
    assert float(ours.noise.detach()) == pytest.approx(before, rel=1e-12)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.noise, theirs.noise)  # the bounds are a part of the state
    Curve(x, y, other := getattr(gpext.likelihoods, name)().double())
    other.noise = 0.21
    theirs.load_state_dict(other.state_dict())
    torch.testing.assert_close(theirs.noise, other.noise, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("rule", ["KL", "Laplace", "EP"])
def test_inference_starts_from_the_sites_of_the_best_step(rule):
    """The sites of a step that a line search has left may be far from those of the next one."""
    seen = []

    class Noted(Ending):
        def infer(self, *arguments, start, **options):
            result = super().infer(*arguments, start=start, **options)
            seen.append((start, result))
            return result

    x, y = data()
    y = tensor(*[5.0 * (i == 7) for i in range(20)]) + y
    likelihood = StudentTLikelihood()
    model = Curve(x, y, likelihood, Noted(RULES[rule]))
    fit(LatentMarginalLogLikelihood(likelihood, model), x, y, progress=False, max_steps=12)
    best = best_sites = None
    left = 0
    for start, result in seen[:-3]:  # the last ones are of the ending
        if best_sites is not None:
            assert torch.equal(start.shift, best_sites.shift)
        value = float(result.log_evidence.detach())
        left += best is not None and value < best
        if best is None or value > best:
            best, best_sites = value, result.sites
    assert left > 0
