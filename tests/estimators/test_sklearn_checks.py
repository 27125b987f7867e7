"""Every estimator passes scikit-learn's own checks, and works inside its tools as any other."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.inspection import permutation_importance
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from gpext.estimators import GPClassifier, GPCountRegressor, GPOrdinalClassifier, GPRegressor, GPSurvival

ALL = [GPClassifier(), GPCountRegressor(), GPOrdinalClassifier(), GPRegressor(), GPSurvival()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the checks feed data that warrant warnings
@parametrize_with_checks(ALL)
def test_scikit_learn_finds_nothing(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 3))
    return (
        x,
        np.where(x[:, 0] + 0.3 * rng.standard_normal(60) > 0, "yes", "no"),
        x[:, 0] + 0.1 * rng.standard_normal(60),
    )


def test_a_pipeline_in_a_grid_search(table):
    x, labels, _ = table
    search = GridSearchCV(
        make_pipeline(StandardScaler(), GPClassifier()), {"gpclassifier__priors": [True, False]}, cv=2
    )
    assert search.fit(x, labels).best_score_ > 0.7
    assert search.predict_proba(x).shape == (60, 2)


def test_calibration_and_cross_validation(table):
    x, labels, y = table
    calibrated = CalibratedClassifierCV(GPClassifier(), cv=2).fit(x, labels)
    assert np.allclose(calibrated.predict_proba(x).sum(1), 1)
    assert cross_val_predict(GPClassifier(), x, labels, cv=3, method="predict_proba").shape == (60, 2)
    predicted = cross_val_predict(GPRegressor("gaussian"), x, y, cv=3)
    assert np.corrcoef(predicted, y)[0, 1] > 0.9


def test_the_important_column_is_found(table):
    x, _, y = table
    model = GPRegressor("gaussian").fit(x, y)
    importance = permutation_importance(model, x, y, n_repeats=3, random_state=0).importances_mean
    assert importance.argmax() == 0
    assert next(iter(model.report_.relevance)) == "x0"


@pytest.mark.parametrize("estimator", ALL, ids=lambda each: type(each).__name__)
def test_options_are_kept_as_they_are(estimator):
    for name, value in estimator.get_params().items():
        marked = object() if value is not None else "other"
        assert estimator.__class__(**{name: marked}).get_params()[name] is marked
    assert clone(estimator).get_params() == estimator.get_params()
    assert estimator.__class__().set_params(tolerance=0.5).tolerance == 0.5
