r"""Integrals against a Gaussian of functions of theta = softplus(f), whatever its width.

Functions of theta such as e^{-t theta} = (1 + e^f)^{-t}, bounded by one in the strip |Im f| < pi / 2, or log theta, are
smooth on the scale of one near f = 0, and where they bend further below or above on that of |f|. So a narrow Gaussian
takes equally spaced nodes, with a step that this strip allows [Trefethen & Weideman 2014, Thm. 5.1]; the nodes of a
wide one are clustered around f = 0 as well as around its mean, and grow with the logarithm of its width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.quadrature.softmax.clustered import coordinate, place
from gpext.quadrature.softmax.gumbel import DIGITS, REACH, gaussian_step
from gpext.quadrature.softmax.per_datum import marginals, per_datum

WIDE = 2.0  # standard deviation from which nodes are clustered
_WIDTHS = (0.02, 0.1, 0.3, 0.6, 1.0, 1.5, WIDE)  # standard deviations up to which Gaussians have as many nodes
_CLUSTERED_STEP = math.pi / DIGITS  # of the coordinate in which nodes are clustered: a strip of half a unit
_MORE = 1.5  # times as many nodes as the fewest in a group
_CHUNK = 2**18  # numbers at a time

# nodes f (r, Q) and which Gaussians (r,) they are of -> F(f), F'(f), F''(f)
Jet = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class SoftplusRule:
    """Nodes of some of the Gaussians."""

    rows: Tensor  # which (r,)
    f: Tensor  # (r, Q)
    weights: Tensor  # (r, Q), summing to one


def softplus_rules(mean: Tensor, variance: Tensor) -> Iterator[SoftplusRule]:
    """Yield nodes for all Gaussians, those that need about as many together.

    Args:
        mean: (R,), float64.
        variance: (R,), nonnegative.
    """
    s = variance.sqrt()
    below = -1.0
    for bound in _WIDTHS:
        rows = ((s > below) & (s <= bound)).nonzero().squeeze(-1)
        if len(rows):
            yield _narrow(rows, mean, s, bound)
        below = bound
    rows = (s > WIDE).nonzero().squeeze(-1)
    if len(rows):
        yield from _wide(rows, mean, s)


def _wide(rows: Tensor, mean: Tensor, s: Tensor) -> Iterator[SoftplusRule]:
    center = torch.stack([torch.zeros_like(s[rows]), mean[rows]], -1)
    width = torch.stack([torch.ones_like(s[rows]), s[rows]], -1)
    ends = mean[rows, None] + REACH * s[rows, None] * s.new_tensor([-1.0, 1.0])
    start, end = coordinate(ends, center, width).unbind(-1)
    num_nodes = ((end - start) / _CLUSTERED_STEP).ceil().long() + 1
    order = num_nodes.argsort()
    sizes = num_nodes[order].tolist()
    done = 0
    while done < len(sizes):
        last = done + 1
        while last < len(sizes) and sizes[last] <= _MORE * sizes[done]:
            last += 1
        part = order[done:last]
        position = torch.arange(sizes[last - 1], dtype=s.dtype, device=s.device)
        f, stretch = place(start[part, None] + _CLUSTERED_STEP * position, center[part], width[part])
        at = rows[part]
        density = stretch * torch.exp(-0.5 * ((f - mean[at, None]) / s[at, None]).square())
        yield SoftplusRule(at, f, density / density.sum(-1, keepdim=True))
        done = last


def _narrow(rows: Tensor, mean: Tensor, s: Tensor, width: float) -> SoftplusRule:
    step = float(gaussian_step(s.new_tensor(width)))
    half = math.ceil(REACH / step)
    z = REACH / half * torch.arange(-half, half + 1, dtype=s.dtype, device=s.device)
    weights = torch.softmax(-0.5 * z.square(), 0)
    return SoftplusRule(rows, mean[rows, None] + s[rows, None] * z, weights.expand(len(rows), -1))


def softplus_expectation(jet: Jet, mean: Tensor, variance: Tensor) -> Tensor:
    """Return sum_k E[F_k(f_k)] (..., N) over f_k ~ N(m_k, v_k), once differentiable in mean and variance.

    Args:
        jet: F and its first two derivatives, smooth where softplus and its logarithm are; of nodes f (r, Q) and the
            indices (r,) of their Gaussians among all, those of a datum side by side.
        mean: (..., K, N).
        variance: (..., K, N), nonnegative.

    Raises:
        ValueError: means or variances are not finite, or a variance is negative.

    Example:
        >>> import torch
        >>> def jet(f, rows):
        ...     p = f.sigmoid()
        ...     return torch.nn.functional.softplus(f), p, p * (1 - p)
        >>> zero, one = torch.zeros(1, 1).double(), torch.ones(1, 1).double()
        >>> softplus_expectation(jet, zero, one).round(decimals=6)
        tensor([0.8061], dtype=torch.float64)
    """

    def rule(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = m.new_empty(3, m.numel())
        for some in softplus_rules(m.flatten(), v.flatten()):
            size = max(_CHUNK // some.f.size(-1), 1)
            parts = zip(some.rows.split(size), some.f.split(size), some.weights.split(size), strict=True)
            for rows, f, weights in parts:
                found[:, rows] = torch.stack([(values * weights).sum(-1) for values in jet(f, rows)])
        value, slope, bend = found.view(3, *m.shape)
        return value.sum(-1), slope, 0.5 * bend

    return per_datum(rule, *marginals(mean, variance))
