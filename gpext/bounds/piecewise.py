r"""Piecewise quadratic upper bounds on log(1 + e^x) [Marlin, Khan & Murphy 2011; KMM12 Sec. 4].

    log(1 + e^x) <= g(x) = max(x, 0) + G + sum_p q_p(x) 1(t_p < x < t_{p+1}),    q_p(x) = a_p x^2 + b_p x + c_p

with pieces on a bounded interval only, so that nothing cancels however far out the Gaussian lies. For x ~ N(m, v),
s^2 = v and z_p = (t_p - m) / s, a piece contributes, written about m,

    q(m) P + q'(m) E_1 + a E_2,     P = Phi(z_{p+1}) - Phi(z_p),     E_k = E[(x - m)^k 1(t_p < x < t_{p+1})]
    E_1 = s (phi(z_p) - phi(z_{p+1})),     E_2 = v (P + z_p phi(z_p) - z_{p+1} phi(z_{p+1}))

and with the jumps J_p of g and J'_p of g' at the knots the derivatives of E[g] are

    d/dm = E[g'] + sum_p J_p N(t_p | m, v)
    d/dv = 1/2 d^2/dm^2 = 1/2 (E[g''] + sum_p (J'_p + J_p z_p / s) N(t_p | m, v)).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpext.bounds.bound import SoftplusBound
from gpext.bounds.minimax_pieces import PIECES
from gpext.quadrature import gauss_legendre

_WIDE = 4.0  # standard deviation from which Gauss-Legendre on each piece is exact: the widest piece is 3 long
_NODES = 8
_CHUNK = 4096  # data at a time


class PiecewiseQuadratic(SoftplusBound):
    """The minimax bound of R pieces: its largest gap is as small as R quadratics allow, and each piece attains it.

    The largest gap between bound and log(1 + e^x), hence between the two expectations, in nats:

        R       3        5        10       20
        gap     5.1e-2   9.5e-3   1.3e-3   1.4e-4

    The two outer pieces are linear, and the bound minus x / 2 is even. It jumps at its knots other than zero: there it
    touches log(1 + e^x) from the outer side and is the whole gap above it on the inner one. The expectation is smooth
    for v > 0, but a few standard deviations around a knot its derivative in v carries up to 0.12 gap / v of the jump.

    Args:
        num_pieces: R, one of 3, 5, 10, 20. The coefficients come from scripts/piecewise_quadratic.py.

    Raises:
        ValueError: no bound with so many pieces is stored.

    Example:
        >>> import torch
        >>> from gpext.bounds import Quadrature
        >>> y, m, v = torch.ones(1), torch.zeros(1), torch.ones(1)
        >>> bool(Quadrature()(y, m, v) - PiecewiseQuadratic(20)(y, m, v) < 1e-3)
        True
    """

    def __init__(self, num_pieces: int = 20) -> None:
        if num_pieces not in PIECES:
            raise ValueError(f"num_pieces must be one of {', '.join(map(str, PIECES))}; got {num_pieces}.")
        self.num_pieces = num_pieces

    def __repr__(self) -> str:
        return f"PiecewiseQuadratic({self.num_pieces})"

    @property
    def largest_gap(self) -> float:
        """The largest gap between the bound and log(1 + e^x), and between their expectations."""
        return PIECES[self.num_pieces][0]

    def expected_softplus(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[g(x)], elementwise, once differentiable; variance 0 gives g(mean)."""
        mean, variance = torch.broadcast_tensors(mean, variance)
        return _ExpectedPieces.apply(mean, variance, self.num_pieces)


class _Line(NamedTuple):
    """The pieces on the whole line: g = max(x, 0) + G + sum_p q_p."""

    gap: float  # G
    knots: Tensor  # t, (P + 1,)
    quadratics: Tensor  # a, b, c: (3, P)
    jumps: Tensor  # of g, (P + 1,)
    slope_jumps: Tensor  # of g', (P + 1,)


def _line(num_pieces: int, mean: Tensor) -> _Line:
    gap, pieces = PIECES[num_pieces]
    ends, a, b, c = torch.tensor(pieces, dtype=torch.float64).T
    right = torch.stack([a, b, c - gap])
    left = torch.stack([a, -b, c - gap]).flip(-1)
    quadratics = torch.cat([left, right], -1)
    knots = torch.cat([-ends.flip(0), ends.new_zeros(1), ends])
    a, b, c = torch.nn.functional.pad(quadratics, (1, 1)).diff()
    jumps = (a * knots + b) * knots + c
    slope_jumps = 2 * a * knots + b + (knots == 0)
    return _Line(gap, *(table.to(mean) for table in (knots, quadratics, jumps, slope_jumps)))


class _ExpectedPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, num_pieces: int) -> Tensor:
        line = _line(num_pieces, mean)
        chunks = zip(mean.reshape(-1).split(_CHUNK), variance.reshape(-1).split(_CHUNK), strict=True)
        moments = torch.cat([_moments(m, v, line) for m, v in chunks], -1)
        value, slope, bend = moments.reshape(3, *mean.shape)
        ctx.save_for_backward(slope, bend)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        slope, bend = ctx.saved_tensors
        return grad * slope, 0.5 * grad * bend, None


def _moments(mean: Tensor, variance: Tensor, line: _Line) -> Tensor:
    """Return E[g] and its first two derivatives in m, (3, n)."""
    wide = variance > _WIDE**2
    moments = mean.new_empty(3, mean.numel())
    moments[:, ~wide] = _in_closed_form(mean[~wide], variance[~wide], line)
    moments[:, wide] = _by_nodes(mean[wide], variance[wide], line)
    return moments


def _in_closed_form(mean: Tensor, variance: Tensor, line: _Line) -> Tensor:
    s = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
    z = (line.knots.unsqueeze(-1) - mean) / s  # (P + 1, n)
    phi = _phi(z)
    # P, from the tails on the nearer side of m: no digits are lost where it is small.
    tail = _upper_tail(z.abs())
    inner, outer = tail[:-1], tail[1:]
    below, above = z[1:] < 0, z[:-1] > 0
    mass = torch.where(above, inner - outer, torch.where(below, outer - inner, 1 - inner - outer))
    first = -s * phi.diff(dim=0)
    second = s.square() * (mass - (z * phi).diff(dim=0))

    a, b, c = line.quadratics.unsqueeze(-1)  # each (P, 1)
    at_mean, slope_at_mean = (a * mean + b) * mean + c, 2 * a * mean + b
    value, slope = _expected_ramp(mean, s)
    value = value + line.gap + (at_mean * mass + slope_at_mean * first + a * second).sum(0)
    slope = slope + (slope_at_mean * mass + 2 * a * first).sum(0) + line.jumps @ phi / s
    bend = (2 * a * mass).sum(0) + line.slope_jumps @ phi / s + line.jumps @ (z * phi) / s / s
    return torch.stack([value, slope, bend])


def _by_nodes(mean: Tensor, variance: Tensor, line: _Line) -> Tensor:
    """Return the same by Gauss-Legendre on each piece: the mass of a piece is a difference that loses s / (t' - t)."""
    unit, weights = gauss_legendre(_NODES, mean.dtype, mean.device)
    width = line.knots.diff()
    t = line.knots[:-1] + width * unit.unsqueeze(-1)  # (Q, P)
    a, b, c = line.quadratics
    weights = (((a * t + b) * t + c) * width * weights.unsqueeze(-1)).flatten()

    s = variance.sqrt()
    z = (t.reshape(-1, 1) - mean) / s
    density = _phi(z) / s
    value, slope = _expected_ramp(mean, s)
    return torch.stack(
        [
            value + line.gap + weights @ density,
            slope + weights @ (z * density) / s,
            (_phi(mean / s) + weights @ ((z.square() - 1) * density) / s) / s,
        ]
    )


def _expected_ramp(mean: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Return E[max(x, 0)] and its derivative in m, P(x > 0)."""
    z = mean / s
    distance = z.abs()
    excess = s * (_phi(z) - distance * _upper_tail(distance))
    return mean.clamp_min(0) + excess, _upper_tail(-z)


def _phi(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)


def _upper_tail(z: Tensor) -> Tensor:
    return 0.5 * torch.erfc(z / math.sqrt(2))
