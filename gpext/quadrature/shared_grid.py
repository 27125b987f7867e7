r"""E[log sum_k exp f_k] over independent Gaussians, for many data at once by one matrix product.

With independent standard Gumbel variables G_k of distribution function G(x) = exp(-e^-x), as in
:mod:`gpext.quadrature.softmax`,

    E[log sum_k e^{f_k}] = E[max_k (f_k + G_k)] - gamma = u_1 - int_{u_0}^{u_1} prod_k F_k(u) du - gamma
    F_k(u) = E[G(u - f_k)] = sum_i p_k(f_i) G(u - f_i) h

Both sums are trapezoidal, with the same step h for all data, so that G(u_j - f_i) is one Toeplitz matrix: F is a
product with it, its derivatives a product with its transpose, and no exponential is taken of a datum and a node u
together. G is bounded in the strip |Im x| < pi/2, so the sums err by exp(-pi^2 / h) and, for a Gaussian of standard
deviation s, by exp(-2 pi^2 s^2 / h^2). Narrow ones are integrated at Gauss-Hermite nodes, against which G is smooth.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpext.quadrature.rules import gauss_hermite

STEP = 0.25
REACH = 8.0  # standard deviations: beyond, 1e-15
_HERMITE = ((0.1, 10), (0.32, 28))  # largest standard deviation, and how many nodes are as good as exact up to there
_BELOW, _ABOVE = 4.0, 36.0  # of a standard Gumbel: G(-4) = e^-54, 1 - G(36) = e^-36
_MARGIN = REACH * _HERMITE[-1][0]
_WINDOW = (
    math.ceil((_BELOW + _ABOVE + 2 * _MARGIN) / STEP) + 2
)  # nodes u where F_k of a narrow Gaussian is neither 0 nor 1
_EULER = 0.57721566490153286
_CHUNK = 2**22  # numbers at a time
_IN_CACHE = 2**17


def log_sum_exp_on_grid(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return E[log sum exp] (B,) and its derivatives in the means and variances (B, K), all float64.

    Args:
        mean: (B, K).
        variance: (B, K), nonnegative. Time and memory grow with the spread of mean -+ 8 standard deviations.
    """
    centre = mean.amax(-1, keepdim=True)
    m, s = mean - centre, variance.sqrt()
    first = math.floor(float((m - REACH * s).min()) / STEP)
    last = math.ceil(float((m + REACH * s).max()) / STEP)
    f = STEP * torch.arange(first, last + 1, dtype=m.dtype, device=m.device)
    # prod F_k vanishes below where the largest mean's own factor does
    start = math.floor((float((-REACH * s).min()) - _BELOW) / STEP)
    u = STEP * torch.arange(start, last + math.ceil(_ABOVE / STEP) + 1, dtype=m.dtype, device=m.device)
    gumbel = torch.exp(-torch.exp(f.unsqueeze(-1) - u))  # (Q, U)
    size = max(_CHUNK // (m.size(-1) * (len(f) + 4 * len(u))), 1)
    parts = [_some(a, b, f, u, gumbel) for a, b in zip(m.split(size), s.split(size), strict=True)]
    value, slope, bend = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return value + centre.squeeze(-1), slope, bend


def _some(m: Tensor, s: Tensor, f: Tensor, u: Tensor, gumbel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = s >= _HERMITE[-1][0]
    safe = torch.where(wide, s, 1.0).unsqueeze(-1)
    z = (f - m.unsqueeze(-1)) / safe  # (B, K, Q)
    density = torch.exp(-0.5 * z.square()) * (STEP / math.sqrt(2 * math.pi)) / safe
    cdf = density @ gumbel  # (B, K, U)
    below = 0.0
    pieces = []
    for largest, num_nodes in _HERMITE:
        of, k = ((s >= below) & (s < largest)).nonzero(as_tuple=True)
        group = max(_IN_CACHE // (num_nodes * _WINDOW), 1)
        for rows in zip(of.split(group), k.split(group), strict=True):
            if len(rows[0]):
                window, value, by_m, by_v = _by_hermite(m[rows], s[rows], u, num_nodes)
                cdf[rows] = (u >= u[window[:, -1:]]).to(cdf).scatter(-1, window, value)
                pieces.append((rows, window, by_m, by_v))
        below = largest
    others = _products_of_others(cdf)
    quadrature = torch.full_like(u, STEP)
    quadrature[0] = quadrature[-1] = 0.5 * STEP
    value_of_max = u[-1] - (others[:, 0] * cdf[:, 0]) @ quadrature
    by_cdf = -quadrature * others  # (B, K, U)
    by_density = (by_cdf @ gumbel.mT) * density
    slope = (by_density * z).sum(-1) / safe.squeeze(-1)
    bend = 0.5 * (by_density * (z.square() - 1)).sum(-1) / safe.squeeze(-1).square()
    for rows, window, by_m, by_v in pieces:
        weight = by_cdf[rows].gather(-1, window)
        slope[rows], bend[rows] = (weight * by_m).sum(-1), (weight * by_v).sum(-1)
    return value_of_max - _EULER, slope, bend


def _by_hermite(m: Tensor, s: Tensor, u: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return where F_k is neither 0 nor 1, as indices into u (R, W), and there F_k, dF_k/dm and dF_k/dv."""
    length = min(_WINDOW, len(u))
    start = ((m - _MARGIN - _BELOW - u[0]) / STEP).floor().long().clamp(0, len(u) - length)
    window = start.unsqueeze(-1) + torch.arange(length, device=u.device)
    nodes, weights = gauss_hermite(num_nodes, m.dtype, m.device)
    f = m.unsqueeze(-1) + s.unsqueeze(-1) * nodes  # (R, H)
    rate = torch.exp(f.unsqueeze(-1) - u[window].unsqueeze(-2))  # e^{f - u} (R, H, W)
    value = torch.exp(-rate) * weights.unsqueeze(-1)
    slope = rate * value
    # derivatives in m and v of E[g(f)] are those of g in f, and half the second ones
    return window, value.sum(-2), -slope.sum(-2), 0.5 * (rate * slope - slope).sum(-2)


def _products_of_others(factors: Tensor) -> Tensor:
    """Return prod_{j != k} factors_j (B, K, U), without division."""
    ones = torch.ones_like(factors[:, :1])
    before = torch.cat([ones, factors[:, :-1].cumprod(1)], 1)
    after = torch.cat([factors[:, 1:].flip(1).cumprod(1).flip(1), ones], 1)
    return before * after
