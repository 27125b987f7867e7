"""E[log phi(z^2)] by closed form and fixed rules, against the adaptive quadrature."""

import pytest
import torch

from gpext.augmentations import Augmentation, ExponentialRadial, Matern32Radial, SechRadial, StudentTRadial
from gpext.quadrature import expectation

F64 = torch.float64
RADIALS = {
    "exponential": ExponentialRadial(),
    "sech": SechRadial(torch.tensor(2.5, dtype=F64)),
    "matern32": Matern32Radial(),
    "student_t": StudentTRadial(torch.tensor(3.0, dtype=F64)),
}
SPREADS = [1e-6, 1e-3, 0.05, 0.3, 0.75, 0.79, 0.81, 1.5, 6.0, 50.0]


def augmentation(radial):
    zero = torch.zeros((), dtype=F64)
    return Augmentation(radial, zero, zero, center=zero, curvature=zero + 1, offset=zero)


@pytest.mark.parametrize("name", RADIALS)
@pytest.mark.parametrize("spread", [*SPREADS, "mixed"])
def test_value_and_derivatives_agree_with_adaptive_quadrature(name, spread):
    radial = RADIALS[name]
    gap = torch.linspace(-9, 9, 41, dtype=F64).requires_grad_()
    widths = torch.linspace(0.01, 3, 41, dtype=F64) if spread == "mixed" else torch.full((41,), spread, dtype=F64)
    variance = widths.square().requires_grad_()
    ours = augmentation(radial).expected_log_prob(gap, variance)
    reference = expectation(
        lambda z: radial.log_phi(z.square()),
        gap,
        variance,
        knots=torch.zeros(1, 41, dtype=F64),
        relative_tolerance=1e-12,
        absolute_tolerance=1e-14,
    )
    torch.testing.assert_close(ours, reference, rtol=2e-10, atol=1e-12)
    mine = torch.autograd.grad(ours.sum(), (gap, variance))
    theirs = torch.autograd.grad(reference.sum(), (gap, variance))
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-7, atol=1e-8)
    if not isinstance(spread, float) or spread >= 1e-3:  # below, the adaptive rule's own derivative is noisy
        torch.testing.assert_close(mine[1], theirs[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", RADIALS)
def test_no_spread_at_all_gives_log_phi_itself(name):
    gap = torch.tensor([-2.0, 0.5, 3.0], dtype=F64)
    value = augmentation(RADIALS[name]).expected_log_prob(gap, torch.zeros_like(gap))
    torch.testing.assert_close(value, RADIALS[name].log_phi(gap.square()), rtol=1e-12, atol=0)


def test_derivative_in_the_degrees_of_freedom_agrees_with_adaptive_quadrature():
    gap, variance = torch.linspace(-9, 9, 41, dtype=F64), torch.linspace(0.01, 3, 41, dtype=F64)
    values, gradients = [], []
    for adaptive in (False, True):
        deg_free = torch.tensor(3.0, dtype=F64, requires_grad=True)
        radial = StudentTRadial(deg_free)
        if adaptive:
            value = expectation(lambda z, r=radial: r.log_phi(z.square()), gap, variance)
        else:
            value = radial.expected_log_phi(gap, variance)
        values.append(value)
        gradients.append(torch.autograd.grad(value.sum(), deg_free)[0])
    torch.testing.assert_close(*values, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-8)
