"""Choices are made by size and by leave-one-out predictions, are said in the report, and every one can be set."""

import copy
import pickle
from dataclasses import replace

import gpytorch
import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning, NotFittedError

import gpext
from gpext.estimators import GPClassifier, GPRegressor, GPSurvival, sparse_training
from gpext.estimators.plan import choose_plan
from gpext.estimators.report import report_of
from gpext.estimators.rows import unweighted
from gpext.estimators.task import Trained
from gpext.inference import KL
from gpext.training import FitStatus
from gpext.variational import CollapsedBound


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (200, 1))
    return x, np.sin(2 * x[:, 0]) + 0.1 * rng.standard_normal(200)


def test_plans_by_size():
    small = choose_plan(500, 1, "auto", "auto")
    assert (small.inducing, small.batch_size) == (None, None)
    assert choose_plan(500, 1000, "auto", "auto").inducing is not None  # many latent functions
    middle = choose_plan(20_000, 1, "auto", "auto", None)
    assert middle.grows
    assert middle.batch_size is None
    large = choose_plan(1_000_000, 1, "auto", "auto")
    assert not large.grows
    assert large.batch_size is not None
    many = choose_plan(20_000, 26, "auto", "auto")  # latents
    assert many.sample is not None
    assert many.inducing is not None
    assert many.inducing < many.most
    assert not many.grows
    assert choose_plan(20_000, 26, 30, "auto").sample is None
    assert choose_plan(500, 1, 30, None).inducing == 30
    assert choose_plan(20, 1, 30, None).inducing == 20
    assert choose_plan(100_000, 1, None, None).inducing is None
    for bad in ("many", 0):
        with pytest.raises(ValueError, match="inducing_points"):
            choose_plan(10, 1, bad, None)
    with pytest.raises(TypeError, match="batch_size"):
        choose_plan(10, 1, "auto", 1.5)
    with pytest.raises(ValueError, match="need inducing points"):
        choose_plan(10, 1, None, 5)


def test_inducing_points_grow_while_the_bound_gains(data, monkeypatch):
    x, y = data
    monkeypatch.setattr("gpext.estimators.plan._FULL", 0.0)
    monkeypatch.setattr("gpext.estimators.plan._FIRST", 3)
    model = GPRegressor(neighbours=None).fit(x, y)
    sizes = model.model_.variational_strategy.inducing_points.size(-2)
    assert 6 <= sizes < 200
    assert any("doubled" in choice for choice in model.report_.choices)
    full = GPRegressor("student_t", inducing_points=None).fit(x, y)
    assert abs(model.log_density(x, y).mean() - full.log_density(x, y).mean()) < 0.03


def test_more_inducing_points_begin_where_fewer_have_ended_if_they_end_below(data, monkeypatch):
    x, y = data
    starts = []

    def fit(task, size, values, settings, batch_size=None):
        trained = original(task, size, values, settings, batch_size)
        starts.append((size, values))
        falls_short = size == 6 and len(starts) == 2
        return replace(trained, result=replace(trained.result, objective=-9.0)) if falls_short else trained

    original = sparse_training._fit_sparse
    monkeypatch.setattr(sparse_training, "_fit_sparse", fit)
    monkeypatch.setattr("gpext.estimators.plan._FULL", 0.0)
    monkeypatch.setattr("gpext.estimators.plan._FIRST", 3)
    model = GPRegressor("gaussian", neighbours=None).fit(x, y)
    assert [size for size, _ in starts[:3]] == [3, 6, 6]
    name = "covar_module.base_kernel.raw_lengthscale"
    assert not torch.equal(starts[1][1][name], starts[2][1][name])
    assert not any("-9.0" in choice for choice in model.report_.choices)


def test_the_family_of_many_survival_times_is_that_of_some():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((600, 4))
    time = np.exp(X[:, 0]) * rng.weibull(3.0, 600)
    model = GPSurvival(inducing_points=10).fit(X, time)
    assert model.likelihood_name_ == "weibull"
    assert any("family 'weibull' by the leave-one-out" in choice for choice in model.report_.choices)


@pytest.mark.parametrize("points", [15, np.linspace(-2, 2, 12)[:, None]])
def test_inducing_points_can_be_given(points, data):
    x, y = data
    model = GPClassifier(inducing_points=points).fit(x, y > 0)
    assert len(model.model_.variational_strategy.inducing_points) == (15 if np.ndim(points) == 0 else 12)
    assert model.score(x, y > 0) > 0.9


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # few data, few epochs
@pytest.mark.parametrize("noise", ["gaussian", "student_t"])
def test_minibatches(noise, data):
    x, y = data
    model = GPRegressor(noise, inducing_points=20, batch_size=50).fit(x, y)
    assert model.score(x, y) > 0.9
    with pytest.warns(ConvergenceWarning, match="max_steps"):
        GPRegressor(noise, inducing_points=20, batch_size=50, max_steps=2).fit(x, y)


def test_many_classes_with_inducing_points(data):
    x, y = data
    labels = np.digitize(y, [-0.5, 0.5])
    model = GPClassifier(inducing_points=15).fit(x, labels)
    assert model.score(x, labels) > 0.85


def test_many_classes_learn_hyperparameters_on_a_sample(data, monkeypatch):
    x, y = data
    labels = np.digitize(y, [-0.5, 0.5])
    for name, value in (("_FULL", 0.0), ("_MOST", 20), ("_SAMPLE", 80), ("_MOST_LAST", 30)):
        monkeypatch.setattr(f"gpext.estimators.plan.{name}", value)
    model = GPClassifier().fit(x, labels)
    assert len(model.model_.variational_strategy.inducing_points) == 30
    assert any("from 80 rows with 10 inducing points" in choice for choice in model.report_.choices)
    assert model.score(x, labels) > 0.85
    # q(u) is the best one for all rows at these hyperparameters: a further step gains little
    step = model.model_.variational_strategy.update
    inputs, codes = model._inputs(x), torch.from_numpy(labels)
    before, after = (step(inputs, codes, model.likelihood_, gradient="exact") for _ in range(2))
    assert abs(float(after - before)) < 1e-3
    assert model.fit_result_.objective == pytest.approx(float(before), abs=1e-6)
    weighted = GPClassifier().fit(x, labels, np.full(len(x), 2.0))
    assert weighted.score(x, labels) > 0.85

    settle = CollapsedBound.settle

    def interrupt(self, *, tolerance):
        if self.num_data == len(x):
            raise KeyboardInterrupt
        return settle(self, tolerance=tolerance)

    monkeypatch.setattr("gpext.estimators.sparse_training.CollapsedBound.settle", interrupt)
    with pytest.warns(ConvergenceWarning, match="interrupted"):
        stopped = GPClassifier(max_steps=2).fit(x, labels)
    assert stopped.fit_result_.status.name == "INTERRUPTED"
    assert "the sample alone" in stopped.fit_result_.message
    assert np.isfinite(stopped.predict_proba(x)).all()


def test_heavy_tails_are_found():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (120, 1))
    clean = np.sin(2 * x[:, 0])
    outliers = GPRegressor().fit(x, clean + 0.1 * rng.standard_t(2, 120))
    assert outliers.likelihood_name_ == "student_t"
    assert {"gaussian", "student_t"} == set(outliers.report_.leave_one_out)
    loo = outliers.report_.leave_one_out
    assert loo["student_t"] > loo["gaussian"]


def test_rules_and_kernels_can_be_given(data):
    x, y = data
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    before = copy.deepcopy(kernel.state_dict())
    model = GPClassifier(kernel=kernel, inference=KL())
    model.fit(x, y > 0)
    assert isinstance(model.model_.inference, KL)
    assert all(torch.equal(kernel.state_dict()[name], value) for name, value in before.items())
    for bad, error in (
        ({"kernel": "rbf"}, TypeError),
        ({"inference": "MCMC"}, ValueError),
        ({"inference": KL}, TypeError),
    ):
        with pytest.raises(error):
            GPClassifier(**bad).fit(x, y > 0)
    with pytest.raises(ValueError, match="noise must be"):
        GPRegressor("cauchy").fit(x, y)


def test_the_report_shows_choices_and_calibration(data):
    x, y = data
    model = GPRegressor().fit(x, y)
    shown = str(model.report_)
    for part in ("choices", "full data", "noise", "training", "most relevant inputs", "90 % intervals contain"):
        assert part in shown


def test_warm_starts_take_fewer_steps(data):
    x, y = data
    model = GPRegressor("gaussian", warm_start=True).fit(x, y)
    first = model.fit_result_.num_steps
    assert model.fit(x, y).fit_result_.num_steps < first


def test_seeds_and_copies(data):
    x, y = data
    model = GPRegressor(inducing_points=10, random_state=3).fit(x, y)
    again = GPRegressor(inducing_points=10, random_state=3).fit(x, y)
    assert np.array_equal(model.predict(x), again.predict(x))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert np.array_equal(twin.predict(x), model.predict(x))
        assert str(twin.report_) == str(model.report_)


@pytest.mark.parametrize("when", [5, 40])  # under the first rule
def test_an_interrupted_fit_predicts(data, monkeypatch, when):
    x, y = data
    kind = gpext.likelihoods.StudentTLikelihood
    plain, calls = kind.unchecked_log_prob, []

    def interrupted(self, *args):
        calls.append(0)
        if len(calls) == when:
            raise KeyboardInterrupt
        return plain(self, *args)

    monkeypatch.setattr(kind, "unchecked_log_prob", interrupted)
    with pytest.warns(ConvergenceWarning, match="interrupted"):
        model = GPRegressor("student_t").fit(x, y)
    assert np.isfinite(model.predict(x)).all()
    assert isinstance(model.model_.inference, KL)
    assert any("inference by KL" in choice for choice in model.report_.choices)


def test_nothing_is_predicted_before_training():
    for method in ("predict", "predict_quantiles", "predict_interval", "sample_y"):
        with pytest.raises(NotFittedError):
            getattr(GPRegressor(), method)([[0.0]])
    with pytest.raises(NotFittedError):
        GPClassifier().predict_proba([[0.0]])


def test_hard_data_end_with_finite_predictions():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 2))
    y = x[:, 0] + 0.1 * rng.standard_normal(40)
    y[0] = 1e6
    cases = [(x, y), (x[:1], y[1:2]), (np.zeros((5, 2)), np.ones(5)), (np.repeat(x[:2], 20, 0), y), (x.astype("f4"), y)]
    for inputs, targets in cases:
        model = GPRegressor().fit(inputs, targets)
        mean, deviation = model.predict(x[:3], return_std=True)
        assert np.isfinite(mean).all()
        assert (deviation >= 0).all()
    with pytest.raises(ValueError, match="1 class"):
        GPClassifier().fit(x, np.ones(40))


def test_a_likelihood_of_several_latents_of_the_user(data):
    x, y = data
    model = GPRegressor(gpext.likelihoods.HeteroscedasticStudentTLikelihood()).fit(x[:60], y[:60])
    assert isinstance(model.model_.inference, KL)
    assert model.score(x, y) > 0.9


def test_the_reason_for_inducing_points_is_the_one_that_holds():
    assert any("minibatches need" in reason for reason in choose_plan(500, 1, "auto", 50).reasons)
    assert any("cube of 20000" in reason for reason in choose_plan(20_000, 1, "auto", None).reasons)


def test_a_datum_without_a_left_out_prediction_counts_as_the_worst_of_the_others(data):
    """A site of very negative precision can leave no cavity; one such datum must not decide against a likelihood."""
    x, y = data
    model = GPRegressor("gaussian").fit(x[:20], y[:20])
    trained, result = Trained(model.model_, model.likelihood_, model.fit_result_), model.model_.result
    assert model.model_.result is result
    known = result.log_loo.clone()
    assert trained.score == pytest.approx(float(known.mean()))
    assert trained.num_unknown == 0
    result.__dict__["log_loo"] = known.index_fill(0, known.argmax(), torch.nan)
    assert trained.score == pytest.approx(float((known.sum() - known.max() + known.min()) / 20))
    report = report_of(model, {"gaussian": trained}, "gaussian", choose_plan(20, 1, "auto", "auto"), 20, 20.0, 0.0, ())
    assert "predictions of 1 row(s) under 'gaussian' are unknown" in str(report)
    result.__dict__["log_loo"] = torch.full_like(known, torch.nan)
    assert trained.score == -np.inf


def test_differences_of_columns_that_are_almost_equal_are_found():
    # From lengthscales of the distances between the rows no slope of the evidence leads to such a function.
    rng = np.random.default_rng(0)
    base, apart = rng.standard_normal((550, 1)), rng.standard_normal((550, 12))
    slopes = rng.standard_normal(12)
    X, y = base + 0.02 * apart, apart @ (slopes - slopes.mean())
    model = GPRegressor("gaussian").fit(X[:500], y[:500])
    assert any("trained a second time" in choice for choice in model.report_.choices)
    assert model.score(X[500:], y[500:]) > 0.99


def test_repeated_rows_with_equal_targets_tell_of_little_noise():
    """Targets that columns do not explain, but each input has one: found from little noise alone."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((150, 6))
    y = 2 * x[:, 0] + rng.standard_normal(150)
    again = np.r_[np.arange(150), np.arange(10)]
    model = GPRegressor("gaussian").fit(x[again], y[again])
    assert float(unweighted(model.likelihood_).noise.detach()) < 0.01
    assert any("trained a second time" in choice for choice in model.report_.choices)
    once = GPRegressor("gaussian").fit(x, y)
    assert not any("trained a second time" in choice for choice in once.report_.choices)
    assert model.log_density(x[:10], y[:10]).mean() > once.log_density(x[:10], y[:10]).mean() + 1


def test_ctrl_c_during_a_look_from_little_noise_keeps_the_model(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, 2))
    monkeypatch.setattr("gpext.estimators.dense_training._better_start", interrupted)
    with pytest.warns(ConvergenceWarning, match="second look from little noise"):
        model = GPRegressor("gaussian").fit(x, x[:, 0])
    assert model.fit_result_.status is FitStatus.INTERRUPTED
    assert np.isfinite(model.predict(x)).all()


def test_a_student_t_begins_anew_where_gaussian_noise_has_explained_outliers():
    """Three tenths of the targets are nonsense: from lengthscales that explain them training would not come back."""
    rng = np.random.default_rng(1)
    x = rng.uniform(0, 6, (600, 2))

    def f(x):
        return np.sin(2 * x[:, 0]) + 0.3 * x[:, 1]

    y = f(x) + 0.1 * rng.standard_normal(600)
    is_outlier = rng.random(600) < 0.3
    y[is_outlier] += 100 * rng.standard_normal(is_outlier.sum())
    new = rng.uniform(0, 6, (200, 2))
    model = GPRegressor().fit(x, y)
    assert model.likelihood_name_ == "student_t"
    assert np.sqrt(np.mean((model.predict(new) - f(new)) ** 2)) < 0.2


@pytest.mark.parametrize("kind", ["bounded", "fixed"])
def test_noise_that_the_user_has_bounded_or_fixed_stays_so(kind):
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 6, (60, 2))
    y = np.sin(2 * x[:, 0]) + 0.01 * rng.standard_normal(60)
    noise = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(0.05))
    noise.noise = 0.3
    noise.raw_noise.requires_grad_(kind == "bounded")
    found = float(GPRegressor(noise).fit(x, y).likelihood_.noise.detach())
    assert found == pytest.approx(0.3) if kind == "fixed" else found >= 0.05
