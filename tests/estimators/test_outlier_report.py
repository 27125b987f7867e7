"""The outlier report of an estimator is of the rows of its table, in their order."""

import numpy as np
import pytest
import torch

from gpext.estimators import GPClassifier, GPCountRegressor, GPRegressor
from gpext.inference import outlier_report


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(3)
    x = rng.permutation(np.linspace(0, 6, 50))[:, None]
    y = np.sin(x[:, 0]) + 0.1 * rng.standard_normal(50)
    y[[11, 30]] += [4, -4]
    return x, y


def test_rows_are_those_of_the_table(table):
    x, y = table
    model = GPRegressor("student_t").fit(x, y)
    report = model.outlier_report()
    assert set(report.index[:2].tolist()) == {11, 30}
    inside = outlier_report(model.model_.result)
    order = torch.from_numpy(np.argsort(x[:, 0]))  # of the model: the distinct rows are sorted
    assert torch.equal(report.log_loo[order], inside.log_loo)
    assert torch.equal(report.precision[order], inside.precision)
    assert (report.kind[order.numpy()] == inside.kind).all()


def test_equal_rows_share_a_line_and_rows_without_weight_have_none(table):
    x, y = table
    twice, weights = np.r_[np.arange(50), 4, 9], np.ones(52)
    weights[20] = 0
    report = GPRegressor("student_t").fit(x[twice], y[twice], sample_weight=weights).outlier_report()
    assert report.log_loo[50:].tolist() == report.log_loo[[4, 9]].tolist()
    assert report.log_loo.isnan().nonzero().flatten().tolist() == [20]
    assert report.index[-1] == 20
    assert set(report.index[:2].tolist()) == {11, 30}
    assert len(str(report).splitlines()) == 22


def test_a_wrong_label_and_a_wrong_count(table):
    x, _ = table
    labels = np.where(x[:, 0] > 3, "high", "low")
    row = int(x[:, 0].argmax())
    labels[row] = "low"
    assert GPClassifier().fit(x, labels).outlier_report().index[0] == row
    counts = np.full(50, 5.0)
    counts[17] = 40
    assert GPCountRegressor("poisson").fit(x, counts).outlier_report().index[0] == 17


def test_saved_and_loaded(table, tmp_path):
    x, y = table
    model = GPRegressor("student_t").fit(x, y)
    model.save(tmp_path / "model.gpext")
    loaded = GPRegressor.load(tmp_path / "model.gpext")
    assert torch.equal(loaded.outlier_report().index, model.outlier_report().index)


def test_a_model_with_inducing_points_has_none(table):
    x, y = table
    model = GPRegressor("student_t", inducing_points=10).fit(x, y)
    assert len(model._distinct) == 0  # nothing of the size of the data is kept
    with pytest.raises(ValueError, match="inducing points alone does not predict each row"):
        model.outlier_report()
