"""The normal tails and their derivatives, against mpmath with fifty digits."""

import mpmath
import pytest
import torch

from gpext.special import hazard, log_mills_ratio, log_ndtr
from tests.members import F64

PLACES = [-1000.0, -38.0, -6.0, -1.0 - 1e-9, -1.0, -0.3, 0.0, 0.7, 5.0, 30.0]


def reference(function, order=0):
    with mpmath.workdps(60):
        return torch.tensor([float(mpmath.diff(function, mpmath.mpf(x), order)) for x in PLACES], dtype=F64)


def derivatives(function):
    x = torch.tensor(PLACES, dtype=F64).requires_grad_()
    value = function(x)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    return value.detach(), slope.detach(), bend


def upper(a):
    return mpmath.erfc(a / mpmath.sqrt(2)) / 2


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (log_ndtr, lambda x: mpmath.log(upper(-x))),
        (lambda x: log_mills_ratio(-x), lambda x: mpmath.log(upper(-x)) + x**2 / 2),
    ],
    ids=["log_ndtr", "log_mills_ratio"],
)
def test_logarithms_and_their_first_two_derivatives(function, exact):
    for order, found in enumerate(derivatives(function)):
        expected = reference(exact, order)
        size = 1 + torch.tensor(PLACES, dtype=F64).abs()  # the derivatives are differences of numbers of this size
        assert bool(((found - expected).abs() <= 1e-13 * size * (expected.abs() + size)).all()), order


def test_hazard():
    a = -torch.tensor(PLACES, dtype=F64)
    torch.testing.assert_close(hazard(a), reference(lambda x: mpmath.npdf(x) / upper(-x)), rtol=1e-13, atol=1e-300)
