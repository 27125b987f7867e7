r"""Expectations of exp(y t - e^t) / y! over t ~ N(d, v), the factors that the integrals of the softmax are made of.

With d = m - u these are A_k(u) of :mod:`gpext.quadrature.softmax.multinomial`; at y = 0, F_k(u) of
:mod:`gpext.quadrature.softmax.softmax`, the distribution function of a N(m, v) variable plus an independent standard
Gumbel one. A narrow Gaussian is integrated over itself, a wide one over the Gumbel density, by its Gauss rule of 32
nodes: F_k always, A_k where that has a small relative error; else, as of a narrow one, about the peak of the integrand.
So no count takes more than some hundred nodes.

Other nodes are equally spaced: where the integrand is analytic in the strip |Im| < a and grows by e^b towards its
border, a step h errs by exp(b - 2 pi a / h) [Trefethen & Weideman 2014, Thm. 5.1]. For exp(w t - e^t), a < pi/2 and
b = -w log cos a; for a Gaussian of standard deviation s, b = a^2 / (2 s^2).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gpext.special import hazard, log_mills_ratio, log_poisson

DIGITS = 34.0  # -log of the error of every sum
REACH = math.sqrt(2 * DIGITS)  # a Gaussian has fallen to it, in standard deviations
_WIDE = 2.0  # standard deviation above which the Gumbel variable is integrated instead of the Gaussian one
HEIGHTS = (0.4, 0.55, 0.7, 0.85, 1.0, 1.15, 1.3, 1.4, 1.48)
_TILT = 3.0  # c, up to which the Gauss rule resolves e^{-c g} beside the Gumbel density
_GAUSS_NODES = 32  # of the rule for the Gumbel density: 2e-13 at _WIDE, rounding from 2.5 on
KERNEL_NODES = 140  # at most, for a value of A_k
_SOLVER_STEPS = 7  # of Newton's method for the peak; the largest number that any argument takes


def gumbel_step(weight: Tensor) -> Tensor:
    """Return the step that resolves exp(w t - e^t), w = weight, and what is narrower by factors e^{-c t^2 / 2}, w + c.

    At the height a its integral grows by (cos a)^-w, and every a gives a valid step: 2 pi a / h + w log cos a = digits.
    """
    step = 0.99 * math.pi * math.sqrt(2 / DIGITS) * weight.rsqrt() * (weight > 400)
    for a in HEIGHTS:
        step = torch.maximum(step, 2 * math.pi * a / (DIGITS - weight * math.log(math.cos(a))))
    return step


def gaussian_step(s: Tensor) -> Tensor:
    """Return the step in z = (t - d) / s that resolves what is bounded in |Im t| < pi / 2 beside e^{-z^2 / 2}."""
    step = torch.where(s < 0.1, math.pi * math.sqrt(2 / DIGITS), 0.0)  # the best height is sqrt(2 digits) s
    for a in HEIGHTS:
        step = torch.maximum(step, 2 * math.pi * a * s / (DIGITS * s.square() + 0.5 * a**2).clamp(min=0.1))
    return step


def width_of_change(v: Tensor) -> Tensor:
    """Return over what F_k and A_k change, in the units of :mod:`gpext.quadrature.softmax.clustered`."""
    return 2 * (1 + v.sqrt())


# ---- the distribution functions F_k, to an absolute error -----------------------------------------------------------


def cumulative(u: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return F_k(u) and its derivatives in m and v, (B, K, U) each, from u (B, U), m and v (B, K)."""
    return _by_width(m[..., None] - u[:, None], v, (v,), _cumulative_over_gaussian, _cumulative_over_gumbel)


def cumulative_nodes(v: Tensor) -> int:
    """Return about how many nodes a value of F_k takes, for the size of a chunk."""
    narrow = v[v <= _WIDE**2]
    return max(int(25 + 57 * float(narrow.max().sqrt())), _GAUSS_NODES) if narrow.numel() else _GAUSS_NODES


def _cumulative_over_gaussian(d: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate exp(-x) and its derivatives over f = m + s z; x = e^{d + s z} is a product of exponentials."""
    s = v.sqrt()
    step = gaussian_step(s)
    num_nodes = math.ceil(2 * REACH / float(step.min())) + 1 if d.numel() else 1
    z = torch.linspace(-REACH, REACH, num_nodes, dtype=d.dtype, device=d.device)
    weight = torch.softmax(-0.5 * z.square(), 0)
    by_node, by_place = torch.exp(s * z), torch.exp(d.clamp(max=100.0))  # exp(-e^80) is 0
    kernel = torch.exp(-by_node[..., None] * by_place[..., None, :])  # (R, Q, U)
    moments = torch.stack([weight.expand_as(by_node), weight * by_node, weight * by_node.square()], -2) @ kernel
    first, second = by_place * moments[..., 1, :], by_place.square() * moments[..., 2, :]
    return moments[..., 0, :], -first, 0.5 * (second - first)


def _cumulative_over_gumbel(d: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate Phi(z), z = (u - m - g) / s, over the Gumbel variable g by the Gauss rule of its density."""
    g, weight = gumbel_rule(d.device)
    z = -(d[..., None] + g) / v.sqrt()[..., None]
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    by_variance = -0.5 * (density * z) @ weight / v
    return torch.special.ndtr(z) @ weight, -(density @ weight) / v.sqrt(), by_variance


@functools.cache
def gumbel_rule(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return nodes and weights (Q,) for integrals over the standard Gumbel density, from its moments on a fine grid.

    The recurrence of the orthonormal polynomials comes from Stieltjes' procedure; nodes and weights are the eigenvalues
    of its Jacobi matrix and the squares of its eigenvectors' first elements [Golub & Welsch 1969].
    """
    step = 0.02
    g = np.arange(-4.4, 60.0, step)
    density = np.exp(-g - np.exp(-g))
    density /= density.sum()
    diagonal, beside = np.zeros(_GAUSS_NODES), np.zeros(_GAUSS_NODES)
    before, now = np.zeros_like(g), np.ones_like(g)
    for k in range(_GAUSS_NODES):
        diagonal[k] = (density * g * now**2).sum()
        after = (g - diagonal[k]) * now - beside[k - 1] * before
        beside[k] = math.sqrt((density * after**2).sum())
        before, now = now, after / beside[k]
    from scipy.linalg import eigh_tridiagonal  # imported late, as SciPy is everywhere: it takes half a second

    nodes, vectors = eigh_tridiagonal(diagonal, beside[:-1])
    as_tensor = functools.partial(torch.as_tensor, dtype=torch.float64, device=device)
    return as_tensor(nodes), as_tensor(vectors[0] ** 2)


def _by_width(
    d: Tensor, v: Tensor, parameters: tuple[Tensor, ...], narrow: Callable, wide: Callable
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply to each row of d (B, K, U) the rule for its width; parameters (B, K) go along as (rows, 1)."""
    is_wide = v > _WIDE**2
    result = torch.empty(3, *d.shape, dtype=d.dtype, device=d.device)
    for rows, rule in ((~is_wide, narrow), (is_wide, wide)):
        if bool(rows.any()):
            result[:, rows] = torch.stack(rule(d[rows], *(parameter[rows][:, None] for parameter in parameters)))
    return result[0], result[1], result[2]


# ---- the kernels A_k, to a relative error ------------------------------------------------------------------------


def log_kernel(y: Tensor, u: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log A_k(u) and its derivatives in m and v, (B, K, U) each, from u (B, U) and (B, K) of the others."""
    d, y, v = m[..., None] - u[:, None], y[..., None], v[..., None]
    by_gumbel = (v > _WIDE**2) & (d + (y - _TILT) * v <= 0)
    result = torch.empty(3, *d.shape, dtype=d.dtype, device=d.device)
    for where, rule in ((by_gumbel, _log_kernel_over_gumbel), (~by_gumbel, _log_kernel_about_peak)):
        if bool(where.any()):
            arguments = (d[where], y.expand(d.shape)[where], v.expand(d.shape)[where])
            result[:, where] = torch.stack(rule(*arguments))
    return result[0], result[1], result[2]


def kernel_excess(y: Tensor, d: Tensor, v: Tensor, t: Tensor, x: Tensor) -> Tensor:
    """Return y - e^t at the peak t, where that is (t - d) / v, the one or the other as rounding is less."""
    by_prior = v * x > 1
    return torch.where(by_prior, (t - d) / torch.where(by_prior, v, 1.0), y - x)


def _log_kernel_about_peak(d: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate over f = m + s z about the peak of the exponent y t - x - z^2 / 2, x = e^t, t = d + s z; all (R,).

    At r = t - t_peak = s w the exponent has fallen by x_peak (e^r - 1 - r) + w^2 / 2.
    """
    s = v.sqrt()
    t, x = kernel_peak(y, d, v)
    # e^r - 1 - r is at least r^2 / 2 to the right of the peak and r^2 / (2 + 2 |r| / 3) to the left.
    left = ((DIGITS / 3 + (DIGITS**2 / 9 + 2 * DIGITS * x).sqrt()) / (x * s)).clamp(max=REACH)
    right = (REACH / (x.sqrt() * s)).clamp(max=REACH)
    width = (1 + x * v).rsqrt()  # of the peak, in w
    narrow = math.pi * math.sqrt(2 / DIGITS) * width
    step = torch.where(s * width < 0.05, 0.99 * narrow, gumbel_step((s * width).clamp(min=0.05) ** -2) / s)
    num_steps = int(((left + right) / step).max().ceil())
    step = (left + right) / num_steps

    position = torch.arange(num_steps + 1, dtype=d.dtype, device=d.device)
    w = step[..., None] * position - left[..., None]  # (R, Q)
    r = s[..., None] * w
    growth = torch.expm1(r)
    weight = torch.addcmul(-0.5 * w.square(), x[..., None], r - growth).exp_()
    total = weight.sum(-1)
    # d log A / dm = E[y - x],   d log A / dv = E[(y - x)^2 - x] / 2 under the weights; where these would be small
    # differences of large numbers, E[(t - d) / v] and E[((t - d) / v)^2 - 1 / v] / 2.
    by_prior, peak = v * x > 1, kernel_excess(y, d, v, t, x)
    safe = torch.where(by_prior, v, 1.0)
    excess = peak[..., None] + torch.where(by_prior[..., None], r / safe[..., None], -x[..., None] * growth)
    weight *= excess
    slope = weight.sum(-1) / total
    square = (weight * excess).sum(-1) / total
    value = log_poisson(y, t) - 0.5 * v * peak.square() + (total * step).log() - 0.5 * math.log(2 * math.pi)
    return value, slope, 0.5 * (square - torch.where(by_prior, 1 / safe, y - slope))


def _log_kernel_over_gumbel(d: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate over the Gumbel variable: y! A = e^{y d + y^2 v / 2} E[Phi(x)], x = -(d + g) / s - y s; all (R,).

    Where x < 0, Phi(x) = e^{-x^2 / 2} erfcx(-x / sqrt 2) / 2 takes up the large exponents. Where x = -c s at g = 0,
    Phi(x) is about e^{-c g}: for c up to _TILT the relative error is that of rounding.
    """
    g, weight = gumbel_rule(d.device)
    log_weight = weight.log()
    s = v.sqrt()
    g, log_weight = g.unsqueeze(-1), log_weight.unsqueeze(-1)  # (Q, 1)
    x = -(d + g) / s - y * s
    low, high = x.clamp(max=0), x.clamp(min=0)
    by_mills = -0.5 * (d + g).square() / v - y * g + log_mills_ratio(-low)
    exponent = torch.where(x < 0, by_mills, y * d + 0.5 * y.square() * v + torch.special.log_ndtr(high))
    exponent = exponent + log_weight
    ratio = hazard(-x)  # of the normal density to Phi
    value = torch.logsumexp(exponent, 0) - torch.lgamma(y + 1)
    weight = exponent.softmax(0)
    slope = y - (weight * ratio).sum(0) / s
    bend = 0.5 * y.square() - (weight * ratio * (y / s + 0.5 * x / v)).sum(0)
    return value, slope, bend


def kernel_peak(y: Tensor, d: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return t and e^t at the peak of y t - e^t - (t - d)^2 / (2v): with w = v e^t, w + log w = log v + d + v y."""
    log_v = v.clamp(min=1e-30).log()
    right = log_v + d + v * y
    log_w = torch.where(right > 1, right.clamp(min=1).log(), right)  # right of the root: Newton falls to it
    for _ in range(_SOLVER_STEPS):
        w = log_w.exp()
        log_w = log_w - (w + log_w - right) / (w + 1)
    t = (log_w - log_v).clamp(max=300.0)
    return t, t.exp()
