"""Training that begins on subsets ends where training without does, and leaves the model with its own data."""

from __future__ import annotations

import copy
import math

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO

import gpext
from gpext import FitStatus, fit
from gpext.designs import pairs
from gpext.estimators import GPClassifier
from gpext.estimators.gaussian_evidence import GaussianEvidence
from gpext.inference import KL, Laplace
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    MultinomialLogitLikelihood,
    PairwiseLogitLikelihood,
    StudentTLikelihood,
    Weighted,
)
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models.latent_gp import restricted_to
from gpext.optim import Curvature, lbfgs
from gpext.training import fitting, subsets
from tests.members import F64
from tests.sparse_models import SparseGP

NUM_DATA = 90
SIZES = [30, 45]


class Process(gpext.models.LatentGP):
    def __init__(self, x, y, likelihood, rule=None, **options):
        super().__init__(x, y, likelihood, rule or Laplace(), **options)
        latents = getattr(likelihood, "num_latents", None)
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=torch.Size([latents] if latents else []))
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.to(x)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.fixture
def few(monkeypatch):
    """Subsets of fewer data than those of users, to be quick."""
    monkeypatch.setattr(subsets, "_MOST", 60)
    monkeypatch.setattr(subsets, "_LEAST", 30)


def data(n=NUM_DATA):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(n, 1, generator=generator, dtype=F64)
    return x, (torch.rand(n, generator=generator, dtype=F64) < torch.sigmoid(3 * torch.sin(2 * x[:, 0]))).to(F64)


def objective(x, y, likelihood=None, rule=None, **options):
    model = Process(x, y, BernoulliLogitLikelihood() if likelihood is None else likelihood, rule, **options)
    return LatentMarginalLogLikelihood(model.likelihood, model)


def parameters(mll):
    return [p.detach().clone() for p in mll.parameters()]


def count_sizes(mll):
    """Return a list to which each inference appends its number of data."""
    sizes, infer = [], mll.model.variational_strategy.infer

    def counting(prior, targets):
        sizes.append(prior.event_shape[-1])
        return infer(prior, targets)

    mll.model.variational_strategy.infer = counting
    return sizes


def assert_has_all(mll, x, y):
    """The model predicts from all its data: as one that has never known others does."""
    model = mll.model
    assert torch.equal(model.train_inputs[0], x)
    assert torch.equal(model.train_targets, y)
    fresh = Process(x, y, copy.deepcopy(model.likelihood), model.inference).eval()
    fresh.mean_module, fresh.covar_module = copy.deepcopy(model.mean_module), copy.deepcopy(model.covar_module)
    torch.testing.assert_close(model.eval()(x).mean, fresh(x).mean, rtol=1e-6, atol=1e-6)


def break_down_on_subsets(mll):
    """Let the prior of fewer data than all be nan, until `forward` of the model is deleted."""
    forward = mll.model.forward
    mll.model.forward = lambda x: forward(x if len(x) == NUM_DATA else x * torch.tensor(float("nan")))


def test_it_ends_at_the_same_optimum_after_fewer_evaluations_of_all_data():
    x, y = data(420)
    ends, sizes = {}, {}
    for initial in ("data", "subset"):
        mll = objective(x, y)
        sizes[initial] = count_sizes(mll)
        ends[initial] = fit(mll, x, y, initial=initial, tolerance=1e-7, progress=False)
        assert ends[initial].status is FitStatus.CONVERGED
    assert ends["subset"].objective == pytest.approx(ends["data"].objective, abs=1e-6)
    assert sizes["subset"].count(420) < sizes["data"].count(420)
    assert sizes["subset"].count(150) > 3
    assert sizes["subset"].count(210) > 0
    assert set(sizes["subset"]) == {150, 210, 420}
    assert len(ends["subset"].trace) == ends["subset"].num_steps
    assert "begun on 150, then 210 random data of 420" in ends["subset"].message
    assert "random data" not in ends["data"].message
    assert_has_all(mll, x, y)


@pytest.mark.parametrize(("classes", "rule"), [(2, Laplace()), (2, KL()), (3, Laplace())])
def test_inference_goes_on_from_the_sites_of_the_subset_before(few, classes, rule):
    """Data that are new have none."""
    x, y = data()
    y = y if classes == 2 else (x[:, 0] > 1).long() + (x[:, 0] > 3)
    mll = objective(x, y, BernoulliLogitLikelihood() if classes == 2 else MultinomialLogitLikelihood(3), rule)
    strategy, first, last = mll.model.variational_strategy, {}, {}
    infer = strategy.infer

    def watching(prior, targets):
        size = targets.shape[-1]
        first.setdefault(size, strategy.sites)
        result = infer(prior, targets)
        last[size] = strategy.sites
        return result

    strategy.infer = watching
    fit(mll, x, y, initial="subset", progress=False)
    (quarter, half), _ = subsets.draw_subsets(mll, torch.Generator().manual_seed(0))
    assert first[len(quarter)] is None
    torch.testing.assert_close(first[len(half)].shift[..., :30], last[30].shift, rtol=0.1, atol=0.1)  # of the best step
    assert first[len(half)].shift[..., 30:].abs().max() == 0
    torch.testing.assert_close(first[NUM_DATA].shift[..., half], last[45].shift, rtol=0.1, atol=0.1)
    others = torch.ones(NUM_DATA, dtype=torch.bool).index_fill(0, half, False)
    assert first[NUM_DATA].shift[..., others].abs().max() == 0


def test_an_objective_in_closed_form_has_no_sites_to_go_on_from(few):
    x, _ = data()
    y = torch.sin(2 * x[:, 0])
    model = Process(x, y, GaussianLikelihood().double())
    result = fit(GaussianEvidence(model.likelihood, model), x, y, initial="subset", progress=False)
    assert "begun on 30, then 45 random data of 90" in result.message
    assert result.status in (FitStatus.CONVERGED, FitStatus.NOISE_FLOOR)


@pytest.mark.parametrize("step", [2, None], ids=["first subset", "second subset"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, None], ids=["Ctrl-C", "error", "stop"])
def test_the_model_has_its_data_again_whatever_happens_on_a_subset(few, step, error):
    x, y = data()
    mll = objective(x, y)
    start, seen = parameters(mll), []

    def callback(count, value):
        size = len(mll.model.train_targets)
        if size == SIZES[0 if step else 1] and (step is None or count == step):
            seen.extend(parameters(mll))
            if error is not None:
                raise error("here")
            return True
        return False

    def train():
        return fit(mll, x, y, initial="subset", progress=False, callback=callback)

    if error is RuntimeError:
        with pytest.raises(RuntimeError, match="here"):
            train()
    else:
        result = train()
        assert result.status is (FitStatus.STOPPED if error is None else FitStatus.INTERRUPTED)
        with torch.no_grad():
            mll.train()
            assert result.objective == pytest.approx(float(mll(mll.model(x), y)))
    for now, then in zip(parameters(mll), seen, strict=True):
        torch.testing.assert_close(now, then)
    assert any(not torch.equal(now, first) for now, first in zip(parameters(mll), start, strict=True))
    assert_has_all(mll, x, y)


def test_an_interrupt_inside_the_inference_of_a_subset_keeps_the_best_step(few):
    x, y = data()
    mll = objective(x, y)
    infer, calls, best = mll.model.variational_strategy.infer, [], []

    def interrupted(prior, targets):
        calls.append(prior.event_shape[-1])
        if len(calls) == 5:
            raise KeyboardInterrupt
        return infer(prior, targets)

    mll.model.variational_strategy.infer = interrupted
    result = fit(mll, x, y, initial="subset", progress=False, callback=lambda *_: best.append(parameters(mll)))
    assert calls[4] == SIZES[0]
    assert result.status is FitStatus.INTERRUPTED
    for now, then in zip(parameters(mll), best[-1], strict=True):
        torch.testing.assert_close(now, then)
    assert_has_all(mll, x, y)


def test_steps_on_subsets_count(few):
    x, y = data()
    mll = objective(x, y)
    sizes = count_sizes(mll)
    result = fit(mll, x[:, 0], y, initial="subset", max_steps=2, progress=False)
    assert result.status is FitStatus.MAX_STEPS
    assert result.num_steps == 2
    assert sizes[-1] == NUM_DATA  # the end, inferred from all data once
    assert set(sizes[: sizes.index(NUM_DATA)]) == {SIZES[0]}
    assert_has_all(mll, x, y)


def test_few_data_have_no_subset_and_the_message_says_so():
    x, y = data(50)
    mll = objective(x, y)
    sizes = count_sizes(mll)
    result = fit(mll, x, y, initial="subset", max_steps=3, progress=False)
    assert set(sizes) == {50}
    assert "no subset of 50 data: at most 400 are all used" in result.message
    assert subsets.subset_sizes(400) == []
    assert subsets.subset_sizes(401) == [150, 200]
    assert subsets.subset_sizes(1000) == [250, 500]
    assert subsets.subset_sizes(1000, with_neighbours=True) == [150, 387]
    assert subsets.subset_sizes(20_000, with_neighbours=True) == [2500, 7071]


def test_subsets_are_nested_and_follow_the_generator(few):
    mll = objective(*data())
    (quarter, half), _ = subsets.draw_subsets(mll, torch.Generator().manual_seed(3))
    assert torch.equal(quarter, half[: len(quarter)])
    assert len(half.unique()) == len(half) == SIZES[1]
    (again, _), _ = subsets.draw_subsets(mll, torch.Generator().manual_seed(3))
    (other, _), _ = subsets.draw_subsets(mll, torch.Generator().manual_seed(4))
    assert torch.equal(quarter, again)
    assert not torch.equal(quarter, other)
    x, y = data()
    first, second = (objective(x, y) for _ in range(2))
    for each in (first, second):
        fit(each, x, y, initial="subset", max_steps=6, progress=False, generator=torch.Generator().manual_seed(3))
    assert all(torch.equal(a, b) for a, b in zip(parameters(first), parameters(second), strict=True))


def cases():
    x, y = data(40)
    weights = torch.linspace(0.5, 2, 40, dtype=F64)
    index = torch.stack([torch.arange(40), (torch.arange(40) * 7 + 1) % 40], -1)
    rows = torch.stack([x, x.flip(0)])
    return {
        "weighted": (x, y, lambda: Weighted(BernoulliLogitLikelihood(), weights), {}),
        "several latents": (x, (4 * y + x[:, 0]).long() % 3, lambda: MultinomialLogitLikelihood(3), {}),
        "gpytorch": (x, y, GaussianLikelihood, {}),
        "inducing inputs": (x, y, BernoulliLogitLikelihood, {"inducing_inputs": x[:6].clone()}),
        "design": (x, y, PairwiseLogitLikelihood, {"design": pairs(index, 40)}),
        "batch": (rows, torch.stack([y, 1 - y]), BernoulliLogitLikelihood, {}),
    }


@pytest.mark.parametrize("name", list(cases()))
def test_a_restricted_model_is_one_of_these_data(name):
    x, y, make, options = cases()[name]
    mll = objective(x, y, make(), KL(), **options)
    model, index = mll.model.train(), torch.tensor([3, 30, 7, 19, 21, 8, 12])
    before, sites = model.result.log_evidence, model.variational_strategy.sites
    with restricted_to(model, index) as (some_x, some_y):
        model.train()
        found = mll(model(some_x), some_y)
    assert torch.equal(model.variational_strategy.sites.shift, sites.shift)
    if name == "weighted":
        expected_y, likelihood = y[index], Weighted(BernoulliLogitLikelihood(), model.likelihood.argument[index])
    else:
        expected_y, likelihood = y[..., index], make()
    if name == "design":
        options = {"design": options["design"].take(index)}  # of the same inputs, also those that no datum depends on
        other = objective(x, expected_y, likelihood, KL(), **options)
        expected = other(other.model.train()(x), expected_y)
    else:
        other = objective(x[..., index, :], expected_y, likelihood, KL(), **options)
        expected = other(other.model.train()(x[..., index, :]), expected_y)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(model.result.log_evidence, before, rtol=1e-8, atol=1e-8)
    assert torch.equal(model.train_inputs[0], x)


def test_the_floor_of_noise_stays_that_of_all_targets():
    x, _ = data(40)
    y = x[:, 0] * torch.where(torch.arange(40) < 10, 1e-3, 1.0)
    mll = objective(x, y, StudentTLikelihood().double())
    floor, noise = float(mll.likelihood.raw_noise_constraint.lower_bound), mll.likelihood.noise.clone()
    alone = objective(x[:10], y[:10], StudentTLikelihood().double())
    assert float(alone.likelihood.raw_noise_constraint.lower_bound) < 0.1 * floor
    with restricted_to(mll.model, torch.arange(10)):
        assert float(mll.likelihood.raw_noise_constraint.lower_bound) == floor
    assert float(mll.likelihood.raw_noise_constraint.lower_bound) == floor
    assert torch.equal(mll.likelihood.noise, noise)


def test_a_class_may_be_absent_from_the_subsets(few):
    x, y = data()
    classes = y.long()
    (_, half), _ = subsets.draw_subsets(objective(x, y), torch.Generator().manual_seed(0))
    classes[next(i for i in range(NUM_DATA) if i not in half.tolist())] = 2
    mll = objective(x, classes, MultinomialLogitLikelihood(3))
    result = fit(mll, x, classes, initial="subset", progress=False)
    assert result.status is FitStatus.CONVERGED
    assert_has_all(mll, x, classes)


def test_a_subset_that_breaks_down_is_left_and_the_message_says_so(few):
    x, y = data()
    mll = objective(x, y)
    break_down_on_subsets(mll)
    result = fit(mll, x, y, initial="subset", progress=False)
    assert result.status is FitStatus.CONVERGED
    assert all(f"the evidence of {size} data broke down" in result.message for size in SIZES)
    del mll.model.forward
    assert_has_all(mll, x, y)


def test_it_is_refused_where_it_has_no_meaning(tmp_path):
    x, y = data(50)
    mll = objective(x, y)
    before = copy.deepcopy(mll.state_dict())
    sparse = SparseGP(x[:5].clone())
    with pytest.raises(TypeError, match="initial='subset' is served with a LatentMarginalLogLikelihood"):
        fit(VariationalELBO(BernoulliLogitLikelihood(), sparse, num_data=50), x, y, initial="subset", progress=False)
    with pytest.raises(ValueError, match="targets must be those of the model"):
        fit(mll, x, 1 - y, initial="subset", progress=False)
    with pytest.raises(ValueError, match="inputs must be those of the model"):
        fit(mll, x + 1, y, initial="subset", progress=False)
    with pytest.raises(ValueError, match="takes all data at once"):
        fit(mll, x, y, initial="subset", batch_size=10, progress=False)
    with pytest.raises(ValueError, match="checkpoint resume training by minibatches"):
        fit(mll, x, y, initial="subset", checkpoint=tmp_path, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in mll.state_dict().items())
    noise = FixedNoiseGaussianLikelihood(torch.full((50,), 0.1, dtype=F64))
    fixed = objective(x, y, noise)
    with pytest.raises(TypeError, match="cannot take a part of the noise"):
        fit(fixed, x, y, initial="subset", progress=False)


def learned(mll, x, y, monkeypatch, **options):
    """Return the result of a training by the curvature, and that curvature."""
    found = []

    def keeping():
        found.append(Curvature())
        return found[-1]

    monkeypatch.setattr(fitting, "Curvature", keeping)
    return fit(mll, x, y, initial="curvature", progress=False, **options), found[-1]


def test_the_curvature_of_a_quarter_makes_trainings_from_known_parameters_short(monkeypatch):
    x, y = data(420)
    mll = objective(x, y)
    fit(mll, x, y, progress=False)
    trained, start = copy.deepcopy(mll.state_dict()), [p + 0.3 for p in parameters(mll)]
    ends, sizes = {}, {}
    for initial in ("given", "curvature"):
        mll = objective(x, y)
        mll.load_state_dict(trained)
        with torch.no_grad():
            for parameter, value in zip(mll.parameters(), start, strict=True):
                parameter.copy_(value)
        sizes[initial] = count_sizes(mll)
        ends[initial] = fit(mll, x, y, initial=initial, tolerance=1e-5, progress=False)
        assert ends[initial].status is FitStatus.CONVERGED
        assert_has_all(mll, x, y)
    assert ends["curvature"].objective == pytest.approx(ends["given"].objective, abs=1e-4)
    assert sizes["curvature"].count(420) < 0.7 * sizes["given"].count(420)
    assert sizes["curvature"][: sizes["curvature"].index(420)] == [150] * 4  # of three parameters
    assert "with the curvature of 150 random data of 420" in ends["curvature"].message


def test_the_curvature_is_that_of_the_evidence_of_a_quarter(few, monkeypatch):
    x, y = data()
    mll = objective(x, y, rule=Laplace(tolerance=1e-10))
    (index,), _ = subsets.draw_subsets(mll, torch.Generator().manual_seed(0), moves=False)
    assert len(index) == SIZES[0]
    alone = objective(x[index], y[index], rule=Laplace(tolerance=1e-10))
    leaves = list(alone.parameters())

    def slope(leaf, change):
        with torch.no_grad():
            leaf += change
        gradient = torch.autograd.grad(alone(alone.model.train()(x[index]), y[index]), leaves)
        with torch.no_grad():
            leaf -= change
        return torch.cat([each.flatten() for each in gradient])

    hessian = torch.stack([(slope(leaf, -1e-4) - slope(leaf, 1e-4)) / 2e-4 for leaf in leaves])
    values, vectors = torch.linalg.eigh(0.5 * (hessian + hessian.mT))
    monkeypatch.setattr(Curvature, "learn", lambda *args, **options: None)  # as measured, before any step
    _, curvature = learned(mll, x, y, monkeypatch, max_steps=1)
    found = torch.linalg.inv(torch.from_numpy(curvature.root @ curvature.root.T))
    torch.testing.assert_close(found, vectors * values.abs() @ vectors.mT, rtol=0.0, atol=0.05 * values.abs().max())


def test_few_data_and_many_parameters_have_no_curvature(few, monkeypatch):
    x, y = data(50)
    result, curvature = learned(objective(x, y), x, y, monkeypatch, max_steps=2)
    assert curvature.root is None
    assert "no subset of 50 data" in result.message
    x, y = data()
    mll = objective(x, y)
    monkeypatch.setattr(subsets, "_MOST_PARAMETERS", 2)
    sizes = count_sizes(mll)
    result, curvature = learned(mll, x, y, monkeypatch, max_steps=2)
    assert curvature.root is None
    assert set(sizes) == {NUM_DATA}
    assert "without a curvature" in result.message
    assert "with the curvature" not in result.message


def test_a_quarter_tells_nothing_of_several_latents(few, monkeypatch):
    x, y = data()
    classes = y.long() + (x[:, 0] > 3)
    mll = objective(x, classes, MultinomialLogitLikelihood(3))
    sizes = count_sizes(mll)
    result, curvature = learned(mll, x, classes, monkeypatch, max_steps=2)
    assert curvature.root is None
    assert set(sizes) == {NUM_DATA}
    assert "without a curvature" in result.message


@pytest.mark.parametrize("initial", ["subset", "curvature"])
def test_an_interrupt_while_the_curvature_is_measured_keeps_the_parameters(few, initial, monkeypatch):
    x, y = data()
    mll = objective(x, y)
    measure, before = Curvature.measure, []

    def interrupted(self, loss, leaves, on_best):
        before.extend(parameters(mll))
        calls = []

        def evaluate():
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return loss()

        measure(self, evaluate, leaves, on_best)

    monkeypatch.setattr(Curvature, "measure", interrupted)
    monkeypatch.setattr(lbfgs, "_STEPS_PER_PARAMETER", 100)  # the steps on the subset do not tell it
    result = fit(mll, x, y, initial=initial, progress=False)
    assert result.status is FitStatus.INTERRUPTED
    assert math.isfinite(result.objective)
    for now, then in zip(parameters(mll), before, strict=True):
        assert torch.equal(now, then)
    assert_has_all(mll, x, y)


def test_a_curvature_that_is_not_known_is_told(few):
    x, y = data()
    mll = objective(x, y)
    break_down_on_subsets(mll)
    result = fit(mll, x, y, initial="curvature", progress=False)
    assert result.status is FitStatus.CONVERGED
    assert "the curvature of 30 data is not known" in result.message


def test_a_curvature_that_breaks_down_nearby_is_told(few, monkeypatch):
    x, y = data()
    monkeypatch.setattr(Curvature, "measure", lambda *args: None)  # as where an evaluation nearby fails
    result = fit(objective(x, y), x, y, initial="curvature", progress=False)
    assert result.status is FitStatus.CONVERGED
    assert "the curvature of 30 data is not known: their evidence breaks down nearby" in result.message


def test_an_exact_gp_is_refused_by_name():
    x, y = data(50)

    class Exact(gpytorch.models.ExactGP):
        def forward(self, x):
            return MultivariateNormal(torch.zeros(len(x)), gpytorch.kernels.RBFKernel()(x))

    likelihood = GaussianLikelihood()
    mll = ExactMarginalLogLikelihood(likelihood, Exact(x, y, likelihood))
    for initial in ("subset", "curvature"):
        with pytest.raises(TypeError, match=f"initial='{initial}' is served with .* got ExactMarginalLogLikelihood"):
            fit(mll, x, y, initial=initial, progress=False)


@pytest.mark.parametrize("start", [False, True], ids=["first", "warm"])
def test_an_estimator_begins_on_subsets_unless_it_starts_from_as_many_data(few, start):
    x, y = data()
    model = GPClassifier(warm_start=True, max_steps=20)
    if start:
        model.fit(x.numpy(), y.numpy())
    model.fit(x.numpy(), y.numpy())
    assert ("begun on 30, then 45 random data of 90" in model.fit_result_.message) is not start
