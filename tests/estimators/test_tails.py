"""Tails of residuals: the Student-t that fits them, and whether GPRegressor trains one."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import norm, t

from gpext import FitStatus
from gpext.estimators import GPRegressor
from gpext.estimators.regressor import HEAVY
from gpext.estimators.tails import fit_tails
from gpext.inference import KL, Laplace, Status


def test_the_scale_has_the_largest_likelihood_at_its_degrees_of_freedom():
    residuals = t.rvs(3.2, scale=0.7, size=400, random_state=0)
    weights = np.random.default_rng(1).uniform(0.5, 2, 400)
    found = fit_tails(residuals, weights)

    def loss(log_scale):
        return -np.average(t.logpdf(residuals, found.deg_free, scale=np.exp(log_scale)), weights=weights)

    best = minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-8})
    assert found.scale == pytest.approx(np.exp(best.x), rel=1e-3)
    deviation = np.sqrt(np.average(residuals**2, weights=weights))
    gaussian = np.average(norm.logpdf(residuals, scale=deviation), weights=weights)
    assert found.gain == pytest.approx(-best.fun - gaussian, abs=1e-6)
    assert 2.2 <= found.deg_free <= 5.5


def test_whole_weights_are_repeated_residuals():
    residuals, times = t.rvs(4, size=60, random_state=2), np.arange(60) % 3 + 1
    repeated = np.repeat(residuals, times)
    assert fit_tails(residuals, times) == pytest.approx(fit_tails(repeated, np.ones(len(repeated))))


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_the_gain_does_not_depend_on_the_unit(scale):
    residuals = t.rvs(3, size=80, random_state=3)
    ones = np.ones(80)
    found = fit_tails(scale * residuals, ones)
    assert found.gain == pytest.approx(fit_tails(residuals, ones).gain, abs=1e-9)
    assert found.scale == pytest.approx(scale * fit_tails(residuals, ones).scale)


def test_residuals_that_are_missing_or_zero():
    residuals = t.rvs(3, size=80, random_state=3)
    with_missing = np.concatenate([residuals, [np.nan, np.inf]])
    assert fit_tails(with_missing, np.ones(82)) == pytest.approx(fit_tails(residuals, np.ones(80)))
    for nothing in (np.zeros(5), np.full(3, np.nan)):
        assert fit_tails(nothing, np.ones(len(nothing))).gain == 0


def table(noise):
    X = np.random.default_rng(0).uniform(-2, 2, (150, 2))
    return X, np.sin(2 * X[:, 0]) + 0.2 * noise


@pytest.mark.parametrize("weight", [None, 0.5])  # two of each are repeated rows, whose residuals are rounding
def test_light_tails_are_not_trained_again(weight):
    # quantiles of a uniform distribution: its tails are lighter than Gaussian ones for certain
    noise = np.random.default_rng(1).permutation(np.linspace(-1.7, 1.7, 150))
    X, y = table(noise)
    found = GPRegressor().fit(X, y, None if weight is None else np.full(150, weight))
    assert set(found.report_.leave_one_out) == {"gaussian"}
    assert any(
        "'student_t' not trained" in choice and f"less than {HEAVY}" in choice for choice in found.report_.choices
    )


@pytest.mark.parametrize("weight", [None, 0.5, 2.0])  # two of each are repeated rows, which have no noise at all
def test_heavy_tails_are_trained_and_kept(weight):
    noise = np.random.default_rng(1).permutation(t.ppf((np.arange(150) + 0.5) / 150, 2.5))
    X, y = table(noise)
    found = GPRegressor().fit(X, y, None if weight is None else np.full(150, weight))
    assert set(found.report_.leave_one_out) == {"gaussian", "student_t"}
    assert found.likelihood_name_ == "student_t"


def test_a_student_t_is_trained_to_a_bound_above_that_of_the_rule_it_begins_with():
    X, y = table(np.random.default_rng(1).permutation(t.ppf((np.arange(150) + 0.5) / 150, 2.5)))
    found = GPRegressor("student_t", priors=False, tolerance=1e-5).fit(X, y)
    laplace = GPRegressor("student_t", priors=False, tolerance=1e-5, inference=Laplace()).fit(X, y)
    assert isinstance(found.model_.inference, KL)
    assert found.fit_result_.status is FitStatus.CONVERGED
    laplace.model_.inference = KL()
    assert found.model_.result.log_evidence > laplace.model_.result.log_evidence


@pytest.mark.parametrize("noise", ["auto", "gaussian"])
def test_a_function_without_noise_is_interpolated(noise):
    X = np.random.default_rng(0).uniform(-2, 2, (200, 2))
    X, test = X[:150], X[150:]

    def function(x):
        return 40 + 3 * np.sin(x[:, 0]) * np.exp(0.3 * x[:, 1])

    found = GPRegressor(noise).fit(X, function(X))
    assert found.likelihood_name_ == "gaussian"
    assert found.fit_result_.status is FitStatus.CONVERGED
    assert found.model_.result.status is Status.CONVERGED
    mean, deviation = found.predict(test, return_std=True)
    np.testing.assert_allclose(mean, function(test), atol=0.01 * np.std(function(X)))
    assert np.median(deviation) < 0.005 * np.std(function(X))  # gpytorch's least noise alone would be 0.01
    if noise == "auto":
        assert any("'student_t' not trained" in choice and "exact" in choice for choice in found.report_.choices)
