r"""E[log sum_k exp f_k] over independent Gaussians, for many data at once by matrix products.

With independent standard Gumbel variables G_k of distribution function G(x) = exp(-e^-x), as in
:mod:`gpext.quadrature.softmax.softmax`,

    E[log sum_k e^{f_k}] = E[max_k (f_k + G_k)] - gamma = u_1 - int_{u_0}^{u_1} prod_k F_k(u) du - gamma
    F_k(u) = E[G(u - f_k)] = 1 - sum_i p_k(f_i) (1 - G(u - f_i)) h

The sum over u is trapezoidal, with the same step h for all data; G is bounded in the strip |Im x| < pi/2, so it errs
by exp(-pi^2 / h). F_k at the nodes comes from a table where f_k is not wide
(:mod:`gpext.quadrature.softmax.gumbel_windows`). For a wide one the sum over f is trapezoidal as well, of the same
step, so that 1 - G(u_j - f_i) is one Toeplitz matrix: F is a product with it, its derivatives a product with its
transpose, and no exponential is taken of a datum and a node u together. The work grows with what a datum spans, so data
that span about as much go together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gpext.quadrature.softmax.gumbel_windows import EDGES, FULL, Precision, Window, window

_EULER = 0.57721566490153286
_GROWTH = 1.2  # of the span within a group
_CHUNK = 2**20  # numbers at a time: more leave the cache, fewer are too few for a product


def span(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the length of the grid that each datum needs (B,), from mean and variance (B, K)."""
    low, high = _ends(mean, variance.sqrt(), FULL)
    return high - low


def _ends(m: Tensor, s: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """Return below what prod F_k(u) is 0, and above what it is 1, (B,): 1 - F_k(u) is at most e^{m + v / 2 - u}."""
    rise = torch.where(s <= EDGES[-1], 0.5 * s.square(), precision.reach * s)
    return (m - precision.reach * s).amax(-1) - precision.below, (m + rise).amax(-1) + precision.above


def log_sum_exp_on_grid(mean: Tensor, variance: Tensor, precision: Precision = FULL) -> tuple[Tensor, Tensor, Tensor]:
    """Return E[log sum exp] (B,) and its derivatives in the means and variances (B, K), all float64.

    Args:
        mean: (B, K).
        variance: (B, K), nonnegative. The time that a datum takes grows with its :func:`span`.
        precision: of the sums.
    """
    s = variance.sqrt()
    low, high = _ends(mean, s, precision)
    m, length = mean - low.unsqueeze(-1), high - low
    value, slope, bend = torch.empty_like(low), torch.empty_like(mean), torch.empty_like(mean)
    order = length.argsort()
    sorted_lengths = length[order].tolist()
    begin = 0
    while begin < len(sorted_lengths):
        longest = _GROWTH * sorted_lengths[begin]
        end = begin + 1
        while end < len(sorted_lengths) and sorted_lengths[end] <= longest:
            end += 1
        grid = _Grid.of_length(sorted_lengths[end - 1], precision, mean)
        size = max(_CHUNK // (mean.size(-1) * 2 * len(grid.u)), 1)
        for part in order[begin:end].split(size):
            value[part], slope[part], bend[part] = _some(m[part], s[part], grid)
        begin = end
    return value + low, slope, bend


@dataclass(frozen=True)
class _Grid:
    precision: Precision
    u: Tensor  # (U,), from below the lowest end of the best f_k
    quadrature: Tensor  # (U,), the weights of the nodes u

    @classmethod
    def of_length(cls, length: float, precision: Precision, like: Tensor) -> _Grid:
        step = precision.step
        u = step * torch.arange(math.ceil(length / step) + 1, dtype=like.dtype, device=like.device)
        quadrature = torch.full_like(u, step)
        quadrature[0] = quadrature[-1] = 0.5 * step
        return cls(precision, u, quadrature)

    @cached_property
    def f(self) -> Tensor:
        """The nodes of wide latents (Q,): from where 1 - G(u - f) vanishes for all u."""
        step = self.precision.step
        first = -math.ceil(self.precision.above / step)
        last = len(self.u) - math.floor(self.precision.above / step)  # f_k less the tail of the Gumbel variable
        return step * torch.arange(first, last + 1, dtype=self.u.dtype, device=self.u.device)

    @cached_property
    def survival(self) -> Tensor:
        """1 - G(u - f) (Q, U): u_j - f_i depends on j - i, so that with f backwards it is a view of one row."""
        num_f, num_u, step = len(self.f), len(self.u), self.precision.step
        differences = self.u[0] - self.f[-1] + step * torch.arange(num_f + num_u - 1).to(self.u)
        return (-torch.expm1(-torch.exp(-differences))).as_strided((num_f, num_u), (1, 1)).flip(0)


def _some(m: Tensor, s: Tensor, grid: _Grid) -> tuple[Tensor, Tensor, Tensor]:
    flat_m, flat_s = m.flatten(), s.flatten()
    cdf = m.new_empty((m.numel(), len(grid.u)))
    pieces: list[_Piece | _WidePiece] = []
    for piece in _pieces(flat_m, flat_s, grid):
        cdf[piece.rows] = piece.cdf(grid)
        pieces.append(piece)
    cdf = cdf.view(*m.shape, -1)  # (B, K, U)
    product = cdf.prod(1)  # (B, U)
    value_of_max = grid.u[-1] - product @ grid.quadrature
    # The derivative in F_k is the product of the others. Where F_k underflows its own derivatives do as well.
    by_cdf = ((product * -grid.quadrature).unsqueeze(1) / cdf).masked_fill_(cdf == 0, 0.0).flatten(0, 1)
    slope, bend = torch.empty_like(flat_m), torch.empty_like(flat_m)
    for piece in pieces:
        slope[piece.rows], bend[piece.rows] = piece.derivatives(by_cdf[piece.rows], grid)
    return value_of_max - _EULER, slope.view_as(m), bend.view_as(m)


def _pieces(m: Tensor, s: Tensor, grid: _Grid) -> Iterator[_Piece | _WidePiece]:
    """Yield the latents (R,) by the interval of their standard deviations."""
    interval = torch.bucketize(s, s.new_tensor(EDGES[1:]))
    for number in range(len(EDGES)):
        rows = (interval == number).nonzero().squeeze(-1)
        if not len(rows):
            continue
        if number == len(EDGES) - 1:
            yield _WidePiece(rows, m[rows], s[rows], grid)
            continue
        series, step = window(number, grid.precision, m.device), grid.precision.step
        node = (m[rows] / step).round()
        offset = m[rows] - step * node
        yield _Piece(rows, node.long() - series.side, series, *series.basis(offset, s[rows]))


@dataclass(frozen=True)
class _Piece:
    """F_k = weights @ table in a window of the grid, 0 before it and 1 after it."""

    rows: Tensor  # which latents (R,)
    start: Tensor  # of the window, an index of the grid (R,); it may lie outside
    series: Window
    weights: Tensor  # (T, R)
    by_mean: Tensor  # their derivatives
    by_variance: Tensor

    def cdf(self, grid: _Grid) -> Tensor:  # (R, U)
        inside = self.weights.mT @ self.series.table
        nodes = torch.arange(1, len(grid.u) + 1, device=inside.device)
        return inside.gather(-1, (nodes - self.start.unsqueeze(-1)).clamp_(0, inside.size(-1) - 1))

    def derivatives(self, by_cdf: Tensor, grid: _Grid) -> tuple[Tensor, Tensor]:  # (R, U) -> (R,) each
        table = self.series.table[:, 1:-1]
        place = self.start.unsqueeze(-1) + torch.arange(table.size(-1), device=by_cdf.device)
        padded = torch.nn.functional.pad(by_cdf, (1, 1))
        inside = padded.gather(-1, place.add_(1).clamp_(0, padded.size(-1) - 1))
        by_weight = table @ inside.mT  # (T, R)
        return (by_weight * self.by_mean).sum(0), (by_weight * self.by_variance).sum(0)


class _WidePiece:
    """F_k by a trapezoidal sum over f_k."""

    def __init__(self, rows: Tensor, m: Tensor, s: Tensor, grid: _Grid) -> None:
        self.rows, self._s = rows, s
        self._z = (grid.f - m.unsqueeze(-1)) / s.unsqueeze(-1)  # (R, Q)
        self._density = (
            torch.exp(-0.5 * self._z.square()) * (grid.precision.step / math.sqrt(2 * math.pi)) / s.unsqueeze(-1)
        )

    def cdf(self, grid: _Grid) -> Tensor:  # (R, U)
        return 1 - self._density @ grid.survival

    def derivatives(self, by_cdf: Tensor, grid: _Grid) -> tuple[Tensor, Tensor]:  # (R, U) -> (R,) each
        by_density = (by_cdf @ grid.survival.mT) * self._density
        slope = -(by_density * self._z).sum(-1) / self._s
        return slope, -0.5 * (by_density * (self._z.square() - 1)).sum(-1) / self._s.square()
