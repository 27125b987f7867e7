"""Predictions are those of a new observation: densities integrate to one, and are the model's by quadrature."""

import numpy as np
import pytest
import torch
from scipy import stats

from gpext.estimators import GPClassifier, GPCountRegressor, GPOrdinalClassifier, GPRegressor, GPSurvival
from gpext.likelihoods import StudentTLikelihood


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (50, 2))
    return x, np.sin(2 * x[:, 0]) + 0.2 * rng.standard_normal(50)


def nodes(mean, deviation):
    """Return values (S, 1) and weights (S,) of Gauss-Hermite quadrature."""
    z, w = np.polynomial.hermite_e.hermegauss(100)
    return mean + deviation * z[:, None], w / w.sum()


@pytest.mark.parametrize("noise", ["gaussian", "student_t", "laplace", "heteroscedastic"])
def test_a_density_integrates_to_one_and_has_the_moments_and_quantiles(noise, data):
    x, y = data
    model = GPRegressor(noise).fit(x, 10 * y + 100)
    at = x[:1]
    grid = np.linspace(-100, 300, 40001)
    density = np.exp(model.log_density(np.repeat(at, len(grid), 0), grid))
    total = np.trapezoid(density, grid)
    mean, deviation = model.predict(at, return_std=True)
    assert abs(total - 1) < 3e-3  # a Student-t has mass beyond the grid
    assert abs(np.trapezoid(grid * density, grid) / total - mean[0]) < 0.02 * deviation[0]
    low, middle, high = model.predict_quantiles(at, [0.05, 0.5, 0.95])[0]
    below = np.interp(
        [low, middle, high], grid, np.concatenate([[0], np.cumsum(0.5 * (density[1:] + density[:-1]))]) * 0.01
    )
    assert np.allclose(below, [0.05, 0.5, 0.95], atol=3e-3)
    assert np.allclose(model.predict_interval(at, 0.9), [[low, high]])
    assert np.allclose(model.predict_quantiles(at, 0.5), middle)


def test_probabilities_are_integrals_over_the_latent_function(data):
    x, y = data
    model = GPClassifier().fit(x, y > 0)
    of_each = []
    for each in [model.model_, *model._others]:
        with torch.no_grad():
            q = each(model._inputs(x[:5]))
        f, w = nodes(q.mean.numpy(), q.stddev.numpy())
        of_each.append(w @ (1 / (1 + np.exp(-f))))
    expected = np.mean(of_each, 0)
    assert np.allclose(model.predict_proba(x[:5])[:, 1], expected, atol=1e-8)
    assert np.allclose(model.predict_log_proba(x[:5]), np.log(model.predict_proba(x[:5])))
    labels = (y > 0)[:5]
    assert np.allclose(model.log_density(x[:5], labels), np.log(np.where(labels, expected, 1 - expected)), atol=1e-7)


def test_probabilities_of_many_classes(data):
    x, y = data
    labels = np.array(["a", "b", "c"])[np.digitize(y, [-0.5, 0.5])]
    for model in (GPClassifier(), GPOrdinalClassifier()):
        probabilities = model.fit(x, labels).predict_proba(x)
        assert probabilities.shape == (50, 3)
        assert np.allclose(probabilities.sum(1), 1)
        assert model.score(x, labels) > 0.8
        assert model.log_density(x[:1], ["unknown"])[0] == -np.inf


def test_an_exposure_multiplies_the_mean():
    rng = np.random.default_rng(0)
    x, exposure = rng.uniform(-2, 2, (80, 1)), rng.uniform(0.5, 20, 80)
    y = rng.poisson(exposure * np.exp(np.sin(2 * x[:, 0])))
    model = GPCountRegressor("poisson").fit(x, y, exposure=exposure)
    one, three = model.predict(x[:4]), model.predict(x[:4], exposure=3.0)
    assert np.allclose(three, 3 * one, rtol=1e-8)
    rate = np.exp(np.sin(2 * x[:, 0]))
    assert stats.spearmanr(model.predict(x), rate).statistic > 0.9
    # The density is that of the Poisson mixture over the latent function.
    with torch.no_grad():
        q = model.model_(model._inputs(x[:3]))
    f, w = nodes(q.mean.numpy() + model._log_rate, q.stddev.numpy())
    expected = np.log(w @ stats.poisson.pmf(y[:3], exposure[:3] * np.exp(f)))
    assert np.allclose(model.log_density(x[:3], y[:3], exposure=exposure[:3]), expected, atol=1e-6)
    ends = q.mean.numpy()[:, None] + model._log_rate + q.stddev.numpy()[:, None] * stats.norm.ppf([0.1, 0.9])
    found = model.predict_rate_interval(x[:3], 0.8, exposure=exposure[:3])
    assert np.allclose(found, exposure[:3, None] * np.exp(ends), rtol=1e-6)
    # A very long exposure leaves nothing of the scatter of counts.
    counted = model.predict_interval(x[:3], 0.8, exposure=1e6) / 1e6
    assert np.allclose(model.predict_rate_interval(x[:3], 0.8), counted, rtol=1e-2)
    with pytest.raises(ValueError, match="exposure must be positive"):
        model.predict(x, exposure=0.0)
    with pytest.raises(ValueError, match="not negative; got -1 in row 0"):
        GPCountRegressor().fit(x, y - y[0] - 1)


def test_draws_have_the_predictive_moments(data):
    x, y = data
    for model in (GPRegressor("gaussian").fit(x, y), GPCountRegressor("poisson").fit(x, np.round(np.exp(y)))):
        draws = model.sample_y(x[:3], 4000, random_state=0)
        mean, deviation = model.predict(x[:3], return_std=True)
        assert draws.shape == (3, 4000)
        z = (draws.mean(1) - mean) / (deviation / np.sqrt(4000))
        assert np.abs(z).max() < 4.5
        assert np.array_equal(draws, model.sample_y(x[:3], 4000, random_state=0))


def survival_data(size=120):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((size, 2))
    time, end = np.exp(x[:, 0]) * rng.weibull(2.0, size), rng.uniform(0.2, 5, size)
    return x, np.array(list(zip(time <= end, np.minimum(time, end), strict=True)), dtype=[("e", bool), ("t", float)])


def test_survival_curves_are_those_of_the_density():
    x, y = survival_data()
    model = GPSurvival("weibull").fit(x, y)
    assert model.score(x, y) > 0.75
    grid = np.linspace(1e-4, 60, 20001)
    observed = np.array([(True, t) for t in grid], dtype=y.dtype)
    density = np.exp(model.log_density(np.repeat(x[:1], len(grid), 0), observed))
    gone = np.concatenate([[0], np.cumsum(0.5 * (density[1:] + density[:-1]) * np.diff(grid))])
    curve = model.predict_survival_function(x[:1], times=[0.5, 1.0, 2.0])[0]
    assert np.allclose(1 - np.interp([0.5, 1.0, 2.0], grid, gone), curve, atol=1e-3)
    half = model.predict_quantiles(x[:1], 0.5)
    assert np.allclose(model.predict_survival_function(x[:1], times=half), 0.5, atol=1e-4)
    assert np.allclose(model.predict(x[:1]), -np.log(half))
    censored = np.array([(False, 1.0)], dtype=y.dtype)
    assert np.allclose(model.log_density(x[:1], censored), np.log(curve[1]), atol=1e-6)
    with pytest.raises(ValueError, match=r"positive and finite; got 0\.0 in row 0"):
        GPSurvival().fit(x, np.zeros(len(x)))


def test_weighted_and_unweighted_data_of_many_classes():
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((30, 2)), rng.integers(0, 3, 30)
    once = GPClassifier().fit(x, labels, sample_weight=np.full(30, 2.0))
    twice = GPClassifier().fit(np.repeat(x, 2, 0), np.repeat(labels, 2))
    assert np.array_equal(once.predict_proba(x), twice.predict_proba(x))


def test_any_likelihood_is_copied(data):
    x, y = data
    likelihood = StudentTLikelihood().initialize(deg_free=4.0)
    before = likelihood.raw_noise.item()
    model = GPRegressor(likelihood).fit(x, y)
    assert likelihood.raw_noise.item() == before
    assert model.likelihood_name_ == "StudentTLikelihood"
