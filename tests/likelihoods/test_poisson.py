"""The Poisson likelihood: integrals and predictions against mpmath."""

import math

import mpmath
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from scipy import stats

from gpext.bounds import conditional_log_prob
from gpext.likelihoods import PoissonLikelihood
from tests.members import F64, tensor

CASES = [(0, 0.0, 1.0), (0, 100.0, 1.0), (1, -1000.0, 1e4), (7, -100.0, 4.0), (1000, 3.0, 2**-20), (10**6, 0.0, 1e4)]


def log_marginal(y, mean, variance):
    """By mpmath about the peak of y f - e^f - (f - m)^2 / (2 v)."""
    m, v = mpmath.mpf(mean), mpmath.mpf(variance)
    low, high = min(m, mpmath.mpf(-10)) - 1, m + v * y + 1
    for _ in range(150):
        middle = (low + high) / 2
        low, high = (middle, high) if y - mpmath.exp(middle) - (middle - m) / v > 0 else (low, middle)

    def exponent(f):
        return y * f - mpmath.exp(f) - (f - m) ** 2 / (2 * v)

    width, top = 1 / mpmath.sqrt(mpmath.exp(low) + 1 / v), exponent(low)
    points = sorted(low + sign * k * width for sign in (-1, 1) for k in (0, 2, 5, 10, 20, 100))
    total = mpmath.quad(lambda f: mpmath.exp(exponent(f) - top), points)
    return float(top + mpmath.log(total) - mpmath.log(2 * mpmath.pi * v) / 2 - mpmath.loggamma(y + 1))


@pytest.mark.parametrize(("y", "mean", "variance"), CASES)
def test_integrals_agree_with_mpmath(y, mean, variance):
    likelihood, target = PoissonLikelihood(), tensor(y)
    with mpmath.workdps(30):
        reference = log_marginal(y, mean, variance)
        closed = y * mpmath.mpf(mean) - mpmath.exp(mean + mpmath.mpf(variance) / 2) - mpmath.loggamma(y + 1)
    assert likelihood.log_density(target, tensor(mean), tensor(variance)).item() == pytest.approx(
        reference, rel=1e-10, abs=1e-12
    )
    if closed > -1e300:
        value = likelihood.expected_log_density(target, tensor(mean), tensor(variance)).item()
        assert value == pytest.approx(float(closed), rel=1e-12)


def test_the_predictive_distribution():
    """Its pmf sums to the cdf; mean and variance are those of a log-normal rate."""
    mean, variance = tensor(0.4, 2.0), tensor(1.0, 0.05)
    predictive = PoissonLikelihood()(MultivariateNormal(mean, DiagLinearOperator(variance)))
    y = torch.arange(6.0).double().unsqueeze(-1).expand(-1, 2)
    torch.testing.assert_close(predictive.cdf(y[-1]), predictive.log_prob(y).exp().sum(0), rtol=1e-9, atol=0)
    rate = (mean + variance / 2).exp()
    torch.testing.assert_close(predictive.mean, rate, rtol=1e-9, atol=0)
    torch.testing.assert_close(predictive.variance, rate + variance.expm1() * rate.square(), rtol=1e-9, atol=0)
    assert predictive.quantile(0.5).tolist() == [
        float(next(k for k in range(99) if predictive.cdf(tensor(k, k))[i] >= 0.5)) for i in range(2)
    ]


def test_the_link_is_logarithmic():
    f = tensor(-2.0, 0.0, 3.0)
    expected = stats.poisson.logpmf([1, 0, 4], f.exp().numpy())
    assert PoissonLikelihood().log_prob(tensor(1, 0, 4), f).tolist() == pytest.approx(list(expected), rel=1e-12)
    assert PoissonLikelihood()(f).rate.tolist() == pytest.approx([math.exp(v) for v in (-2, 0, 3)])


@pytest.mark.parametrize("count", [0.0, 1.0, 2.0, 15.0, 16.0, 1e4, 1e8, 1e12])
@pytest.mark.parametrize("deviations", [-3.0, -0.1, 0.0, 1.0, 20.0])
def test_densities_of_any_count_have_digits(count, deviations):
    """At the given number of widths of the likelihood from its mode; f itself is known to rounding."""
    width = (1 + count) ** -0.5
    f = torch.tensor([math.log(max(count, 1)) + deviations * width], dtype=F64)
    variance = torch.tensor([0.3 * width**2], dtype=F64)
    y = torch.tensor([count], dtype=F64)
    with mpmath.workdps(60):
        m, half, n = mpmath.mpf(f.item()), mpmath.mpf(variance.item()) / 2, mpmath.mpf(count)
        exact = n * m - mpmath.exp(m) - mpmath.loggamma(n + 1)
        expected = n * m - mpmath.exp(m + half) - mpmath.loggamma(n + 1)
    likelihood = PoissonLikelihood()
    rounding = 4 * torch.finfo(F64).eps * (1 + abs(deviations) / width) * max(f.item(), 1)
    given, mean = conditional_log_prob(likelihood, y, f), likelihood.expected_log_density(y, f, variance)
    assert given.item() == pytest.approx(float(exact), rel=1e-14, abs=rounding)
    assert mean.item() == pytest.approx(float(expected), rel=1e-14, abs=rounding)
