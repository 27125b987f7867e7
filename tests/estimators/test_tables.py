"""Tables: units do not matter, categories have a kernel of their own, equal rows are weights, bad tables are named."""

import numpy as np
import pandas as pd
import pytest

from gpext.estimators import GPClassifier, GPRegressor
from gpext.estimators.regressor import center_and_scale
from gpext.estimators.rows import distinct_rows
from gpext.estimators.table import fit_columns


def numbers(size=40):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((size, 2))
    return x, np.sin(x[:, 0]) + 0.1 * rng.standard_normal(size)


def frame(size=60, library=pd):
    rng = np.random.default_rng(1)
    color = rng.choice(["red", "green", "blue"], size)
    x = rng.standard_normal(size)
    y = np.where(color == "red", 2.0, -1.0) + 0.5 * x + 0.1 * rng.standard_normal(size)
    return library.DataFrame({"color": color, "x": x, "on": rng.random(size) < 0.5}), y


def test_units_of_inputs_and_targets_do_not_matter():
    x, y = numbers()
    plain = GPRegressor("gaussian").fit(x, y)
    scaled = GPRegressor("gaussian").fit(x * [1e3, 1e-3] + [5, -7], 100 * y + 3)
    mean, deviation = plain.predict(x, return_std=True)
    other_mean, other_deviation = scaled.predict(x * [1e3, 1e-3] + [5, -7], return_std=True)
    # Training follows the same path but for the rounding of its inputs, which it may amplify.
    assert np.allclose(other_mean, 100 * mean + 3, rtol=0, atol=1e-3)
    assert np.allclose(other_deviation, 100 * deviation, rtol=1e-3)
    shift = plain.log_density(x, y) - scaled.log_density(x * [1e3, 1e-3] + [5, -7], 100 * y + 3)
    assert np.allclose(shift, np.log(100), atol=1e-3)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_categories_of_a_data_frame(library):
    table, y = frame(library=pytest.importorskip(library))
    model = GPRegressor("gaussian").fit(table, y)
    assert model.feature_names_in_.tolist() == ["color", "x", "on"]
    assert list(model.categories_) == ["color"]
    assert model.score(table, y) > 0.95
    assert model.report_.relevance.keys() == {"color", "x", "on"}


def test_a_category_that_training_has_not_seen_is_uncertain():
    table, y = frame()
    model = GPRegressor("gaussian").fit(table, y)
    known, unknown = pd.DataFrame({"color": ["red"], "x": [0.0], "on": [True]}), None
    unknown = known.assign(color="violet")
    assert model.predict(unknown, return_std=True)[1] > 2 * model.predict(known, return_std=True)[1]


def test_missing_values_are_named():
    table, y = frame()
    with pytest.raises(ValueError, match=r"column 'x', first in row 3 \(1 in all\)"):
        GPRegressor().fit(table.assign(x=table["x"].where(table.index != 3)), y)
    with pytest.raises(ValueError, match=r"column 'color', first in row 0"):
        GPRegressor().fit(table.assign(color=table["color"].where(table.index != 0)), y)
    model = GPRegressor("gaussian").fit(table, y)
    with pytest.raises(ValueError, match="column 'x'"):
        model.predict(table.assign(x=np.inf))
    with pytest.raises(TypeError, match="column 'x' was numeric"):
        model.predict(table.assign(x="one"))
    with pytest.raises(TypeError, match="categorical columns"):
        model.predict(np.zeros((2, 3)))


def test_a_constant_column_changes_nothing():
    x, y = numbers()
    plain = GPRegressor("gaussian").fit(x, y).predict(x)
    assert np.allclose(
        GPRegressor("gaussian")
        .fit(np.column_stack([x, np.full(len(x), 0.1)]), y)
        .predict(np.column_stack([x, np.full(len(x), 0.1)])),
        plain,
        atol=0.02,
    )


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("value", [0.1, 0.7, 1e8 / 3])
def test_a_column_is_constant_however_its_mean_is_rounded(value, power):
    """A sum of N terms has an error of up to N units of rounding, and with it the mean and the deviation."""
    estimator = GPRegressor()
    estimator.categories_ = {}
    for size in (10, *range(100, 400, 13)):
        rows = np.column_stack([np.full(size, value), np.exp(np.linspace(0, 5, size))])
        columns = fit_columns(estimator, rows, np.ones(size), power=power)
        assert columns.skewed.tolist() == [1]
        assert columns.scale[0] == 1
        assert center_and_scale(rows[:, 0], np.ones(size))[1] == 1


def test_equal_rows_are_one_of_their_weight():
    raw = np.array([[1.0, 2.0], [0.0, 1.0], [1.0, 2.0], [1.0, 2.0]])
    given = np.array([1.0, 2.0, 0.5, 1.0])
    table, targets, weights, places = distinct_rows(raw, np.array([3.0, 1.0, 3.0, 4.0]), given)
    assert table.tolist() == [[0, 1], [1, 2], [1, 2]]
    assert targets.tolist() == [1, 3, 4]
    assert weights.tolist() == [2, 1.5, 1]
    assert places.tolist() == [1, 0, 1, 2]
    assert distinct_rows(raw, np.zeros(4), np.array([0.0, 1.0, 1.0, 0.0]))[3].tolist() == [-1, 0, 1, -1]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -1.0], "not negative; got -1.0 in row 1"),
        ([0.0, 0.0], "non-zero"),
        ([1.0, np.nan], "finite"),
        ([1.0], "one number"),
    ],
)
def test_bad_weights(weights, message):
    with pytest.raises(ValueError, match=message):
        GPClassifier().fit([[0.0], [1.0]], [0, 1], sample_weight=weights)


def test_skewed_columns_are_transformed_where_that_predicts_better():
    rng = np.random.default_rng(0)
    z = rng.standard_normal((150, 1))
    y = np.sin(2 * z[:, 0]) + 0.1 * rng.standard_normal(150)
    x = np.exp(3 * z)
    model = GPRegressor("gaussian").fit(x, y)
    assert any("transformed (x0)" in choice for choice in model.report_.choices)
    # The target is linear in the column itself: the transform would only bend it.
    straight = GPRegressor("gaussian").fit(x, 0.1 * x[:, 0] + 0.1 * rng.standard_normal(150))
    assert any("left as they are (x0)" in choice for choice in straight.report_.choices)
    with pytest.raises(ValueError, match="skewed_columns must be"):
        GPRegressor(skewed_columns="log").fit(x, y)
