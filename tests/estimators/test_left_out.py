"""Columns that training has left out are brought back where they matter, and nothing changes where none does."""

import copy
from dataclasses import replace

import gpytorch
import numpy as np
import pytest
import torch
from linear_operator.utils.errors import NotPSDError
from sklearn.exceptions import ConvergenceWarning

from gpext.estimators import GPClassifier, GPRegressor, dense_training, sparse_training
from gpext.estimators.left_out import bring_back
from gpext.inference import Laplace
from gpext.likelihoods import BernoulliLogitLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.training import FitStatus
from tests.members import F64
from tests.models.test_neighbours import Model


def problem(lengthscales, **options):
    """Labels that depend on both columns, on the second by its distance from the middle alone."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(150, 2, generator=generator, dtype=F64)
    f = 4 * torch.sin(6 * x[:, 0]) + 20 * (x[:, 1] - 0.5).square() - 2
    y = (f > torch.randn(150, generator=generator, dtype=F64)).to(F64)
    likelihood = BernoulliLogitLikelihood()
    model = Model(x, y, likelihood, Laplace(), **options)
    model.covar_module.base_kernel.lengthscale = torch.tensor([lengthscales], dtype=F64)
    objective = LatentMarginalLogLikelihood(likelihood, model)
    with torch.no_grad():
        value = float(objective(model.train()(x), y))
    return objective, value


def state(objective):
    return copy.deepcopy(objective.state_dict())


@pytest.mark.parametrize("options", [{}, {"neighbours": 10}], ids=str)
def test_a_column_that_matters_is_brought_back(options):
    objective, value = problem([0.3, 50.0], **options)
    better, columns = bring_back(objective, value, 0.001)
    assert columns == [1]
    model = objective.model
    lengthscale = model.covar_module.base_kernel.lengthscale.detach().flatten()
    torch.testing.assert_close(lengthscale, torch.tensor([0.3, 0.6], dtype=F64))
    with torch.no_grad():
        again = float(objective(model.train()(model.train_inputs[0]), model.train_targets))
    assert better == pytest.approx(again, abs=1e-7)
    assert better > value + 0.001


@pytest.mark.parametrize(
    ("lengthscales", "tolerance"),
    [([0.3, 0.6], 0.001), ([50.0, 0.3], 10.0), ([0.3, 50.0], 10.0)],
    ids=["none left out", "the gain is small", "likewise"],
)
def test_else_all_stays_as_it_was(lengthscales, tolerance):
    objective, value = problem(lengthscales)
    before = state(objective)
    assert bring_back(objective, value, tolerance) is None
    after = state(objective)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_where_the_objective_breaks_down_all_stays_as_it_was(monkeypatch):
    objective, value = problem([0.3, 50.0])
    before = state(objective)

    def fails(*arguments):
        raise NotPSDError("not there")

    monkeypatch.setattr(objective, "log_evidence", fails)
    assert bring_back(objective, value, 0.001) is None
    assert all(torch.equal(each, before[name]) for name, each in state(objective).items())


def test_after_ctrl_c_all_stays_as_it_was(monkeypatch):
    objective, value = problem([0.3, 50.0])
    before = state(objective)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(objective, "log_evidence", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bring_back(objective, value, 0.001)
    assert not objective.model.training
    assert all(torch.equal(each, before[name]) for name, each in state(objective).items())


def test_one_lengthscale_of_all_columns_is_left_alone():
    objective, value = problem([0.3, 50.0])
    objective.model.covar_module.base_kernel = gpytorch.kernels.MaternKernel(1.5).double()
    assert bring_back(objective, value, 0.0) is None


def rows(n=300):
    rng = np.random.default_rng(0)
    x = rng.random((n, 4))
    return x, np.sin(6 * x[:, 0]) + 4 * (x[:, 1] - 0.5) ** 2 + 0.2 * rng.standard_normal(n)


def test_the_report_says_so(monkeypatch):
    x, y = rows()
    plain = dense_training.bring_back
    monkeypatch.setattr(dense_training, "bring_back", lambda objective, value, tolerance: (value + 1.0, [1]))
    model = GPRegressor("gaussian").fit(x, y)
    assert any("columns 1 of the inputs, left out at first" in choice for choice in model.report_.choices)
    monkeypatch.setattr(dense_training, "bring_back", plain)
    assert not any("left out" in choice for choice in GPRegressor("gaussian").fit(x, y).report_.choices)


def test_ctrl_c_during_the_second_look_keeps_the_model(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(dense_training, "bring_back", interrupted)
    x, y = rows()
    with pytest.warns(ConvergenceWarning, match="interrupted"):
        model = GPRegressor("gaussian").fit(x, y)
    assert np.isfinite(model.predict(x)).all()


@pytest.fixture
def few_inducing_points(monkeypatch):
    for name, value in (("_FULL", 0.0), ("_FIRST", 8), ("_MOST", 16)):
        monkeypatch.setattr(f"gpext.estimators.plan.{name}", value)
    monkeypatch.setattr(sparse_training, "_PART", 80)


def test_inducing_points_begin_with_what_a_part_of_the_rows_tells(few_inducing_points):
    x, y = rows()
    model = GPClassifier(neighbours=None, random_state=0).fit(x, y > 0.5)
    assert any("first learned from all of 80 random rows" in choice for choice in model.report_.choices)
    assert model.score(x, y > 0.5) > 0.85


def test_ctrl_c_there_leaves_a_model_that_predicts(few_inducing_points, monkeypatch):
    plain = sparse_training.train_once

    def interrupted(task, settings):
        found = plain(task, settings)
        result = replace(found.result, status=FitStatus.INTERRUPTED, message="interrupted.")
        return replace(found, result=result)

    monkeypatch.setattr(sparse_training, "train_once", interrupted)
    x, y = rows()
    with pytest.warns(ConvergenceWarning, match="interrupted"):
        model = GPClassifier(neighbours=None, random_state=0).fit(x, y > 0.5)
    assert model.fit_result_.status is FitStatus.INTERRUPTED
    assert np.isfinite(model.predict_proba(x)).all()
