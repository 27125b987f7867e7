"""A `fit` that fails leaves the estimator as it was, and what is only tried out fails without a warning."""

import gpytorch
import numpy as np
import pytest
import torch

from gpext.estimators import GPClassifier, GPCountRegressor, GPRegressor, GPSurvival
from gpext.estimators.models import default_kernel
from gpext.estimators.plan import Plan
from gpext.estimators.task import Rules, Settings, Task
from gpext.estimators.training import train, try_out
from gpext.inference import KL, InferenceWarning
from gpext.likelihoods import BernoulliLogitLikelihood
from gpext.training import FitStatus


def numbers(rng, f):
    return np.rint(np.exp(f))


def survival(rng, f):
    return np.array(
        [(bool(e), t) for e, t in zip(rng.random(30) < 0.8, np.exp(f), strict=True)],
        dtype=[("event", bool), ("t", float)],
    )


CASES = {
    "numbers": (GPRegressor, lambda rng, f: f),
    "classes": (GPClassifier, lambda rng, f: np.where(f > 0, "yes", "no")),
    "counts": (GPCountRegressor, numbers),
    "times": (GPSurvival, survival),
}


class Broken(gpytorch.kernels.RBFKernel):
    def forward(self, *_, **__):
        raise RuntimeError("no covariance")


@pytest.mark.parametrize("interrupted", [False, True], ids=["broken kernel", "Ctrl-C"])
@pytest.mark.parametrize("name", CASES)
def test_a_fit_that_fails_leaves_the_estimator_as_it_was(name, interrupted, monkeypatch):
    make, targets = CASES[name]
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (30, 2))
    model = make().fit(x, targets(rng, np.sin(2 * x[:, 0])))
    before, told = vars(model).copy(), model.predict(x)
    other = rng.uniform(5, 9, (30, 3))  # of three columns, elsewhere
    y = targets(rng, 3 + other[:, 0])
    if name == "classes":
        y = np.where(other[:, 0] > 7, "one", "two")
    if interrupted:  # before there is anything that training could return

        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr("gpext.estimators.base.train", interrupt)
    else:
        model.set_params(kernel=Broken())
        before["kernel"] = model.kernel
    with pytest.raises(KeyboardInterrupt if interrupted else RuntimeError):
        model.fit(other, y)
    assert vars(model) == before
    np.testing.assert_array_equal(model.predict(x), told)


def test_a_classifier_of_one_class_alone_keeps_the_classes_it_had():
    x = np.random.default_rng(0).uniform(-2, 2, (30, 1))
    model = GPClassifier().fit(x, x[:, 0] > 0)
    report = model.outlier_report()
    with pytest.raises(ValueError, match="at least two classes"):
        model.fit(x[::-1], np.ones(30))
    assert list(model.classes_) == [False, True]
    assert np.array_equal(model.outlier_report().index, report.index)


def test_what_is_tried_out_ends_without_a_warning():
    x = torch.linspace(-2, 2, 20, dtype=torch.float64).unsqueeze(-1)
    y, rule = (2 * x[:, 0]).sin() > 0.3, KL(max_steps=1, tolerance=1e-12)

    def task():
        kernel = default_kernel(1, 0).double()
        return Task(x, y.double(), BernoulliLogitLikelihood().double(), kernel, Rules(rule, rule))

    settings = Settings(max_steps=1, tolerance=1e-3, seed=0, progress=False)
    with pytest.warns(InferenceWarning, match="1 steps: stopped at max_steps"):
        train(task(), Plan(None, False, 0, None), settings)
    tried = try_out(task(), settings)  # warnings are errors in these tests
    assert tried.result.status is FitStatus.MAX_STEPS
