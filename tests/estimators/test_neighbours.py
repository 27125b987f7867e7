"""With all other rows as neighbours, estimators are those of the exact prior; large tables have neighbours."""

import pickle

import numpy as np
import pytest
import torch

from gpext.estimators import GPClassifier, GPCountRegressor, GPRegressor
from gpext.estimators.models import DenseGP, hyperparameters_of, start_from
from gpext.estimators.plan import choose_plan
from gpext.estimators.training import train


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (90, 2))
    return x, np.sin(2 * x[:, 0]) * x[:, 1] + 0.1 * rng.standard_normal(90)


def _without(model: DenseGP) -> DenseGP:
    """Return the model of the exact prior at the hyperparameters of one with neighbours."""
    (inputs,), targets = model.train_inputs, model.train_targets
    exact = DenseGP(inputs, targets, model.likelihood, model.inference, model.covar_module).to(inputs.dtype)
    start_from(exact, hyperparameters_of(model, model.likelihood))
    return exact.eval()


@pytest.mark.parametrize(
    ("noise", "points"), [("gaussian", None), ("gaussian", 12), ("student_t", 12), ("laplace", None)]
)
def test_all_others_as_neighbours_are_the_exact_prior(noise, points, table):
    x, y = table
    model = GPRegressor(noise, neighbours=len(x), inducing_points=points, priors=False).fit(x, y)
    exact = _without(model.model_)
    new = torch.linspace(-2, 2, 24, dtype=torch.float64).view(12, 2)
    with torch.no_grad():
        found, expected = model.model_(new), exact(new)
    torch.testing.assert_close(found.mean, expected.mean, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.variance, expected.variance, atol=1e-5, rtol=0)
    assert float(model.model_.result.log_evidence) == pytest.approx(float(exact.result.log_evidence), abs=1e-4)


def test_large_tables_have_neighbours(table, monkeypatch):
    x, y = table
    monkeypatch.setattr("gpext.estimators.plan._FULL", 0.0)
    model = GPRegressor(priors=False).fit(x, y)
    assert "20 neighbours of each row" in str(model.report_)
    assert "leave-one-out" in str(model.report_)
    assert model.score(x, y) > 0.9
    wrong = y.copy()
    wrong[7] += 5
    assert int(GPRegressor("gaussian", priors=False).fit(x, wrong).outlier_report().index[0]) == 7
    more = np.column_stack([x, np.random.default_rng(1).standard_normal((90, 2))])
    model = GPRegressor(priors=False).fit(more, y)
    assert "10 neighbours of each row of what 90 inducing points leave" in str(model.report_)
    assert "20 neighbours" in str(GPClassifier(priors=False).fit(x, y > 0).report_)


def test_many_rows_have_neighbours_only_where_training_ends_soon(table, monkeypatch):
    """A Student-t is not tried on many rows, and other noise has inducing points alone."""
    x, y = table
    more = np.column_stack([x, np.random.default_rng(1).standard_normal((90, 2))])
    y = y.copy()
    y[::9] += 3.0
    monkeypatch.setattr("gpext.estimators.plan._FULL", 0.0)
    monkeypatch.setattr("gpext.estimators.regressor._MOST_INFERRED", 89)
    model = GPRegressor(priors=False).fit(more, y)
    assert model.likelihood_name_ == "gaussian"
    assert "but beyond 89 rows its training takes far longer; noise='student_t' trains it" in str(model.report_)
    assert "inducing points: the cube" in str(GPRegressor("student_t", priors=False).fit(more, y).report_)


def test_plans_with_neighbours():
    many = {"num_columns": 8, "most_rough": 50_000}
    plan = choose_plan(20_000, 1, "auto", "auto", **many)
    assert (plan.neighbours, plan.inducing, plan.batch_size) == (10, 200, None)
    assert not plan.is_sparse
    assert choose_plan(20_000, 1, "auto", "auto", num_columns=8).is_sparse
    assert choose_plan(20_000, 2, "auto", "auto", **many).is_sparse
    assert choose_plan(60_000, 1, "auto", "auto", **many).is_sparse
    assert choose_plan(60_000, 1, "auto", "auto", num_columns=3).neighbours == 20
    assert choose_plan(200_000, 1, "auto", "auto", num_columns=3).is_sparse
    assert choose_plan(200_000, 1, "auto", "auto", np.int64(10), **many).neighbours == 10
    assert choose_plan(20_000, 1, "auto", "auto", None, **many).is_sparse
    assert choose_plan(20_000, 1, 300, "auto", **many).is_sparse
    assert choose_plan(20_000, 1, "auto", 1000, **many).is_sparse
    assert choose_plan(500, 1, "auto", "auto", **many).neighbours is None
    plan = choose_plan(500, 1, np.zeros((30, 8)), "auto", 5, **many)
    assert (plan.neighbours, plan.inducing) == (5, 30)
    assert choose_plan(500, 3, "auto", "auto", 5, **many).inducing is None
    assert choose_plan(500, 1, None, "auto", 5, **many).inducing is None
    with pytest.raises(ValueError, match="leave batch_size"):
        choose_plan(500, 1, "auto", 50, 5)
    for bad, error in (("many", TypeError), (1.5, TypeError), (True, TypeError), (0, ValueError)):
        with pytest.raises(error, match="neighbours"):
            choose_plan(500, 1, "auto", "auto", bad)


@pytest.mark.parametrize("points", [None, 10])
@pytest.mark.parametrize("noise", ["gaussian", "student_t"])
def test_files(noise, points, table, tmp_path):
    x, y = table
    model = GPRegressor(noise, neighbours=6, inducing_points=points, priors=False).fit(
        x, y, sample_weight=np.tile([1.0, 2.0], 45)
    )
    model.save(tmp_path / "model")
    for again in (GPRegressor.load(tmp_path / "model"), pickle.loads(pickle.dumps(model))):
        for one, other in zip(again.predict(x, return_std=True), model.predict(x, return_std=True), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9)
        assert str(again.report_) == str(model.report_)
        assert again.model_.variational_strategy.neighbours.number == 6


def test_weights_are_repetitions(table):
    x, y = table
    weights = np.tile([1, 2, 3], 30)
    weighted = GPRegressor("gaussian", neighbours=5, priors=False).fit(x, y, sample_weight=weights)
    repeated = GPRegressor("gaussian", neighbours=5, priors=False).fit(np.repeat(x, weights, 0), np.repeat(y, weights))
    np.testing.assert_allclose(weighted.predict(x), repeated.predict(x), rtol=1e-6)


def test_draws_and_a_warm_start(table):
    x, y = table
    model = GPRegressor("gaussian", neighbours=8, priors=False, warm_start=True).fit(x, y)
    draws = model.sample_y(x[:5], 4000, random_state=0)
    mean, deviation = model.predict(x[:5], return_std=True)
    z = (draws.mean(1) - mean) / (deviation / 4000**0.5)
    assert np.abs(z).max() < 4.5
    before = model.fit_result_.num_steps
    assert model.fit(x, y).fit_result_.num_steps <= before


def test_counts_and_several_classes(table):
    x, y = table
    counts = np.random.default_rng(2).poisson(np.exp(1 + y))
    model = GPCountRegressor("poisson", neighbours=10).fit(x, counts)
    assert "10 neighbours" in str(model.report_)
    assert model.score(x, counts) > 0.3
    labels = np.digitize(y, [-0.5, 0.5])
    model = GPClassifier(neighbours=10, tolerance=0.01).fit(x, labels)
    assert model.score(x, labels) > 0.9


def test_a_second_noise_starts_from_the_sites_of_the_first(table, monkeypatch):
    x, y = table
    y = np.where(np.arange(90) % 9 == 0, y + 2, y)  # tails
    tasks, trained = [], []

    def noted(task, *arguments):
        tasks.append(task)
        trained.append(train(task, *arguments))
        return trained[-1]

    monkeypatch.setattr("gpext.estimators.base.train", noted)
    GPRegressor(neighbours=10, priors=False).fit(x, y)
    assert [task.sites is None for task in tasks] == [True, False]
    assert torch.equal(tasks[1].sites.shift, trained[0].model.result.sites.shift)
