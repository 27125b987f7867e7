"""Bessel functions of directions in the plane and their derivatives, against mpmath with sixty digits."""

import math

import mpmath
import pytest
import torch

from gpext.special import log_i0, log_i0_derivative, log_i0e, resultant_slope

F64 = torch.float64
KAPPAS = [1e-6, 0.1, 0.9999, 1.0001, 2.0, 7.0, 29.9, 30.1, 1e3, 1e6]


def exact(kappa):
    """H_0, ..., H_4 and dA/dkappa, in 60 digits."""
    with mpmath.workdps(60):
        k = mpmath.mpf(kappa)
        s, i0 = k * k, mpmath.besseli(0, k)
        h1 = mpmath.besseli(1, k) / (k * i0)
        h2 = mpmath.besseli(2, k) / (s * i0) - h1**2
        g3, g4 = mpmath.besseli(3, k) / (k**3 * i0), mpmath.besseli(4, k) / (k**4 * i0)
        g2 = mpmath.besseli(2, k) / (s * i0)
        h3 = g3 - 3 * g2 * h1 + 2 * h1**3  # cumulants of the moments I_n / (kappa^n I_0)
        h4 = g4 - 4 * g3 * h1 - 3 * g2**2 + 12 * g2 * h1**2 - 6 * h1**4
        return [float(v) for v in (mpmath.log(i0), h1, h2, h3, h4, h1 + s * h2)]


@pytest.mark.parametrize("kappa", KAPPAS)
def test_log_i0_and_its_derivatives_against_many_digits(kappa):
    squared = torch.tensor(kappa, dtype=F64).square().requires_grad_()
    expected = exact(math.sqrt(squared.item()))
    value = log_i0(squared)
    for order in range(4):  # by autograd, each twice the last one's
        assert value.item() == pytest.approx(expected[order], rel=1e-12, abs=0 if order else 1e-15)
        if order:
            assert log_i0_derivative(squared, order).item() == pytest.approx(expected[order], rel=1e-12)
        value = 2 * torch.autograd.grad(value, squared, create_graph=True)[0]
    assert value.item() == pytest.approx(expected[4], rel=1e-10)
    slope = resultant_slope(squared)
    assert slope.item() == pytest.approx(expected[5], rel=1e-11)
    (bend,) = torch.autograd.grad(slope, squared)
    if kappa < 1e3:
        with mpmath.workdps(60):
            s = mpmath.mpf(squared.item())
            assert 2 * bend.item() == pytest.approx(float(3 * expected[2] + s * expected[3]), rel=1e-8)
    scaled = log_i0e(squared)
    assert scaled.item() == pytest.approx(float(mpmath.log(mpmath.besseli(0, kappa)) - kappa), rel=1e-10)
    (gradient,) = torch.autograd.grad(scaled, squared)
    assert gradient.item() == pytest.approx(0.5 * (expected[1] - 1 / kappa), rel=1e-9)


def test_everything_is_smooth_at_zero_and_in_float32():
    zero = torch.zeros((), dtype=F64, requires_grad=True)
    assert [log_i0_derivative(zero, n).item() for n in (1, 2, 3)] == pytest.approx([0.5, -0.125, 1 / 12])
    squared = torch.tensor([0.0, 1.0, 1e8])
    slope = resultant_slope(squared)
    assert slope.dtype == torch.float32
    assert slope.tolist() == pytest.approx([0.5, resultant_slope(squared.double())[1].item(), 0.5e-8], rel=1e-4)
