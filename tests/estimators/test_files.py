"""A saved estimator predicts the same bit by bit; files of others, damaged or incomplete ones are refused."""

import io
import pickle

import gpytorch
import joblib
import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError

from gpext.estimators import GPClassifier, GPCountRegressor, GPOrdinalClassifier, GPRegressor, GPSurvival

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 2))
NUMBERS = X[:, 0] + 0.1 * RNG.standard_normal(60)
FRAME = pd.DataFrame({"a": np.exp(3 * X[:, 0]), "kind": np.where(X[:, 1] > 0, "up", "down")})
LABELS = np.array(["a", "b", "c"])[np.digitize(NUMBERS, [-0.5, 0.5])]
WEIGHTS = RNG.integers(1, 3, 60)

CASES = {
    "two classes": (GPClassifier(), X, NUMBERS > 0, {}),
    "weighted two classes": (GPClassifier(), X, NUMBERS > 0, {"sample_weight": WEIGHTS}),
    "categories alone": (GPClassifier(), FRAME[["kind"]], NUMBERS > 0, {}),
    "classes": (GPClassifier(), FRAME, LABELS, {}),
    "weighted classes": (GPClassifier(), X, LABELS, {"sample_weight": WEIGHTS}),
    "inducing points": (GPClassifier(inducing_points=10), X, LABELS, {}),
    "ordered classes": (GPOrdinalClassifier(["a", "b", "c"]), X, LABELS, {}),
    "numbers": (GPRegressor(), FRAME, NUMBERS, {}),
    "weighted numbers": (GPRegressor("gaussian"), X, NUMBERS, {"sample_weight": WEIGHTS}),
    "sparse Gaussian": (GPRegressor("gaussian", inducing_points=10), X, NUMBERS, {}),
    "two latents": (GPRegressor("heteroscedastic", priors=False), X, NUMBERS, {}),
    "counts": (GPCountRegressor(), X, np.round(np.exp(NUMBERS)), {"exposure": WEIGHTS}),
    "times": (GPSurvival("weibull"), X, np.exp(NUMBERS), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_predictions_are_equal_bit_by_bit(case, tmp_path):
    estimator, x, y, options = CASES[case]
    estimator.fit(x, y, **options).save(tmp_path / "file")
    loaded = type(estimator).load(
        tmp_path / "file", **({"categories": ["a", "b", "c"]} if case == "ordered classes" else {})
    )
    dumped = io.BytesIO()
    joblib.dump(estimator, dumped)
    dumped.seek(0)
    for twin in (loaded, pickle.loads(pickle.dumps(estimator)), joblib.load(dumped)):
        assert np.array_equal(twin.predict(x), estimator.predict(x))
        assert np.array_equal(twin.log_density(x, y), estimator.log_density(x, y))
        if hasattr(estimator, "predict_proba"):
            assert np.array_equal(twin.predict_proba(x), estimator.predict_proba(x))
        assert str(twin.report_) == str(estimator.report_)
        assert twin.get_params().keys() == estimator.get_params().keys()
    if case == "inducing points":
        assert (tmp_path / "file").stat().st_size < 60_000  # no training data


def test_objects_are_given_again(tmp_path):
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    model = GPRegressor("gaussian", kernel=kernel).fit(X, NUMBERS)
    model.save(tmp_path / "file")
    with pytest.raises(ValueError, match=r"give them again: GPRegressor\.load"):
        GPRegressor.load(tmp_path / "file")
    loaded = GPRegressor.load(tmp_path / "file", kernel=kernel)
    assert np.array_equal(loaded.predict(X), model.predict(X))
    with pytest.raises(ValueError, match="of another model"):
        GPRegressor.load(tmp_path / "file", kernel=gpytorch.kernels.RBFKernel())


def test_other_files_are_refused(tmp_path):
    with pytest.raises(NotFittedError):
        GPRegressor().save(tmp_path / "file")
    GPRegressor("gaussian").fit(X, NUMBERS).save(tmp_path / "file")
    with pytest.raises(ValueError, match="is not of a GPClassifier, but of GPRegressor"):
        GPClassifier.load(tmp_path / "file")
    contents = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(contents[:1000] + bytes([contents[1000] ^ 1]) + contents[1001:])
    with pytest.raises(ValueError, match="file"):
        GPRegressor.load(tmp_path / "file")
