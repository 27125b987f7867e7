"""The generalised inverse Gaussian: constants and moments against Bessel functions, draws against its cdf."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from gpext.distributions import Gamma, GeneralizedInverseGaussian, InverseGaussian

F64 = torch.float64
CASES = [
    (-1.5, 2.0, 1.5),
    (-1.5, 2e-8, 1.5),
    (-1.5, 2e6, 1.5),
    (0.5, 1.0, 1.0),
    (3.5, 0.3, 0.7),
    (0.0, 1e-4, 1e-4),
    (0.3, 1e-3, 1.0),
    (-2.7, 0.0, 1.0),
    (1.2, 1.0, 0.0),
    (-50.0, 1.0, 2.0),
    (300.0, 1.0, 1.0),
]


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def log_constant(order, a, b):
    """log int w^(p-1) exp(-(a w + b / w) / 2) dw."""
    with mpmath.workdps(40):
        p, a, b = (mpmath.mpf(v) for v in (order, a, b))
        if b == 0:
            return mpmath.loggamma(p) - p * mpmath.log(a / 2)
        if a == 0:
            return mpmath.loggamma(-p) + p * mpmath.log(b / 2)
        return mpmath.log(2 * mpmath.besselk(p, mpmath.sqrt(a * b))) + p / 2 * mpmath.log(b / a)


@pytest.mark.parametrize(("order", "a", "b"), CASES)
def test_constant_and_moments_are_ratios_of_bessel_functions(order, a, b):
    law = GeneralizedInverseGaussian(tensor(order).squeeze(), a, b)
    constant = log_constant(order, a, b)
    for w in (0.1, 1.0, 20.0):
        expected = (order - 1) * math.log(w) - (a * w + b / w) / 2 - float(constant)
        assert float(law.log_prob(tensor(w))) == pytest.approx(expected, rel=1e-12, abs=1e-11)
    with mpmath.workdps(40):
        first = mpmath.exp(log_constant(order + 1, a, b) - constant) if a or order < -1 else mpmath.inf
        second = mpmath.exp(log_constant(order + 2, a, b) - constant) if a or order < -2 else mpmath.inf
        variance = second - first**2
    assert float(law.mean) == pytest.approx(float(first), rel=1e-12)
    assert float(law.variance) == pytest.approx(float(variance), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("order", "a", "b"), CASES)
def test_cdf_and_draws(order, a, b):
    law = GeneralizedInverseGaussian(tensor(order).squeeze(), a, b)
    draws = law.sample((10_000,), generator=torch.Generator().manual_seed(1))
    uniform = law.cdf(draws)
    assert stats.kstest(uniform.numpy(), "uniform").statistic * 100 < 2.6
    # The cdf against the integral of the density over log w, at a low, a middle and a high quantile.
    constant = float(log_constant(order, a, b))
    nodes, weights = np.polynomial.legendre.leggauss(20)
    edges = np.linspace(0, 1, 401) ** 3  # finest at the quantile
    distances = ((edges[1:] + edges[:-1])[:, None] + np.diff(edges)[:, None] * nodes) / 2
    for q in (1e-8, 0.4, 0.999):
        x = math.log(law.icdf(q).item())
        length = min(300.0, 600 / math.sqrt(abs(order) + math.sqrt(a * b)))
        t = x - length * distances
        density = np.exp(order * t - (a * np.exp(t) + b * np.exp(np.minimum(-t, 600))) / 2 - constant)
        integral = length * np.sum(density * np.diff(edges)[:, None] / 2 * weights)
        assert integral == pytest.approx(q, rel=1e-8)


def test_special_cases_are_the_distributions_of_their_names():
    w = tensor(0.2, 1.0, 4.0)
    a, b = tensor(0.7, 2.0, 1.0), tensor(1.2, 0.3, 5.0)
    inverse_gaussian = InverseGaussian((b / a).sqrt(), b)
    law = GeneralizedInverseGaussian(-0.5, a, b)
    torch.testing.assert_close(law.log_prob(w), inverse_gaussian.log_prob(w), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(law.cdf(w), inverse_gaussian.cdf(w), rtol=1e-10, atol=0)
    torch.testing.assert_close(law.mean, inverse_gaussian.mean)
    gamma = Gamma(tensor(1.5, 2.0, 0.3), 0.5 * a)
    torch.testing.assert_close(
        GeneralizedInverseGaussian(gamma.concentration, a, torch.zeros(3, dtype=F64)).log_prob(w), gamma.log_prob(w)
    )


def test_half_integer_draws_follow_the_law_of_the_rejection_sampler():
    """One order is a half-integer, the other nearly one."""
    generator = torch.Generator().manual_seed(2)
    for order in (-4.5, -1.5, 1.5, 2.5):
        mixture = GeneralizedInverseGaussian(tensor(order), 0.8, 1.7).sample((20_000,), generator=generator)
        rejection = GeneralizedInverseGaussian(tensor(order + 1e-9), 0.8, 1.7).sample((20_000,), generator=generator)
        assert stats.ks_2samp(mixture.numpy().ravel(), rejection.numpy().ravel()).pvalue > 1e-5


def test_improper_and_bad_parameters_are_refused():
    with pytest.raises(
        ValueError, match="a = 0 needs order < 0 and b = 0 needs order > 0; got order = 1, a = 0, b = 2"
    ):
        GeneralizedInverseGaussian(tensor(-1.0, 1.0), tensor(0.0, 0.0), tensor(2.0, 2.0))
    with pytest.raises(ValueError, match="needs order"):
        GeneralizedInverseGaussian(-1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match="constraint"):
        GeneralizedInverseGaussian(-1.0, -1.0, 1.0, validate_args=True)
