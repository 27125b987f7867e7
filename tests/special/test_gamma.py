"""log Gamma, its derivatives and the remainder of Stirling's formula, against SciPy and mpmath."""

import mpmath
import pytest
import torch
from scipy import special

from gpext.special import (
    exp_remainder,
    log_gamma,
    log_poisson,
    polygamma,
    stirling_remainder,
    stirling_remainder_slope,
)


def test_log_gamma_and_its_derivatives_are_scipys():
    x = torch.logspace(-3, 5, 33, dtype=torch.float64).requires_grad_()
    value, points = log_gamma(x), x.detach().numpy()
    assert value.tolist() == pytest.approx(list(special.gammaln(points)), rel=1e-12, abs=1e-14)
    for order in range(4):
        (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        expected = list(special.polygamma(order, points))
        assert value.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
        assert polygamma(order, x).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)


PLACES = [1e-3, 0.7, 1.0, 15.999, 16.0, 16.001, 300.0, 1e8, 1e15]


@pytest.mark.parametrize("z", PLACES)
def test_stirling_remainder_and_its_derivative(z):
    with mpmath.workdps(60):

        def exact(x):
            return mpmath.loggamma(x + 1) - (x * mpmath.log(x) - x + mpmath.log(2 * mpmath.pi * x) / 2)

        value, slope = float(exact(mpmath.mpf(z))), float(mpmath.diff(exact, mpmath.mpf(z)))
    x = torch.tensor(z, dtype=torch.float64).requires_grad_()
    found = stirling_remainder(x)
    assert found.item() == pytest.approx(value, rel=1e-9, abs=1e-13)
    (gradient,) = torch.autograd.grad(found, x)
    assert gradient.item() == pytest.approx(slope, rel=1e-9, abs=1e-13)
    assert stirling_remainder_slope(x).item() == pytest.approx(slope, rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("x", [-700.0, -3.0, -0.5, -0.4999, -1e-9, 0.0, 1e-9, 1e-3, 0.4999, 0.5, 7.0, 700.0])
def test_exp_remainder_and_its_derivatives_keep_their_digits(x):
    with mpmath.workdps(60):
        at = mpmath.mpf(x)
        expected = [mpmath.exp(at) - 1 - at, mpmath.exp(at) - 1, mpmath.exp(at)]
    point = torch.tensor(x, dtype=torch.float64).requires_grad_()
    value = exp_remainder(point)
    for k in range(3):
        assert value.item() == pytest.approx(float(expected[k]), rel=1e-14, abs=1e-300)
        if k < 2:
            (value,) = torch.autograd.grad(value, point, create_graph=True)


@pytest.mark.parametrize("count", [0.0, 1.0, 7.0, 20.0, 1e4, 1e15])
@pytest.mark.parametrize("gap", [-2.0, -1e-6, 0.0, 1e-6, 1.5])
def test_log_poisson_keeps_its_digits_next_to_giant_counts(count, gap):
    log_rate = torch.tensor(count, dtype=torch.float64).clamp(min=1).log() + gap
    with mpmath.workdps(60):
        f, y = mpmath.mpf(log_rate.item()), mpmath.mpf(count)
        expected = float(y * f - mpmath.exp(f) - mpmath.loggamma(y + 1))
        slope = float(abs(y - mpmath.exp(f)) * abs(f))  # times the rounding of f itself
    found = log_poisson(torch.tensor(count, dtype=torch.float64), log_rate)
    assert found.item() == pytest.approx(expected, rel=1e-12, abs=1e-13 + 1e-15 * slope)
