"""The pieces of the bound, and their truncated Gaussian moments against 50 digits."""

import itertools

import mpmath
import pytest
import torch

from gpext.bounds import PiecewiseQuadratic
from gpext.bounds.minimax_pieces import PIECES
from scripts.piecewise_quadratic import best_bound, smallest_and_largest_gap

F64 = torch.float64


def pieces_of(num_pieces):
    gap, pieces = PIECES[num_pieces]
    starts = [0.0, *(end for end, *_ in pieces)]
    return gap, [(low, end, quadratic) for low, (end, *quadratic) in zip(starts, pieces, strict=False)]


def bound(num_pieces, x):
    """g(x), piece by piece."""
    gap, pieces = pieces_of(num_pieces)
    t, value = x.abs(), torch.full_like(x, gap)
    for low, end, (a, b, c) in pieces:
        value = torch.where((t >= low) & (t < end), (a * t + b) * t + c, value)
    return x.clamp_min(0) + value


def exact_expectation(num_pieces, mean, variance):
    """E[g(x)] in the working precision of mpmath, by the same moments without any rearrangement."""
    gap, pieces = pieces_of(num_pieces)
    s = mpmath.sqrt(variance)
    total = gap + mean * mpmath.ncdf(mean / s) + s * mpmath.npdf(mean / s)
    for (low, end, (a, b, c)), mu in itertools.product(pieces, (mean, -mean)):
        z, w = (low - mu) / s, (end - mu) / s
        mass = mpmath.ncdf(w) - mpmath.ncdf(z)
        first = s * (mpmath.npdf(z) - mpmath.npdf(w))
        second = variance * (mass + z * mpmath.npdf(z) - w * mpmath.npdf(w))
        a, b, c = mpmath.mpf(a), mpmath.mpf(b), mpmath.mpf(c) - mpmath.mpf(gap)
        total += (a * mu**2 + b * mu + c) * mass + (2 * a * mu + b) * first + a * second
    return total


@pytest.mark.parametrize("num_pieces", PIECES)
def test_every_piece_is_above_and_attains_the_largest_gap(num_pieces):
    gap, pieces = pieces_of(num_pieces)
    assert len(pieces) == (num_pieces - 1) // 2
    for low, end, quadratic in pieces:
        smallest, largest = smallest_and_largest_gap(low, end, quadratic)
        assert 0 <= smallest < 1e-15
        assert gap * (1 - 1e-10) < largest <= gap
    with mpmath.workdps(50):
        outermost = mpmath.log1p(mpmath.exp(-mpmath.mpf(pieces[-1][1])))
    assert gap * (1 - 1e-10) < outermost <= gap
    if num_pieces % 2:
        assert pieces[0][2][1] == -0.5  # one parabola through the middle, with linear term x / 2


@pytest.mark.parametrize("num_pieces", [3, 5, 10])
def test_the_script_reproduces_the_stored_coefficients(num_pieces):
    gap, pieces = best_bound(num_pieces)
    assert gap == pytest.approx(PIECES[num_pieces][0], rel=1e-9)
    for ours, stored in zip(pieces, PIECES[num_pieces][1], strict=True):
        assert ours == pytest.approx(stored, rel=1e-7)


def test_the_largest_gap_falls_with_the_number_of_pieces():
    gaps = [PiecewiseQuadratic(num_pieces).largest_gap for num_pieces in (3, 5, 10, 20)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps == pytest.approx([5.1e-2, 9.5e-3, 1.3e-3, 1.4e-4], rel=0.02)


def test_other_numbers_of_pieces_are_refused():
    with pytest.raises(ValueError, match="one of 3, 5, 10, 20; got 7"):
        PiecewiseQuadratic(7)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("num_pieces", PIECES)
def test_no_variance_gives_the_bound_itself(num_pieces, dtype):
    x = torch.cat([torch.linspace(-12, 12, 1001, dtype=dtype), torch.tensor([-1e6, 1e6], dtype=dtype)])
    eps = 4 * torch.finfo(dtype).eps
    value = PiecewiseQuadratic(num_pieces).expected_softplus(x, torch.zeros_like(x))
    torch.testing.assert_close(value, bound(num_pieces, x), rtol=eps, atol=eps)


@pytest.mark.slow
@pytest.mark.parametrize("num_pieces", PIECES)
def test_value_and_derivatives_agree_with_50_digits(num_pieces):
    knot = PIECES[num_pieces][1][-1][0]
    means = [0.0, 0.3, -2.5, knot, -knot + 1e-3, -12.0, 45.0, -300.0, 1e6, -1e6]
    variances = [1e-12, 1e-4, 0.3, 15.9, 16.1, 1e3, 1e8]
    pairs = torch.tensor(list(itertools.product(means, variances)), dtype=F64)
    mean, variance = pairs.T.contiguous().requires_grad_().unbind()
    value = PiecewiseQuadratic(num_pieces).expected_softplus(mean, variance)
    in_mean, in_variance = torch.autograd.grad(value.sum(), (mean, variance))
    rows = []
    with mpmath.workdps(60):
        for m, v in pairs.tolist():
            m, v = mpmath.mpf(m), mpmath.mpf(v)
            h, k = mpmath.sqrt(v) * mpmath.mpf(10) ** -12, v * mpmath.mpf(10) ** -12
            centre = exact_expectation(num_pieces, m, v)
            right, above = exact_expectation(num_pieces, m + h, v), exact_expectation(num_pieces, m, v + k)
            rows.append([float(centre), float((right - centre) / h), float((above - centre) / k)])
    truth = torch.tensor(rows, dtype=F64).T
    torch.testing.assert_close(value, truth[0], rtol=1e-14, atol=0)
    torch.testing.assert_close(in_mean, truth[1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(in_variance, truth[2], rtol=1e-8, atol=1e-12)
