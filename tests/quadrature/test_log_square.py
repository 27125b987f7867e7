"""E[log(1 + z^2)] by one rule for any spread, against mpmath and what is known of it."""

import mpmath
import pytest
import torch

from gpext.quadrature import expected_log1p_square, expected_log_square_sum
from tests.members import F64

_SPREADS = (1e-8, 0.1, 1.0, 30.0, 1e6)


def moments(mean, sd):
    """E of log(1 + z^2) and of its first two derivatives, by mpmath."""
    centers = [(c - mean) / sd for c in (-3, -1, 0, 1, 3)]
    ends = sorted({-12.0, -3.0, 0.0, 3.0, 12.0, *(c for c in centers if abs(c) < 12)})

    def integral(function):
        return float(mpmath.quad(lambda u: function(mean + sd * u) * mpmath.npdf(u), ends))

    return (
        integral(lambda z: mpmath.log1p(z**2)),
        integral(lambda z: 2 * z / (1 + z**2)),
        integral(lambda z: 2 * (1 - z**2) / (1 + z**2) ** 2),
    )


@pytest.mark.parametrize("mean", [0.0, 0.3, 4.0, 1e4])
@pytest.mark.parametrize("sd", _SPREADS)
def test_value_and_derivatives_agree_with_mpmath(mean, sd):
    m = torch.tensor([mean], dtype=F64, requires_grad=True)
    v = torch.tensor([sd**2], dtype=F64, requires_grad=True)
    value = expected_log1p_square(m, v)
    slope, half_bend = torch.autograd.grad(value.sum(), (m, v))
    with mpmath.workdps(30):
        expected = moments(mpmath.mpf(mean), mpmath.mpf(sd))
    assert value.item() == pytest.approx(expected[0], rel=1e-12)
    assert slope.item() == pytest.approx(expected[1], rel=1e-12, abs=1e-25)
    assert 2 * half_bend.item() == pytest.approx(expected[2], rel=1e-10)


def test_data_of_any_scale_do_not_disturb_each_other():
    mean = torch.tensor([0.0, 1e-9, 2.0, 1e8], dtype=F64)
    variance = torch.tensor([1e-20, 1e12, 0.5, 3.0], dtype=F64)
    together = expected_log1p_square(mean, variance)
    alone = torch.cat([expected_log1p_square(m, v) for m, v in zip(mean.split(1), variance.split(1), strict=True)])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)
    assert bool((together[1:].diff() != 0).all())


def test_it_is_the_sum_of_squares_with_a_scale_of_one():
    mean, variance = torch.linspace(-9, 9, 41, dtype=F64), torch.linspace(0, 300, 41, dtype=F64)
    zero = torch.zeros(1, dtype=F64)
    expected = expected_log_square_sum(mean, variance, zero, zero)
    torch.testing.assert_close(expected_log1p_square(mean, variance), expected, rtol=1e-9, atol=1e-10)


def test_shapes_dtypes_and_what_is_not_finite():
    found = expected_log1p_square(torch.ones(2, 1), torch.zeros(3))
    assert found.shape == (2, 3)
    assert found.dtype == torch.float32
    assert expected_log1p_square(torch.zeros(0), torch.zeros(0)).shape == (0,)
    strange = expected_log1p_square(torch.tensor([0.0, torch.nan, torch.inf]), torch.ones(3))
    assert bool(strange[0].isfinite())
    assert not bool(strange[1:].isfinite().any())
