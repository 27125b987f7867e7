r"""Integrals of the softmax over K independent Gaussians, from one-dimensional ones: no samples, no grid in R^K.

With independent standard Gumbel variables G_k, log sum_k e^{f_k} + Gumbel is distributed as max_k(f_k + G_k), whose
distribution function is a product. And 1 / S^n = int e^{-n u} e^{-S e^{-u}} du / Gamma(n) separates S = sum_k e^{f_k}:

    A_k(u) = E[exp(y_k (f_k - u) - e^{f_k - u})],   F_k = A_k at y_k = 0, the distribution function of f_k + G_k
    E[log sum_k e^{f_k}] = m_* + int F_*(u) (1 - prod_{k != *} F_k(u)) du,   for any one class *
    E[softmax_k] = int F_k'(u) prod_{j != k} F_j(u) du
    E[prod_k e^{y_k f_k} / S^n] = int prod_k A_k(u) du / Gamma(n),   n = sum_k y_k

Where the latents of a datum are not too spread, E[log sum exp] comes from matrix products
(:mod:`gpext.quadrature.shared_grid`).
Otherwise the integrals are trapezoidal sums, over the factors that :mod:`gpext.quadrature.gumbel` computes; those of
F_k at nodes close together where one of them changes (:mod:`gpext.quadrature.clustered`), as a narrow latent may lie
anywhere below a wide one.

Derivatives in m_k and v_k are those of A_k, closed forms under the same nodes:
d/dm = E[(y - x) ...], d/dv = E[((y - x)^2 - x) ...] / 2, x = e^{f - u}. Everything is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpext.quadrature.clustered import coordinate, place
from gpext.quadrature.gumbel import (
    DIGITS,
    REACH,
    cumulative,
    cumulative_nodes,
    gumbel_step,
    inner_nodes,
    kernel_peak,
    log_kernel,
)
from gpext.quadrature.per_datum import PerDatumRule, marginals, per_datum, rows_of
from gpext.quadrature.shared_grid import log_sum_exp_on_grid, span

_LONGEST_SPAN = 300.0  # for which the grid is the faster one
_CLUSTERED_STEP = math.pi / DIGITS  # of the coordinate in which nodes are clustered: a strip of half a unit
_CHUNK = 2**18  # values of the innermost integrand at a time


def expected_log_sum_exp(mean: Tensor, variance: Tensor) -> Tensor:
    """Return E[log sum_k exp(f_k)] for independent f_k ~ N(m_k, v_k), once differentiable in both.

    The absolute error is below 1e-11 (1 + max |m|) for variances from 0 to 1e4, that of the derivatives below 1e-10;
    float32 arguments give a float32 result of float64 arithmetic.

    Args:
        mean: (..., K, N).
        variance: (..., K, N), nonnegative.

    Returns:
        (..., N).

    Raises:
        ValueError: means or variances are not finite, or a variance is negative.
    """
    mean, variance = marginals(mean, variance)
    return per_datum(_log_sum_exp, mean, variance)


def log_multinomial_marginal(counts: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return log E[prod_k e^{y_k f_k} / (sum_k e^{f_k})^n], n = sum_k y_k, once differentiable in mean and variance.

    The multinomial coefficient is not included. The absolute error is below 1e-10 max(1, n), however small the
    probability is. The cost grows at most in proportion to n.

    Args:
        counts: y (..., K, N), nonnegative.
        mean: m (..., K, N) of independent Gaussians.
        variance: v (..., K, N), nonnegative.

    Returns:
        (..., N); 0 where all counts are.

    Raises:
        ValueError: as :func:`expected_log_sum_exp`.
    """
    mean, variance = marginals(mean, variance)
    mean, variance, counts = torch.broadcast_tensors(mean, variance, counts)
    return per_datum(_multinomial, mean, variance, rows_of(counts.detach()))


def expected_softmax(mean: Tensor, variance: Tensor) -> Tensor:
    """Return E[softmax(f)_k] for independent f_k ~ N(m_k, v_k), once differentiable in both.

    The absolute error is below 1e-11; for the logarithm of a tiny probability take :func:`log_multinomial_marginal` of
    one trial. Its derivative costs K times as much as its value.

    Args:
        mean: (..., K, N).
        variance: (..., K, N), nonnegative.

    Returns:
        (..., K, N), summing to one over K.

    Raises:
        ValueError: as :func:`expected_log_sum_exp`.
    """
    return _ExpectedSoftmax.apply(*marginals(mean, variance))


class _ExpectedSoftmax(torch.autograd.Function):
    """The gradient of E[log sum exp] in the means; its own derivative is that of the marginals of one trial."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor) -> Tensor:
        ctx.save_for_backward(mean, variance)
        _, probs, _ = _log_sum_exp(rows_of(mean), rows_of(variance))
        probs = probs.view(*mean.shape[:-2], mean.size(-1), mean.size(-2)).mT.clamp(min=0)
        return (probs / probs.sum(-2, keepdim=True)).to(mean.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        num_classes = grad.size(-2)
        with torch.enable_grad():
            mean, variance = (tensor.detach().double().requires_grad_() for tensor in ctx.saved_tensors)
            one_hot = torch.eye(num_classes, dtype=mean.dtype, device=mean.device)
            one_hot = one_hot.view(num_classes, *(1,) * (mean.dim() - 2), num_classes, 1)
            log_probs = log_multinomial_marginal(one_hot, mean, variance).movedim(0, -2)
            slopes = torch.autograd.grad((grad.double() * log_probs.exp()).sum(), (mean, variance))
        return slopes[0].to(grad.dtype), slopes[1].to(grad.dtype)


# ---- the outer sums ------------------------------------------------------------------------------------------------


def _in_groups(
    start: Tensor,
    step: Tensor,
    num_outer: Tensor,
    num_inner: int,
    evaluate: PerDatumRule,
    m: Tensor,
    v: Tensor,
    *extra: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Evaluate some data at a time: `evaluate` takes their nodes (B, U), their steps, and the rest.

    Args:
        start: of the outer sums (B,).
        step: likewise.
        num_outer: how many nodes each datum needs (B,).
        num_inner: how many nodes each of these takes, about.
        evaluate: the rule on a grid.
        m: means (B, K).
        v: variances.
        extra: what else `evaluate` takes of each datum.
    """
    value, slope, bend = torch.empty_like(start), torch.empty_like(m), torch.empty_like(v)
    order = num_outer.argsort()
    sizes = num_outer[order].tolist()
    done = 0
    while done < len(sizes):
        # The largest group whose longest grid fits; grids are sorted by length.
        last = done + 1
        while last < len(sizes) and (last + 1 - done) * sizes[last] * m.size(-1) * num_inner <= _CHUNK:
            last += 1
        part = order[done:last]
        nodes = torch.arange(sizes[last - 1], dtype=m.dtype, device=m.device)
        u = start[part, None] + step[part, None] * nodes  # (B, U)
        value[part], slope[part], bend[part] = evaluate(u, step[part], m[part], v[part], *(e[part] for e in extra))
        done = last
    return value, slope, bend


def _log_sum_exp(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    is_short = span(m, v) <= _LONGEST_SPAN
    if bool(is_short.all()):
        return log_sum_exp_on_grid(m, v)
    value, slope, bend = torch.empty_like(m[:, 0]), torch.empty_like(m), torch.empty_like(v)
    for rows, rule in ((is_short, log_sum_exp_on_grid), (~is_short, _log_sum_exp_over_kernels)):
        value[rows], slope[rows], bend[rows] = rule(m[rows], v[rows])
    return value, slope, bend


def _log_sum_exp_over_kernels(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate F_* (1 - prod F_k) du between where F_* and where 1 - prod F_k vanishes."""
    floor, ceiling = m - _fall(v), m + _rise(v)
    first, star = floor.max(-1)
    last = ceiling.scatter(-1, star[:, None], -math.inf).amax(-1)
    start, end = coordinate(torch.stack([first, last], -1), m, _width(v)).unbind(-1)
    step = torch.full_like(start, _CLUSTERED_STEP)
    return _in_groups(start, step, _count(start, end, step), cumulative_nodes(v), _evaluate_log_sum_exp, m, v)


def _width(v: Tensor) -> Tensor:
    """Return over what F_k changes, in the units of :mod:`gpext.quadrature.clustered`."""
    return 2 * (1 + v.sqrt())


def _evaluate_log_sum_exp(t: Tensor, step: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, stretch = place(t, m, _width(v))
    steps = step[:, None] * stretch  # (B, U)
    star = (m - _fall(v)).argmax(-1, keepdim=True)
    is_star = torch.zeros_like(m).scatter(-1, star, 1.0)[..., None] > 0  # (B, K, 1)
    cdf, by_mean, by_variance = cumulative(u, m, v)  # (B, K, U)
    log_cdf = cdf.log()
    of_star = torch.where(is_star, cdf, 0.0).sum(1)
    log_others = torch.where(is_star, 0.0, log_cdf).sum(1)
    above = -torch.expm1(log_others)
    value = m.gather(-1, star).squeeze(-1) + (steps * of_star * above).sum(-1)
    # The integrand's derivative in F_k: 1 - prod F_j for the star, -F_* prod_{j != *, k} F_j for the others.
    weight = torch.where(cdf > 0, (log_others[:, None] - log_cdf).exp(), 0.0) * -of_star[:, None]
    weight = steps[:, None] * torch.where(is_star, above[:, None], weight)
    slope = torch.where(is_star[..., 0], 1.0, 0.0) + (weight * by_mean).sum(-1)
    return value, slope, (weight * by_variance).sum(-1)


def _fall(v: Tensor) -> Tensor:
    """Return how far below its mean f_k + G_k is with probability e^-digits."""
    return REACH * v.sqrt() + math.log(DIGITS)


def _rise(v: Tensor) -> Tensor:
    """Return how far above its mean: where the better of a^2 / (2v) + (t - a) over a falls to the digits."""
    return torch.where(v <= 2 * DIGITS, DIGITS + 0.5 * v, REACH * v.sqrt())


def _multinomial(m: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate prod A_k du about its peak, where Laplace's approximation of every A_k says that it vanishes."""
    trials = _with_a_trial(y)
    n, largest = trials.sum(-1), float(trials.sum(-1).max()) if y.numel() else 1.0

    def approximation(u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithm of the integrand, about, and the derivative of its profile."""
        t, x = kernel_peak(trials, m - u[:, None], v)
        log_factor = trials * t - x - 0.5 * v * (trials - x).square() - 0.5 * torch.log1p(x * v)
        return log_factor.sum(-1), x.sum(-1) - n

    low = (m - v * n[:, None]).amax(-1) - n.log()
    high = (m + v * trials).amax(-1) + math.log(m.size(-1)) - n.log()
    for _ in range(60):
        middle = 0.5 * (low + high)
        rising = approximation(middle)[1] > 0
        low, high = torch.where(rising, middle, low), torch.where(rising, high, middle)
    peak = 0.5 * (low + high)
    allowed = approximation(peak)[0] - DIGITS - 2 * m.size(-1)  # the approximation is within 2 of each log A_k
    start, end = (_edge(approximation, peak, sign, allowed) for sign in (-1, 1))
    step = _outer_step(n, v)
    return _in_groups(start, step, _count(start, end, step), inner_nodes(largest, v), _evaluate_multinomial, m, v, y)


def _evaluate_multinomial(u: Tensor, step: Tensor, m: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    no_trial = y.sum(-1) == 0
    y = _with_a_trial(y)
    n = y.sum(-1)
    log_factor, slope, bend = log_kernel(y, float(n.max()), u, m, v)  # (B, K, U)
    exponent = log_factor.sum(1)
    value = torch.logsumexp(exponent, -1) + step.log() - torch.lgamma(n)
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


def _edge(approximation: Callable[[Tensor], tuple[Tensor, Tensor]], peak: Tensor, sign: int, allowed: Tensor) -> Tensor:
    """Return where, to one side of the peak, the logarithm of the integrand has fallen to what is allowed."""
    inner, outer = torch.zeros_like(peak), torch.ones_like(peak)
    while True:
        inside = approximation(peak + sign * outer)[0] > allowed
        if not bool(inside.any()):
            break
        inner, outer = torch.where(inside, outer, inner), torch.where(inside, 2 * outer, outer)
    for _ in range(8):
        middle = 0.5 * (inner + outer)
        inside = approximation(peak + sign * middle)[0] > allowed
        inner, outer = torch.where(inside, middle, inner), torch.where(inside, outer, middle)
    return peak + sign * outer


def _outer_step(n: Tensor, v: Tensor) -> Tensor:
    """Return the step in u (B,): the strip may be that of the Gumbel variables, or that of the Gaussians."""
    return torch.maximum(gumbel_step(n), math.pi * math.sqrt(2 / DIGITS) * (1 / v).sum(-1).rsqrt())


def _count(start: Tensor, end: Tensor, step: Tensor) -> Tensor:
    return ((end - start) / step).ceil().clamp(min=0).long() + 1
