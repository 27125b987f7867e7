r"""E[log sum_k exp f_k] over independent Gaussians, for many data at once by matrix products.

With independent standard Gumbel variables G_k of distribution function G(x) = exp(-e^-x), as in
:mod:`gpext.quadrature.softmax.softmax`,

    E[log sum_k e^{f_k}] = E[max_k (f_k + G_k)] - gamma = u_1 - int_{u_0}^{u_1} prod_k F_k(u) du - gamma
    F_k(u) = E[G(u - f_k)] = 1 - sum_i p_k(f_i) (1 - G(u - f_i)) h

Both sums are trapezoidal, with the same step h for all data, so that 1 - G(u_j - f_i) is one Toeplitz matrix: F is a
product with it, its derivatives a product with its transpose, and no exponential is taken of a datum and a node u
together. G is bounded in the strip |Im x| < pi/2, so the sums err by exp(-pi^2 / h) and, for a Gaussian of standard
deviation s, by exp(-2 pi^2 s^2 / h^2). Narrower ones are seen from the node u nearest to their mean: the narrowest
through their moments and the Taylor series of G, the others on a finer grid, so that again a matrix product with a
fixed table serves them all. The work grows with the square of what a datum spans, so data that span about as much go
together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

STEP = 0.35
_REACH = 8.0  # standard deviations: beyond, 1e-15
_WIDE = 0.45  # standard deviation from which the step of the grid resolves a Gaussian
_FINER = 3  # times as many nodes resolve those from _NARROW on
_NARROW = 0.18
_NUM_MOMENTS = 30  # for those below
_RADIUS = 1.4  # of the circle that gives the Taylor series of G; up to pi/2, |G| <= 1
_BELOW, _ABOVE = 3.5, 30.0  # of a standard Gumbel: G(-3.5) = e^-33, 1 - G(30) = e^-30
_SIDE = math.ceil((_BELOW + _REACH * _WIDE) / STEP) + 1  # nodes u below a mean, under which a narrow F_k is 0
_WINDOW = _SIDE + math.ceil((_ABOVE + _REACH * _WIDE) / STEP) + 2  # and as many after which it is 1
_EULER = 0.57721566490153286
_GROWTH = 1.2  # of the span within a group
_CHUNK = 2**21  # numbers at a time


def span(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the length of the grid that each datum needs (B,), from mean and variance (B, K)."""
    low, high = _ends(mean, variance.sqrt())
    return high - low + _BELOW + _ABOVE


def _ends(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Return below what the best f_k is not, and above what no f_k is, (B,)."""
    return (m - _REACH * s).amax(-1), (m + _REACH * s).amax(-1)


def log_sum_exp_on_grid(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return E[log sum exp] (B,) and its derivatives in the means and variances (B, K), all float64.

    Args:
        mean: (B, K).
        variance: (B, K), nonnegative. The time that a datum takes grows with the square of its :func:`span`.
    """
    s = variance.sqrt()
    low, high = _ends(mean, s)
    m, length = mean - low.unsqueeze(-1), high - low
    value, slope, bend = torch.empty_like(low), torch.empty_like(mean), torch.empty_like(mean)
    order = length.argsort()
    sorted_lengths = (length[order] + _BELOW + _ABOVE).tolist()
    begin = 0
    while begin < len(sorted_lengths):
        longest = _GROWTH * sorted_lengths[begin]
        end = begin + 1
        while end < len(sorted_lengths) and sorted_lengths[end] <= longest:
            end += 1
        grid = _Grid.of_length(sorted_lengths[end - 1], mean)
        size = max(_CHUNK // (mean.size(-1) * (len(grid.f) + 4 * len(grid.u))), 1)
        for part in order[begin:end].split(size):
            value[part], slope[part], bend[part] = _some(m[part], s[part], grid)
        begin = end
    return value + low, slope, bend


@dataclass(frozen=True)
class _Grid:
    u: Tensor  # (U,), from the lowest end of the best f_k less _BELOW
    f: Tensor  # (Q,): where it matters to the nodes u
    survival: Tensor  # 1 - G(u - f) (Q, U)
    quadrature: Tensor  # (U,), the weights of the nodes u

    @classmethod
    def of_length(cls, length: float, like: Tensor) -> _Grid:
        num_u = math.ceil(length / STEP) + 1
        first_f = -math.ceil((_BELOW + _ABOVE) / STEP)  # below it, 1 - G(u - f) vanishes for all u
        num_f = math.ceil((length - _ABOVE) / STEP) - first_f + 1
        steps = STEP * torch.arange(first_f, num_u, dtype=like.dtype, device=like.device)
        f, u = steps[:num_f] - _BELOW, steps[-num_u:] - _BELOW
        # u_j - f_i depends on j - i: with f backwards the matrix is a view of one row
        differences = STEP * torch.arange(1 - num_f - first_f, num_u - first_f, dtype=like.dtype, device=like.device)
        row = -torch.expm1(-torch.exp(-differences))
        survival = row.as_strided((num_f, num_u), (1, 1)).flip(0)
        quadrature = torch.full_like(u, STEP)
        quadrature[0] = quadrature[-1] = 0.5 * STEP
        return cls(u, f, survival, quadrature)


def _some(m: Tensor, s: Tensor, grid: _Grid) -> tuple[Tensor, Tensor, Tensor]:
    wide = s >= _WIDE
    safe = torch.where(wide, s, 1.0).unsqueeze(-1)
    z = (grid.f - m.unsqueeze(-1)) / safe  # (B, K, Q)
    density = torch.exp(-0.5 * z.square()) * (STEP / math.sqrt(2 * math.pi)) / safe
    cdf = 1 - density @ grid.survival  # (B, K, U)
    narrow = list(_narrow_ones(m, s, grid))
    for piece in narrow:
        cdf[piece.rows] = piece.cdf(grid)
    product = cdf.prod(1)  # (B, U)
    value_of_max = grid.u[-1] - product @ grid.quadrature
    # The derivative in F_k is the product of the others. Where F_k underflows its own derivatives do as well.
    by_cdf = torch.where(cdf == 0, 0.0, -(product * grid.quadrature).unsqueeze(1) / cdf)  # (B, K, U)
    by_density = (by_cdf @ grid.survival.mT) * density
    slope = -(by_density * z).sum(-1) / safe.squeeze(-1)
    bend = -0.5 * (by_density * (z.square() - 1)).sum(-1) / safe.squeeze(-1).square()
    for piece in narrow:
        slope[piece.rows], bend[piece.rows] = piece.derivatives(by_cdf[piece.rows])
    return value_of_max - _EULER, slope, bend


@dataclass(frozen=True)
class _Narrow:
    """F_k = weights @ table in a window of the grid, 0 before it and 1 after it."""

    rows: tuple[Tensor, Tensor]  # which (datum, k), (R,) each
    start: Tensor  # of the window, an index of the grid (R,); it may lie outside
    weights: Tensor  # (R, T)
    by_mean: Tensor  # their derivatives
    by_variance: Tensor
    table: Tensor  # (T, W)

    def cdf(self, grid: _Grid) -> Tensor:  # (R, U)
        inside = self.weights @ self.table
        padded = torch.nn.functional.pad(inside, (1, 0))
        padded = torch.cat([padded, torch.ones_like(self.weights[:, :1])], -1)
        nodes = torch.arange(1, len(grid.u) + 1, device=inside.device)
        return padded.gather(-1, (nodes - self.start.unsqueeze(-1)).clamp(0, _WINDOW + 1))

    def derivatives(self, by_cdf: Tensor) -> tuple[Tensor, Tensor]:  # (R, U) -> (R,) each
        window = self.start.unsqueeze(-1) + torch.arange(_WINDOW, device=by_cdf.device)
        last = by_cdf.size(-1) - 1
        inside = torch.where((window >= 0) & (window <= last), by_cdf.gather(-1, window.clamp(0, last)), 0.0)
        by_weight = inside @ self.table.mT
        return (by_weight * self.by_mean).sum(-1), (by_weight * self.by_variance).sum(-1)


def _narrow_ones(m: Tensor, s: Tensor, grid: _Grid) -> Iterator[_Narrow]:
    for low, high, rule in ((-1.0, _NARROW, _by_moments), (_NARROW, _WIDE, _on_finer_grid)):
        of, k = ((s >= low) & (s < high)).nonzero(as_tuple=True)
        rows = of, k
        if len(of):
            node = ((m[rows] - grid.u[0]) / STEP).round()
            offset = m[rows] - (grid.u[0] + STEP * node)
            yield _Narrow(rows, node.long() - _SIDE, *rule(offset, s[rows]))


def _by_moments(offset: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return E[t^j], j = 0, 1, ..., of t ~ N(offset, s^2), (R, J), its derivatives in m and v, and G's table."""
    v = s.square()
    moments = [torch.ones_like(offset), offset]
    for j in range(2, _NUM_MOMENTS):
        moments.append(offset * moments[-1] + (j - 1) * v * moments[-2])
    weights = torch.stack(moments, -1)
    order = torch.arange(_NUM_MOMENTS, dtype=s.dtype, device=s.device)
    by_mean = torch.nn.functional.pad(weights, (1, -1)) * order
    by_variance = torch.nn.functional.pad(weights, (2, -2)) * (0.5 * order * (order - 1))
    return weights, by_mean, by_variance, _taylor_table(s.device)


def _on_finer_grid(offset: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return h p(t), t on the finer grid, (R, T), its derivatives in mean and variance, and G's table."""
    t, table = _finer_table(s.device)
    inverse = s.reciprocal().unsqueeze(-1)
    z = (t - offset.unsqueeze(-1)) * inverse
    weights = torch.exp(-0.5 * z.square()) * inverse * (STEP / _FINER / math.sqrt(2 * math.pi))
    by_mean = weights * z * inverse
    return weights, by_mean, 0.5 * inverse * (by_mean * z - weights * inverse), table


def _window(device: torch.device) -> Tensor:
    return STEP * (torch.arange(_WINDOW, dtype=torch.float64, device=device) - _SIDE)


@functools.cache
def _taylor_table(device: torch.device) -> Tensor:
    """Return the coefficients of t^j in G(u - t) (J, W), by Cauchy's integral over a circle."""
    num_points = 512
    angle = 2 * math.pi / num_points * torch.arange(num_points, dtype=torch.float64, device=device)
    t = torch.polar(torch.full_like(angle, _RADIUS), angle)
    on_circle = torch.exp(-torch.exp(t.unsqueeze(-1) - _window(device)))
    coefficients = torch.fft.fft(on_circle, dim=0, norm="forward").real[:_NUM_MOMENTS]
    j = torch.arange(_NUM_MOMENTS, dtype=torch.float64, device=device)
    return coefficients * (_RADIUS**-j).unsqueeze(-1)


@functools.cache
def _finer_table(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return t (T,) and G(u - t) (T, W)."""
    reach = math.ceil((0.5 * STEP + _REACH * _WIDE) * _FINER / STEP)
    t = STEP / _FINER * torch.arange(-reach, reach + 1, dtype=torch.float64, device=device)
    return t, torch.exp(-torch.exp(t.unsqueeze(-1) - _window(device)))
