r"""Integrals of the softmax over K independent Gaussians, from one-dimensional ones: no samples, no grid in R^K.

With independent standard Gumbel variables G_k, log sum_k e^{f_k} + Gumbel is distributed as max_k(f_k + G_k), whose
distribution function is a product. And 1 / S^n = int e^{-n u} e^{-S e^{-u}} du / Gamma(n) separates S = sum_k e^{f_k}:

    A_k(u) = E[exp(y_k (f_k - u) - e^{f_k - u})],   F_k = A_k at y_k = 0, the distribution function of f_k + G_k
    E[log sum_k e^{f_k}] = m_* + int F_*(u) (1 - prod_{k != *} F_k(u)) du,   for any one class *
    E[softmax_k] = int F_k'(u) prod_{j != k} F_j(u) du
    E[prod_k e^{y_k f_k} / S^n] = int prod_k A_k(u) du / Gamma(n),   n = sum_k y_k

Both integrals are trapezoidal sums. Where the integrand is analytic in the strip |Im| < a and grows by e^b towards its
border, a step h errs by exp(b - 2 pi a / h) [Trefethen & Weideman 2014, Thm. 5.1]. For exp(w t - e^t), a < pi/2 and b =
-w log cos a; for a Gaussian of standard deviation s, b = a^2 / (2 s^2).

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

from gpext.quadrature.adaptive import require

_DIGITS = 34.0  # -log of the error of every sum
_REACH = math.sqrt(2 * _DIGITS)  # a Gaussian has fallen to it, in standard deviations
_WIDE = 2.0  # standard deviation above which the Gumbel variable is integrated instead of the Gaussian one
_CHUNK = 2**18  # values of the innermost integrand at a time
_HEIGHTS = (0.4, 0.55, 0.7, 0.85, 1.0, 1.15, 1.3, 1.4, 1.48)
_SOLVER_STEPS = 7  # of Newton's method for the peak; the largest number that any argument takes

# mean, variance (B, K) -> values (B,), derivatives in mean and variance (B, K)
_Chunk = Callable[..., tuple[Tensor, Tensor, Tensor]]


def expected_log_sum_exp(mean: Tensor, variance: Tensor) -> Tensor:
    """Return E[log sum_k exp(f_k)] for independent f_k ~ N(m_k, v_k), once differentiable in both.

    The absolute error is below 1e-11 (1 + max |m|) for variances from 0 to 1e4; float32 arguments give a float32
    result of float64 arithmetic.

    Args:
        mean: (..., K, N).
        variance: (..., K, N), nonnegative.

    Returns:
        (..., N).

    Raises:
        ValueError: means or variances are not finite, or a variance is negative.
    """
    mean, variance = _marginals(mean, variance)
    return _PerDatum.apply(mean, variance, _log_sum_exp_plan, ())


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
    mean, variance = _marginals(mean, variance)
    mean, variance, counts = torch.broadcast_tensors(mean, variance, counts)
    return _PerDatum.apply(mean, variance, _multinomial_plan, (_rows(counts.detach()),))


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
    return _ExpectedSoftmax.apply(*_marginals(mean, variance))


def _marginals(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    mean, variance = torch.broadcast_tensors(mean, variance)
    require(mean, mean.isfinite(), "mean must be finite")
    require(variance, variance.isfinite() & (variance >= 0), "variance must be finite and not negative")
    return mean, variance


class _PerDatum(torch.autograd.Function):
    """A scalar for each datum, with its derivatives from the same nodes, some data at a time.

    `plan(mean, variance, *extra)` lays out the outer sums: start and step (B,), how many nodes each datum needs (B,),
    how many inner nodes (an int), and the function that evaluates some data on a grid.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, plan: Callable, extra: tuple[Tensor, ...]) -> Tensor:
        m, v = _rows(mean), _rows(variance)
        start, step, num_outer, num_inner, evaluate = plan(m, v, *extra)
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
        shape = (*mean.shape[:-2], mean.size(-1), mean.size(-2))
        ctx.save_for_backward(*(t.view(shape).mT.to(mean.dtype) for t in (slope, bend)))
        return value.view(shape[:-1]).to(mean.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        slope, bend = ctx.saved_tensors
        return grad.unsqueeze(-2) * slope, grad.unsqueeze(-2) * bend, None, None


class _ExpectedSoftmax(torch.autograd.Function):
    """The gradient of E[log sum exp] in the means; its own derivative is that of the marginals of one trial."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor) -> Tensor:
        ctx.save_for_backward(mean, variance)
        with torch.enable_grad():
            m = mean.detach().double().requires_grad_()
            value = _PerDatum.apply(m, variance.detach().double(), _log_sum_exp_plan, ())
            (probs,) = torch.autograd.grad(value.sum(), m)
        probs = probs.clamp(min=0)
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


def _rows(tensor: Tensor) -> Tensor:  # (..., K, N) -> (B, K)
    return tensor.double().mT.reshape(-1, tensor.size(-2))


# ---- the outer sums ------------------------------------------------------------------------------------------------


def _log_sum_exp_plan(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int, _Chunk]:
    """Lay out int F_* (1 - prod F_k) du between where F_* and where 1 - prod F_k vanishes."""
    floor, ceiling = m - _fall(v), m + _rise(v)
    start, star = floor.max(-1)
    end = ceiling.scatter(-1, star[:, None], -math.inf).amax(-1)
    step = _outer_step(torch.ones_like(start), v)
    return start, step, _count(start, end, step), _inner_nodes(1.0, v), _evaluate_log_sum_exp


def _evaluate_log_sum_exp(u: Tensor, step: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    star = (m - _fall(v)).argmax(-1, keepdim=True)
    is_star = torch.zeros_like(m).scatter(-1, star, 1.0)[..., None] > 0  # (B, K, 1)
    cdf, by_mean, by_variance = _cumulative(u, m, v)  # (B, K, U)
    log_cdf = cdf.log()
    of_star = torch.where(is_star, cdf, 0.0).sum(1)
    log_others = torch.where(is_star, 0.0, log_cdf).sum(1)
    above = -torch.expm1(log_others)
    value = m.gather(-1, star).squeeze(-1) + step * (of_star * above).sum(-1)
    # The integrand's derivative in F_k: 1 - prod F_j for the star, -F_* prod_{j != *, k} F_j for the others.
    weight = torch.where(cdf > 0, (log_others[:, None] - log_cdf).exp(), 0.0) * -of_star[:, None]
    weight = step[:, None, None] * torch.where(is_star, above[:, None], weight)
    slope = torch.where(is_star[..., 0], 1.0, 0.0) + (weight * by_mean).sum(-1)
    return value, slope, (weight * by_variance).sum(-1)


def _fall(v: Tensor) -> Tensor:
    """Return how far below its mean f_k + G_k is with probability e^-digits."""
    return _REACH * v.sqrt() + math.log(_DIGITS)


def _rise(v: Tensor) -> Tensor:
    """Return how far above its mean: where the better of a^2 / (2v) + (t - a) over a falls to the digits."""
    return torch.where(v <= 2 * _DIGITS, _DIGITS + 0.5 * v, _REACH * v.sqrt())


def _multinomial_plan(m: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, int, _Chunk]:
    """Lay out int prod A_k du about its peak, where Laplace's approximation of every A_k says that it vanishes."""
    y = _with_a_trial(y)
    n, d, largest = y.sum(-1), m[..., None], float(y.sum(-1).max()) if y.numel() else 1.0

    def approximation(u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithm of the integrand, about, and the derivative of its profile."""
        t, x = _peak(y, m - u[:, None], v)
        log_kernel = y * t - x - 0.5 * v * (y - x).square() - 0.5 * torch.log1p(x * v)
        return log_kernel.sum(-1), x.sum(-1) - n

    low = (m - v * n[:, None]).amax(-1) - n.log()
    high = (m + v * y).amax(-1) + math.log(d.size(1)) - n.log()
    for _ in range(60):
        middle = 0.5 * (low + high)
        rising = approximation(middle)[1] > 0
        low, high = torch.where(rising, middle, low), torch.where(rising, high, middle)
    peak = 0.5 * (low + high)
    allowed = approximation(peak)[0] - _DIGITS - 2 * m.size(-1)  # the approximation is within 2 of each log A_k
    start, end = (_edge(approximation, peak, sign, allowed) for sign in (-1, 1))
    step = _outer_step(n, v)
    return start, step, _count(start, end, step), _inner_nodes(largest, v), _evaluate_multinomial


def _evaluate_multinomial(u: Tensor, step: Tensor, m: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    no_trial = y.sum(-1) == 0
    y = _with_a_trial(y)
    n = y.sum(-1)
    log_kernel, slope, bend = _log_kernel(y, float(n.max()), u, m, v)  # (B, K, U)
    exponent = log_kernel.sum(1)
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
    return torch.maximum(_gumbel_step(n), math.pi * math.sqrt(2 / _DIGITS) * (1 / v).sum(-1).rsqrt())


def _gumbel_step(weight: Tensor) -> Tensor:
    """Return the step that resolves exp(w t - e^t), w = weight, and what is narrower by factors e^{-c t^2 / 2}, w + c.

    At the height a its integral grows by (cos a)^-w, and every a gives a valid step: 2 pi a / h + w log cos a = digits.
    """
    step = 0.99 * math.pi * math.sqrt(2 / _DIGITS) * weight.rsqrt() * (weight > 400)
    for a in _HEIGHTS:
        step = torch.maximum(step, 2 * math.pi * a / (_DIGITS - weight * math.log(math.cos(a))))
    return step


def _count(start: Tensor, end: Tensor, step: Tensor) -> Tensor:
    return ((end - start) / step).ceil().clamp(min=0).long() + 1


# ---- the distribution functions F_k, to an absolute error -----------------------------------------------------------


def _cumulative(u: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return F_k(u) and its derivatives in m and v, (B, K, U) each, from u (B, U), m and v (B, K)."""
    return _by_width(m[..., None] - u[:, None], v, (v,), _cumulative_over_gaussian, _cumulative_over_gumbel)


def _cumulative_over_gaussian(d: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate exp(-x) and its derivatives over f = m + s z; x = e^{d + s z} is a product of exponentials."""
    s = v.sqrt()
    step = torch.where(s < 0.1, math.pi * math.sqrt(2 / _DIGITS), 0.0)  # the best height is sqrt(2 digits) s
    for a in _HEIGHTS:
        step = torch.maximum(step, 2 * math.pi * a * s / (_DIGITS * v + 0.5 * a**2).clamp(min=0.1))
    num_nodes = math.ceil(2 * _REACH / float(step.min())) + 1 if d.numel() else 1
    z = torch.linspace(-_REACH, _REACH, num_nodes, dtype=d.dtype, device=d.device)
    weight = torch.softmax(-0.5 * z.square(), 0)
    by_node, by_place = torch.exp(s * z), torch.exp(d.clamp(max=100.0))  # exp(-e^80) is 0
    kernel = torch.exp(-by_node[..., None] * by_place[..., None, :])  # (R, Q, U)
    moments = torch.stack([weight.expand_as(by_node), weight * by_node, weight * by_node.square()], -2) @ kernel
    first, second = by_place * moments[..., 1, :], by_place.square() * moments[..., 2, :]
    return moments[..., 0, :], -first, 0.5 * (second - first)


def _cumulative_over_gumbel(d: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate Phi((u - m - g) / s) over the Gumbel density and, by parts, over its derivatives."""
    low, high = -math.log(_DIGITS + 12), _DIGITS
    step = float(_gumbel_step(torch.ones(())))
    g = torch.arange(math.ceil((high - low) / step) + 1, dtype=d.dtype, device=d.device) * step + low
    x = torch.exp(-g)
    density = step * torch.exp(-g - x)
    densities = torch.stack([density, (x - 1) * density, ((x - 1).square() - x) * density], -1)  # (Q, 3)
    moments = torch.special.ndtr(-(d[..., None] + g) / v.sqrt()[..., None]) @ densities
    return moments[..., 0], -moments[..., 1], 0.5 * moments[..., 2]


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


def _log_kernel(y: Tensor, n: float, u: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log A_k(u) and its derivatives in m and v, (B, K, U) each, from u (B, U) and (B, K) of the others."""

    def over_gumbel(d: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _log_kernel_over_gumbel(d, y, v, n)

    return _by_width(m[..., None] - u[:, None], v, (y, v), _log_kernel_over_gaussian, over_gumbel)


def _log_kernel_over_gaussian(d: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate over f = m + s z about the peak of the exponent y t - x - z^2 / 2, x = e^t, t = d + s z.

    At r = t - t_peak = s w the exponent has fallen by x_peak (e^r - 1 - r) + w^2 / 2.
    """
    s = v.sqrt()
    t, x = _peak(y, d, v)
    # e^r - 1 - r is at least r^2 / 2 to the right of the peak and r^2 / (2 + 2 |r| / 3) to the left.
    left = ((_DIGITS / 3 + (_DIGITS**2 / 9 + 2 * _DIGITS * x).sqrt()) / (x * s)).clamp(max=_REACH)
    right = (_REACH / (x.sqrt() * s)).clamp(max=_REACH)
    width = (1 + x * v).rsqrt()  # of the peak, in w
    narrow = math.pi * math.sqrt(2 / _DIGITS) * width
    step = torch.where(s * width < 0.05, 0.99 * narrow, _gumbel_step((s * width).clamp(min=0.05) ** -2) / s)
    num_steps = int(((left + right) / step).max().ceil()) if d.numel() else 1
    step = (left + right) / num_steps

    position = torch.arange(num_steps + 1, dtype=d.dtype, device=d.device)
    w = step[..., None] * position - left[..., None]  # (R, U, Q)
    r = s[..., None] * w
    growth = torch.expm1(r)
    weight = torch.addcmul(-0.5 * w.square(), x[..., None], r - growth).exp_()
    total = weight.sum(-1)
    # d log A / dm = E[y - x],   d log A / dv = E[(y - x)^2 - x] / 2 under the weights.
    excess = (y - x)[..., None] - x[..., None] * growth
    weight *= excess
    slope = weight.sum(-1) / total
    square = (weight * excess).sum(-1) / total
    value = y * t - x - 0.5 * v * (y - x).square() + (total * step).log() - 0.5 * math.log(2 * math.pi)
    return value, slope, 0.5 * (square - (y - slope))


def _log_kernel_over_gumbel(d: Tensor, y: Tensor, v: Tensor, n: float) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate over the Gumbel variable: A = e^{y d + y^2 v / 2} int e^{-g - e^-g} Phi(x) dg, x = -(d + g) / s - y s.

    Where x < 0, Phi(x) = e^{-x^2 / 2} erfcx(-x / sqrt 2) / 2 takes up the large exponents.
    """
    s = v.sqrt()
    low, high = -math.log(2 * n + _DIGITS), _DIGITS
    step = float(_gumbel_step(torch.tensor(2.0 * n + 1)))
    g = torch.arange(math.ceil((high - low) / step) + 1, dtype=d.dtype, device=d.device) * step + low
    g = g.view(-1, *(1,) * d.dim())  # (Q, ...)
    x = -(d + g) / s - y * s
    below = x < 0
    scaled = torch.special.erfcx(-x.clamp(max=0) * math.sqrt(0.5))
    log_ndtr = torch.special.log_ndtr(x.clamp(min=0))
    exponent = torch.where(
        below, -0.5 * (d + g).square() / v - y * g + (0.5 * scaled).log(), y * d + 0.5 * y.square() * v + log_ndtr
    )
    exponent = exponent - g - torch.exp(-g)
    ratio = torch.where(  # of the normal density to Phi
        below, math.sqrt(2 / math.pi) / scaled, torch.exp(-0.5 * x.square() - log_ndtr) / math.sqrt(2 * math.pi)
    )
    value = torch.logsumexp(exponent, 0) + math.log(step)
    weight = exponent.softmax(0)
    slope = y - (weight * ratio).sum(0) / s
    bend = 0.5 * y.square() - (weight * ratio * (y / s + 0.5 * x / v)).sum(0)
    return value, slope, bend


def _peak(y: Tensor, d: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return t and e^t at the peak of y t - e^t - (t - d)^2 / (2v): with w = v e^t, w + log w = log v + d + v y."""
    log_v = v.clamp(min=1e-20).log()
    right = log_v + d + v * y
    log_w = torch.where(right > 1, right.clamp(min=1).log(), right)  # right of the root: Newton falls to it
    for _ in range(_SOLVER_STEPS):
        w = log_w.exp()
        log_w = log_w - (w + log_w - right) / (w + 1)
    t = (log_w - log_v).clamp(max=300.0)
    return t, t.exp()


def _inner_nodes(n: float, v: Tensor) -> int:
    """Return about how many nodes each value of A_k takes, for the size of a chunk."""
    s = float(v.max().sqrt()) if v.numel() else 0.0
    if s > _WIDE:
        return int((math.log(2 * n + _DIGITS) + _DIGITS) / float(_gumbel_step(torch.tensor(2.0 * n + 1)))) + 25
    return int(25 + 57 * s)
