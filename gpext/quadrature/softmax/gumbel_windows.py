r"""The distribution function of a Gaussian plus a Gumbel variable on equally spaced nodes, from a table.

    F(u; m, v) = E[G(u - f)],   f ~ N(m, v),   G(x) = exp(-e^-x)

Let n be the node nearest to the mean and o, |o| <= h / 2, the mean's distance from it. Then F at the node n + j is a
function of o and s = sqrt v alone, for each j of a window outside of which F is 0 or 1. G is analytic in the strip
|Im x| < pi / 2, so these functions have short series in Chebyshev polynomials of o and, on each of a few intervals, of
s (of v on the first, where F is smooth in v) [Trefethen 2013, ch. 8]:

    F_j(o, s) = sum_ab c_abj T_a(2 o / h) T_b(x(s))

with negligible coefficients left out. Values are one product with a table of the c_abj, derivatives are those of the
polynomials: no exponential is taken. The coefficients come from F at Chebyshev nodes, as
:mod:`gpext.quadrature.softmax.gumbel` computes it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.quadrature.softmax.gumbel import cumulative

EDGES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # of the intervals of s
_DEGREES = 11, 17  # at most, of the series in o and in s


@dataclass(frozen=True)
class Precision:
    """The nodes for sums of a certain error."""

    step: float  # h
    below: float  # of a standard Gumbel, where G is negligible
    above: float  # where 1 - G is
    reach: float  # standard deviations beyond which a Gaussian is
    negligible: float  # coefficients


FULL = Precision(step=0.34, below=3.5, above=30.0, reach=8.0, negligible=1e-14)  # G(-3.5) = e^-33, 1 - G(30) = e^-30
COARSE = Precision(step=0.5, below=3.0, above=20.0, reach=6.2, negligible=1e-10)  # e^-20, e^-20


@dataclass(frozen=True)
class Window:
    """The series on one interval of s: the coefficients of the pairs (a, b) that count, and what F is outside."""

    low: float  # end of the interval
    high: float
    step: float  # h
    side: int  # number of nodes in the window below the mean
    a: Tensor  # degrees in o (T,)
    b: Tensor  # degrees in s, or in v on the first interval (T,)
    table: Tensor  # c_abj (T, W), F_j = 0 in the first column and 1 in the last

    def basis(self, offset: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return T_a T_b (T, R) and its derivatives in m and v, at offsets and standard deviations (R,)."""
        by_offset, slope = _chebyshev(2 / self.step * offset, int(self.a[-1]) + 1)
        center, half = 0.5 * (self.low + self.high), 0.5 * (self.high - self.low)
        if self.low == 0:  # x = 2 v / high^2 - 1
            x, stretch = 2 * s.square() / self.high**2 - 1, torch.full_like(s, 2 / self.high**2)
        else:
            x, stretch = (s - center) / half, 0.5 / (half * s)
        by_width, bend = _chebyshev(x, int(self.b.max()) + 1)
        of_a, of_b = by_offset[self.a], by_width[self.b]
        return of_a * of_b, (slope * (2 / self.step))[self.a] * of_b, of_a * (bend * stretch)[self.b]


def _chebyshev(x: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return T_k(x) and its derivative, k < number, (number, R) each."""
    values, slopes = (x.new_empty((number, *x.shape)) for _ in range(2))
    values[0], values[1], slopes[0], slopes[1] = 1.0, x, 0.0, 1.0
    twice = 2 * x
    for k in range(2, number):
        torch.addcmul(-values[k - 2], twice, values[k - 1], out=values[k])
        torch.addcmul(2 * values[k - 1] - slopes[k - 2], twice, slopes[k - 1], out=slopes[k])
    return values, slopes


@functools.cache
def window(interval: int, precision: Precision, device: torch.device) -> Window:
    """Return the series on the interval of s from EDGES[interval] to the next."""
    low, high, step = EDGES[interval], EDGES[interval + 1], precision.step
    side = math.ceil((precision.below + precision.reach * high) / step) + 1
    num_nodes = side + math.ceil((precision.above + 0.5 * high**2) / step) + 2
    (o, to_a), (x, to_b) = (_nodes(number, device) for number in _DEGREES)
    offset = 0.5 * step * o
    s = (0.5 * high**2 * (x + 1)).sqrt() if low == 0 else low + 0.5 * (high - low) * (x + 1)
    j = step * (torch.arange(num_nodes, dtype=torch.float64, device=device) - side)
    m, v = offset.repeat_interleave(len(s)), s.square().repeat(len(o))
    at_nodes = cumulative(j.unsqueeze(0), m.unsqueeze(0), v.unsqueeze(0))[0][0].view(len(o), len(s), num_nodes)
    coefficients = torch.einsum("ai,bk,ikj->abj", to_a, to_b, at_nodes)
    a, b = (coefficients.abs().amax(-1) > precision.negligible).nonzero(as_tuple=True)
    table = torch.nn.functional.pad(coefficients[a, b], (1, 1))
    table[0, -1] = 1.0  # of T_0 T_0
    return Window(low, high, step, side, a, b, table)


def _nodes(number: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the zeros of T_n (n,), and the matrix (n, n) that takes values there to coefficients."""
    k = torch.arange(number, dtype=torch.float64, device=device)
    angle = math.pi * (k + 0.5) / number
    matrix = 2 / number * torch.cos(k.unsqueeze(-1) * angle)
    matrix[0] *= 0.5
    return torch.cos(angle), matrix
