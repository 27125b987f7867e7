r"""Integrals of the softmax over K independent Gaussians, from one-dimensional ones: no samples, no grid in R^K.

With independent standard Gumbel variables G_k, log sum_k e^{f_k} + Gumbel is distributed as max_k(f_k + G_k), whose
distribution function is a product of those of f_k + G_k:

    F_k(u) = E[exp(-e^{f_k - u})]
    E[log sum_k e^{f_k}] = m_* + int F_*(u) (1 - prod_{k != *} F_k(u)) du,   for any one class *
    E[softmax_k] = int F_k'(u) prod_{j != k} F_j(u) du

Where the latents of a datum are not too spread, E[log sum exp] comes from matrix products
(:mod:`gpext.quadrature.softmax.shared_grid`), on request of fewer digits.
Otherwise the integrals are trapezoidal sums, over the factors that :mod:`gpext.quadrature.softmax.gumbel` computes;
those of F_k at nodes close together where one of them changes (:mod:`gpext.quadrature.softmax.clustered`), as a narrow
latent may lie anywhere below a wide one.

Derivatives in m_k and v_k are those of F_k, closed forms under the same nodes; those of E[softmax] are probabilities of
one trial, see :mod:`gpext.quadrature.softmax.multinomial`. Everything is computed in float64.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpext.quadrature.softmax.clustered import coordinate, place
from gpext.quadrature.softmax.gumbel import DIGITS, REACH, cumulative, cumulative_nodes, width_of_change
from gpext.quadrature.softmax.gumbel_windows import COARSE, FULL, Precision
from gpext.quadrature.softmax.multinomial import log_multinomial_marginal
from gpext.quadrature.softmax.per_datum import count_nodes, in_groups, marginals, per_datum, rows_of
from gpext.quadrature.softmax.shared_grid import log_sum_exp_on_grid, span

_COARSE_ERROR = 1e-7
_LONGEST_SPAN = 300.0  # for which the grid is the faster one
_CLUSTERED_STEP = math.pi / DIGITS  # of the coordinate in which nodes are clustered: a strip of half a unit


def expected_log_sum_exp(mean: Tensor, variance: Tensor, *, tolerance: float = 1e-11) -> Tensor:
    """Return E[log sum_k exp(f_k)] for independent f_k ~ N(m_k, v_k), once differentiable in both.

    The absolute error is below 1e-11 (1 + max |m|) for variances from 0 to 1e4, that of the derivatives below 1e-10;
    float32 arguments give a float32 result of float64 arithmetic. With a tolerance of 1e-7 or more the error is below
    1e-7 (1 + max |m|), that of the derivatives below 1e-6, and the time about half.

    Args:
        mean: (..., K, N).
        variance: (..., K, N), nonnegative.
        tolerance: absolute error of the value that is allowed.

    Returns:
        (..., N).

    Raises:
        ValueError: means or variances are not finite, or a variance is negative.

    Example:
        >>> import torch
        >>> expected_log_sum_exp(torch.zeros(3, 1).double(), torch.zeros(3, 1).double())
        tensor([1.0986], dtype=torch.float64)
    """
    mean, variance = marginals(mean, variance)
    precision = COARSE if tolerance >= _COARSE_ERROR else FULL
    return per_datum(partial(log_sum_exp_of_rows, precision=precision), mean, variance)


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

    Example:
        >>> import torch
        >>> expected_softmax(torch.zeros(3, 1).double(), torch.ones(3, 1).double())
        tensor([[0.3333],
                [0.3333],
                [0.3333]], dtype=torch.float64)
    """
    return _ExpectedSoftmax.apply(*marginals(mean, variance))


class _ExpectedSoftmax(torch.autograd.Function):
    """The gradient of E[log sum exp] in the means; its own derivative is that of the marginals of one trial."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor) -> Tensor:
        ctx.save_for_backward(mean, variance)
        _, probs, _ = log_sum_exp_of_rows(rows_of(mean), rows_of(variance))
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


def log_sum_exp_of_rows(m: Tensor, v: Tensor, precision: Precision = FULL) -> tuple[Tensor, Tensor, Tensor]:
    """Return E[log sum exp(f)] (B,) and its derivatives in means and variances (B, K)."""
    is_short = span(m, v) <= _LONGEST_SPAN
    on_grid = partial(log_sum_exp_on_grid, precision=precision)
    if bool(is_short.all()):
        return on_grid(m, v)
    value, slope, bend = torch.empty_like(m[:, 0]), torch.empty_like(m), torch.empty_like(v)
    for rows, rule in ((is_short, on_grid), (~is_short, _log_sum_exp_over_kernels)):
        value[rows], slope[rows], bend[rows] = rule(m[rows], v[rows])
    return value, slope, bend


def _log_sum_exp_over_kernels(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate F_* (1 - prod F_k) du between where F_* and where 1 - prod F_k vanishes."""
    floor, ceiling = m - _fall(v), m + _rise(v)
    first, star = floor.max(-1)
    last = ceiling.scatter(-1, star[:, None], -math.inf).amax(-1)
    start, end = coordinate(torch.stack([first, last], -1), m, width_of_change(v)).unbind(-1)
    step = torch.full_like(start, _CLUSTERED_STEP)
    return in_groups(start, step, count_nodes(start, end, step), cumulative_nodes(v), _evaluate_log_sum_exp, m, v)


def _evaluate_log_sum_exp(t: Tensor, step: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, stretch = place(t, m, width_of_change(v))
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
