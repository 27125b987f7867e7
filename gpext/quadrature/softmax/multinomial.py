r"""The multinomial distribution under the softmax of K independent Gaussians, from one-dimensional integrals.

1 / S^n = int e^{-n u} e^{-S e^{-u}} du / Gamma(n) separates S = sum_k e^{f_k}, so that with n = sum_k y_k

    E[n! / prod_k y_k! prod_k e^{y_k f_k} / S^n] = n int prod_k A_k(u) du
    A_k(u) = E[exp(y_k (f_k - u) - e^{f_k - u})] / y_k!

The outer integral is a trapezoidal sum about the peak of its integrand, whose width and steps both follow from the
curvatures of the factors: neither giant counts nor wide Gaussians take more nodes. Where a latent is narrow and has no
count, its factor is a step anywhere in the range of wide ones, about which the nodes are clustered. The factors are
those of :mod:`gpext.quadrature.softmax.gumbel`.

Derivatives in m_k and v_k are those of A_k, closed forms under the same nodes:
d/dm = E[(y - x) ...], d/dv = E[((y - x)^2 - x) ...] / 2, x = e^{f - u}.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gpext.quadrature.softmax.clustered import coordinate, place
from gpext.quadrature.softmax.gumbel import (
    DIGITS,
    HEIGHTS,
    KERNEL_NODES,
    kernel_excess,
    kernel_peak,
    log_kernel,
    width_of_change,
)
from gpext.quadrature.softmax.per_datum import PerDatumRule, count_nodes, in_groups, marginals, per_datum, rows_of
from gpext.special import log_poisson

_CLUSTERED_STEP = math.pi / DIGITS  # of the coordinate in which nodes are clustered: a strip of half a unit
_LONGEST_SUM = 500.0  # in steps, after which nodes are clustered
_MOST_STEPS, _NEAR = 100, 0.01  # of Newton's method for the peak, whose slope is small in units of its width


def log_multinomial_density(counts: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return log E[n! / prod_k y_k! prod_k softmax(f)_k^y_k], n = sum_k y_k, once differentiable in mean and variance.

    The absolute error is below 1e-9 for counts up to 1e12 and means up to a thousand, however small the probability is,
    and 1e-10 for counts up to 1e6. Neither counts nor variances change the cost.

    Args:
        counts: y (..., K, N), nonnegative.
        mean: m (..., K, N) of independent Gaussians.
        variance: v (..., K, N), nonnegative.

    Returns:
        (..., N); 0 where all counts are.

    Raises:
        ValueError: as :func:`expected_log_sum_exp`.

    Example:
        >>> import torch
        >>> counts = torch.tensor([[1.0], [0.0]]).double()
        >>> log_multinomial_density(counts, torch.zeros(2, 1).double(), torch.ones(2, 1).double()).exp()
        tensor([0.5000], dtype=torch.float64)
    """
    mean, variance = marginals(mean, variance)
    mean, variance, counts = torch.broadcast_tensors(mean, variance, counts)
    return per_datum(_multinomial, mean, variance, rows_of(counts.detach()))


def log_multinomial_marginal(counts: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return log E[prod_k e^{y_k f_k} / (sum_k e^{f_k})^n], n = sum_k y_k: without the multinomial coefficient.

    The rounding of the coefficient's logarithm comes on top of :func:`log_multinomial_density`, which see.

    Example:
        >>> import torch
        >>> counts = torch.tensor([[1.0], [0.0]]).double()
        >>> zero, one = torch.zeros(2, 1).double(), torch.ones(2, 1).double()
        >>> log_multinomial_marginal(counts, zero, one).exp().round(decimals=6)  # either of two classes
        tensor([0.5000], dtype=torch.float64)
    """
    y = counts.detach().double()
    log_coefficient = torch.lgamma(y.sum(-2) + 1) - torch.lgamma(y + 1).sum(-2)
    density = log_multinomial_density(counts, mean, variance)
    return (density.double() - log_coefficient).to(density.dtype)


def _multinomial(m: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate prod A_k du about its peak, up to where Laplace's approximation of every A_k vanishes."""
    trials = _with_a_trial(y)
    n = trials.sum(-1)

    def approximation(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logarithm of the integrand, about, and the negative derivatives of its profile."""
        d = m - u[:, None]
        t, x = kernel_peak(trials, d, v)
        excess = kernel_excess(trials, d, v, t, x)
        log_factor = log_poisson(trials, t) - 0.5 * v * excess.square() - 0.5 * torch.log1p(x * v)
        return log_factor.sum(-1), excess.sum(-1), (x / (1 + v * x)).sum(-1)

    low = (m - v * n[:, None]).amax(-1) - n.log()
    high = (m + v * trials).amax(-1) + math.log(m.size(-1)) - n.log()
    peak = 0.5 * (low + high)
    for _ in range(_MOST_STEPS):
        _, slope, bend = approximation(peak)
        if bool((slope.abs() <= _NEAR * bend.sqrt()).all()):
            break
        low, high = torch.where(slope < 0, peak, low), torch.where(slope > 0, peak, high)
        newton = peak - slope / bend
        peak = torch.where((newton > low) & (newton < high), newton, 0.5 * (low + high))
    value, _, bend = approximation(peak)
    allowed = value - DIGITS - 2 * m.size(-1)  # the approximation is within 2 of each log A_k
    start, end = (_edge(approximation, peak, sign, allowed, bend.rsqrt().clamp(max=1e30)) for sign in (-1, 1))
    step = _outer_step(torch.maximum(trials, kernel_peak(trials, m - peak[:, None], v)[1]), v)
    is_short = (end - start) <= _LONGEST_SUM * step
    found = torch.empty_like(n), torch.empty_like(m), torch.empty_like(v)
    if bool(is_short.any()):
        _fill(found, is_short, start, end, step, _evaluate_multinomial, m, v, y)
    if not bool(is_short.all()):
        # All classes with counts are wide, so that others may be narrow anywhere.
        center = m - torch.where(trials > 0, trials, 1.0).log()
        ends = coordinate(torch.stack([start, end], -1), center, width_of_change(v))
        step = torch.full_like(start, _CLUSTERED_STEP)
        _fill(found, ~is_short, ends[:, 0], ends[:, 1], step, _evaluate_clustered_multinomial, m, v, y)
    return found


def _fill(
    found: tuple[Tensor, Tensor, Tensor],
    rows: Tensor,
    start: Tensor,
    end: Tensor,
    step: Tensor,
    evaluate: PerDatumRule,
    *of_each: Tensor,
) -> None:
    """Write what a rule finds for some of the data into `found`."""
    start, end, step, *rest = (t[rows] for t in (start, end, step, *of_each))
    parts = in_groups(start, step, count_nodes(start, end, step), KERNEL_NODES, evaluate, *rest)
    for whole, part in zip(found, parts, strict=True):
        whole[rows] = part


def _evaluate_clustered_multinomial(
    t: Tensor, step: Tensor, m: Tensor, v: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    trials = _with_a_trial(y)
    u, stretch = place(t, m - torch.where(trials > 0, trials, 1.0).log(), width_of_change(v))
    return _evaluate_multinomial(u, step[:, None] * stretch, m, v, y)


def _evaluate_multinomial(u: Tensor, step: Tensor, m: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    no_trial = y.sum(-1) == 0
    y = _with_a_trial(y)
    log_factor, slope, bend = log_kernel(y, u, m, v)  # (B, K, U)
    exponent = log_factor.sum(1) + (step if step.dim() > 1 else step[:, None]).log()
    value = torch.logsumexp(exponent, -1) + y.sum(-1).log()
    weight = exponent.softmax(-1)[:, None]
    slope, bend = (weight * slope).sum(-1), (weight * bend).sum(-1)
    return (
        torch.where(no_trial, 0.0, value),
        torch.where(no_trial[:, None], 0.0, slope),
        torch.where(no_trial[:, None], 0.0, bend),
    )


def _with_a_trial(y: Tensor) -> Tensor:
    """Return the counts, where there is none with a stand-in that keeps the integrals finite."""
    first = torch.zeros_like(y)
    first[:, 0] = 1.0
    return torch.where(y.sum(-1, keepdim=True) == 0, first, y)


def _edge(
    approximation: Callable[[Tensor], tuple[Tensor, ...]], peak: Tensor, sign: int, allowed: Tensor, width: Tensor
) -> Tensor:
    """Return where, to one side of the peak, the logarithm of the integrand has fallen to what is allowed."""
    inner, outer = torch.zeros_like(peak), width
    while True:
        inside = approximation(peak + sign * outer)[0] > allowed
        if not bool(inside.any()):
            break
        inner, outer = torch.where(inside, outer, inner), torch.where(inside, 2 * outer, outer)
    for _ in range(4):
        middle = 0.5 * (inner + outer)
        inside = approximation(peak + sign * middle)[0] > allowed
        inner, outer = torch.where(inside, middle, inner), torch.where(inside, outer, middle)
    return peak + sign * outer


def _outer_step(weight: Tensor, v: Tensor) -> Tensor:
    """Return the step in u (B,) that every A_k allows, by the strip of its Gaussian or by that of its Gumbel variable.

    At the height a it grows by a^2 / (2 v), or below pi / 2 by -w log cos a, whichever is less, where w, (B, K), is the
    larger of y and of e^{f - u} at the peak; the width of the integrand is at least that of the sum of these.
    """
    by_gaussian = (1 / v).sum(-1).rsqrt()
    total = torch.minimum(1 / v, weight).sum(-1)
    step = 0.99 * total.rsqrt() * (total > 400)
    step = math.pi * math.sqrt(2 / DIGITS) * torch.maximum(by_gaussian, step)
    for a in HEIGHTS:
        growth = torch.minimum(0.5 * a**2 / v, -weight * math.log(math.cos(a))).sum(-1)
        step = torch.maximum(step, 2 * math.pi * a / (DIGITS + growth))
    return step
