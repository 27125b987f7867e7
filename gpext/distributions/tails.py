r"""Logarithms of distribution functions, accurate in both tails and differentiable in the parameters.

    log_cdf:       log P(Y <= y)
    log_survival:  log P(Y > y)
    log_interval:  log P(l < Y <= u), or log P(l <= Y <= u) of counts

A tail t(x) with density p has d log t / dx = +- p / t, so that derivatives of any order follow from log p and log t
themselves; those in a second parameter (degrees of freedom, total count) are central differences, to some 1e-9.
Counts that are so far out that the incomplete gamma or beta function underflows are summed term by term:

    P(Y > y) = p(y + 1) (1 + p(y + 2)/p(y + 1) + ...),     P(Y <= y) = p(y) (1 + p(y - 1)/p(y) + ...)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, Gamma, Laplace, LogNormal, Normal, Weibull
from torch.distributions.utils import broadcast_all

from gpext.distributions.incomplete_gamma import SMALLEST, log_gamma_cdf, log_gamma_survival, log_or_sum
from gpext.distributions.noise.matern32 import Matern32
from gpext.distributions.noise.radial_noise import RadialNoise
from gpext.distributions.survival_times import GeneralizedPareto, LogLogistic
from gpext.distributions.tweedie import Tweedie
from gpext.distributions.tweedie_tails import tweedie_log_tail
from gpext.distributions.with_cdf import NegativeBinomial, Poisson, StudentT, by_scipy, with_cdf
from gpext.special import log_ndtr

_STEP = 1e-5  # of a central difference, as a part of the parameter
_NARROW = 1e-6  # of the smaller tail: below this share of it an interval is integrated
_NODES, _WEIGHTS = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(5))


def log_cdf(distribution: Distribution, value: Tensor) -> Tensor:
    """Return log P(Y <= value), elementwise, differentiable in the value (of continuous Y) and in the parameters.

    Raises:
        TypeError: a distribution whose tails are not known; see :func:`log_tail`.

    Example:
        >>> import torch
        >>> log_cdf(torch.distributions.Normal(0.0, 1.0), torch.tensor([0.0, -40.0]))  # no underflow
        tensor([-6.9315e-01, -8.0461e+02])
    """
    return log_tail(with_cdf(distribution), value, False)


def log_survival(distribution: Distribution, value: Tensor) -> Tensor:
    """Return log P(Y > value), like :func:`log_cdf`.

    Example:
        >>> import torch
        >>> log_survival(torch.distributions.Normal(0.0, 1.0), torch.tensor([0.0, 40.0]))
        tensor([-6.9315e-01, -8.0461e+02])
    """
    return log_tail(with_cdf(distribution), value, True)


def log_interval(distribution: Distribution, lower: Tensor, upper: Tensor) -> Tensor:
    """Return log P(lower < Y <= upper), or log P(lower <= Y <= upper) of counts, for limits of which one is finite.

    Args:
        distribution: of Y.
        lower: may be -inf.
        upper: not below `lower`; may be inf. An interval of no width has the density, or the mass, of its point.

    Raises:
        TypeError: a distribution whose tails are not known.

    Example:
        >>> import torch
        >>> log_interval(torch.distributions.Normal(0.0, 1.0), torch.tensor(-1.0), torch.tensor(1.0)).exp()
        tensor(0.6827)
    """
    distribution = with_cdf(distribution)
    discrete = is_count(distribution)
    lower, upper = torch.broadcast_tensors(lower, upper)
    is_point, is_below, is_above = lower == upper, lower == -torch.inf, upper == torch.inf
    low = torch.where(is_below, torch.where(is_above, 0.0, upper), lower)  # finite, for derivatives
    high = torch.where(is_above, low, upper)
    first = (low - 1).clamp_min(0) if discrete else low  # P(Y > l - 1) = P(Y >= l)
    from_zero = discrete & (low <= 0)
    if bool(is_below.all()):  # one tail will do
        return log_tail(distribution, high, False)
    beyond = log_tail(distribution, first, True)
    beyond = torch.where(from_zero, 0.0, beyond) if discrete else beyond
    if bool(is_above.all()):
        return beyond
    below = log_tail(distribution, high, False)
    # The difference of the two cdfs, or of the two survival functions: of those that are smaller.
    inner_below, inner_beyond = log_tail(distribution, first, False), log_tail(distribution, high, True)
    inner_below = torch.where(from_zero, -torch.inf, inner_below) if discrete else inner_below
    large = torch.where(below < beyond, below, beyond)
    small = torch.where(below < beyond, inner_below, inner_beyond)
    inside = is_point | is_below | is_above
    gap = torch.where(inside, -1.0, small - large)
    is_narrow = (gap > -_NARROW) & ~inside & (not discrete)
    gap = torch.where(gap > -_NARROW, -1.0, gap)
    result = large + torch.log(-torch.expm1(gap))
    if bool(is_narrow.any()):
        result = torch.where(is_narrow, _integrated(distribution, low, high), result)
    result = torch.where(is_below, below, torch.where(is_above, beyond, result))
    return torch.where(is_point, distribution.log_prob(high), result)


def is_count(distribution: Distribution) -> bool:
    """Return whether a distribution is one of counts, by its support."""
    support = distribution.support
    return support is not None and bool(support.is_discrete)


@singledispatch
def log_tail(distribution: Distribution, value: Tensor, upper: bool) -> Tensor:
    """Return log P(Y > value) if `upper`, else log P(Y <= value); register a function for a distribution of your own.

    Raises:
        TypeError: a distribution for which there is none.

    Example:
        >>> import torch
        >>> log_tail(torch.distributions.Normal(0.0, 1.0), torch.tensor(0.0), upper=True)
        tensor(-0.6931)
    """
    raise TypeError(
        f"the tails of {type(distribution).__qualname__} are not known. Register "
        "gpext.distributions.log_tail for it: a function of (distribution, value, upper) that returns log P(Y > value) "
        "if upper, else log P(Y <= value), differentiable in the parameters."
    )


@log_tail.register
def _normal(distribution: Normal, value: Tensor, upper: bool) -> Tensor:
    return log_ndtr(_toward(distribution, value, upper))


@log_tail.register
def _log_normal(distribution: LogNormal, value: Tensor, upper: bool) -> Tensor:
    positive = value > 0
    z = _toward(distribution, torch.where(positive, value, 1.0).log(), upper)
    return torch.where(positive, log_ndtr(z), 0.0 if upper else -torch.inf)


@log_tail.register
def _laplace(distribution: Laplace, value: Tensor, upper: bool) -> Tensor:
    z = _toward(distribution, value, upper)
    return torch.where(z < 0, z - math.log(2), torch.log1p(-0.5 * torch.exp(-z.clamp_min(0))))


@log_tail.register
def _matern(distribution: Matern32, value: Tensor, upper: bool) -> Tensor:
    t = math.sqrt(3) * _toward(distribution, value, upper)
    far = t.abs()
    log_far = torch.log((2 + far) / 4) - far
    return torch.where(t < 0, log_far, torch.log1p(-torch.exp(log_far)))


@log_tail.register
def _student_t(distribution: StudentT, value: Tensor, upper: bool) -> Tensor:
    z, deg_free = torch.broadcast_tensors(_toward(distribution, value, upper), distribution.df)
    return _LogTail.apply(z, deg_free, _log_student_cdf, _log_student_density, 1)


@log_tail.register
def _radial(distribution: RadialNoise, value: Tensor, upper: bool) -> Tensor:
    z = (distribution.loc - value if upper else value - distribution.loc) * distribution.curvature.sqrt()
    table, log_phi = distribution.table, distribution.log_phi

    def log_density(z: Tensor, _: Tensor) -> Tensor:
        return log_phi(z.square()) - table.log_total

    return _LogTail.apply(z, torch.zeros_like(z), lambda z, _: table.log_cdf(z), log_density, 1)


@log_tail.register
def _weibull(distribution: Weibull, value: Tensor, upper: bool) -> Tensor:
    return _of_hazard((distribution.concentration * _log_ratio(value, distribution.scale)).exp(), upper)


@log_tail.register
def _log_logistic(distribution: LogLogistic, value: Tensor, upper: bool) -> Tensor:
    z = distribution.shape * _log_ratio(value, distribution.log_scale.exp())
    return torch.nn.functional.logsigmoid(-z if upper else z)


@log_tail.register
def _pareto(distribution: GeneralizedPareto, value: Tensor, upper: bool) -> Tensor:
    z = _log_ratio(value, distribution.log_scale.exp()) + distribution.shape.log()
    return _of_hazard(torch.nn.functional.softplus(z, threshold=700) / distribution.shape, upper)


@log_tail.register
def _gamma(distribution: Gamma, value: Tensor, upper: bool) -> Tensor:
    log_x, shape = broadcast_all(_log_ratio(value, distribution.rate.reciprocal()), distribution.concentration)
    compute = log_gamma_survival if upper else log_gamma_cdf

    def log_slope(log_x: Tensor, shape: Tensor) -> Tensor:
        return shape * log_x - log_x.exp() - torch.lgamma(shape)

    return _LogTail.apply(log_x, shape, compute, log_slope, -1 if upper else 1)


@log_tail.register
def _tweedie(distribution: Tweedie, value: Tensor, upper: bool) -> Tensor:
    parameters = (distribution.log_mean.double(), distribution.dispersion.double(), distribution.power.double())
    return tweedie_log_tail(value.double(), *parameters, upper).to(distribution.log_mean.dtype)


@log_tail.register
def _poisson(distribution: Poisson, value: Tensor, upper: bool) -> Tensor:
    log_rate, count = broadcast_all(distribution.rate.log(), value.floor())
    compute = _log_poisson_survival if upper else _log_poisson_cdf

    def log_slope(log_rate: Tensor, count: Tensor) -> Tensor:
        return (count + 1) * log_rate - log_rate.exp() - torch.lgamma(count + 1)

    return _LogTail.apply(log_rate, count, compute, log_slope, 1 if upper else -1)


@log_tail.register
def _negative_binomial(distribution: NegativeBinomial, value: Tensor, upper: bool) -> Tensor:
    logits, total, count = broadcast_all(distribution.logits, distribution.total_count, value.floor())

    def compute(logits: Tensor, total: Tensor) -> Tensor:
        return _log_negative_binomial(logits, total, count, upper)

    def log_slope(logits: Tensor, total: Tensor) -> Tensor:
        above = torch.nn.functional.logsigmoid(logits) * (count + 1) + torch.nn.functional.logsigmoid(-logits) * total
        return above + torch.lgamma(count + 1 + total) - torch.lgamma(total) - torch.lgamma(count + 1)

    return _LogTail.apply(logits, total, compute, log_slope, 1 if upper else -1)


Tail = Callable[[Tensor, Tensor], Tensor]


class _LogTail(torch.autograd.Function):
    """log t(x, s) with d log t / dx = sign exp(log_slope - log t); the derivative in s by a central difference."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, s: Tensor, compute: Tail, log_slope: Tail, sign: int) -> Tensor:
        value = compute(x, s)
        ctx.save_for_backward(x, s, value)
        ctx.compute, ctx.log_slope, ctx.sign = compute, log_slope, sign
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, s, value = ctx.saved_tensors
        compute, log_slope, sign = ctx.compute, ctx.log_slope, ctx.sign
        if torch.is_grad_enabled():  # for derivatives of the derivative
            value = _LogTail.apply(x, s, compute, log_slope, sign)
        is_known = value > -torch.inf
        slope = sign * torch.exp(log_slope(x, s) - torch.where(is_known, value, 0.0))
        by_x = grad * torch.where(is_known, slope, 0.0)
        if not ctx.needs_input_grad[1]:
            return by_x, None, None, None, None
        step = _STEP * s.detach().abs()
        change = compute(x.detach(), s.detach() + step) - compute(x.detach(), s.detach() - step)
        return by_x, grad * change / (2 * step), None, None, None


def _toward(distribution: Any, value: Tensor, upper: bool) -> Tensor:
    """Return the standardised value, its sign such that the tail of interest is the lower one."""
    z = (value - distribution.loc) / distribution.scale
    return -z if upper else z


def _log_ratio(value: Tensor, scale: Tensor) -> Tensor:
    """Return log(y / scale) of positive y; of others the logarithm of the least number, whose cdf is next to 0."""
    return value.clamp_min(torch.finfo(scale.dtype).tiny).log() - scale.log()


def _of_hazard(hazard: Tensor, upper: bool) -> Tensor:
    """Return -H, or log(1 - e^-H), of an accumulated hazard H."""
    return -hazard if upper else torch.log(-torch.expm1(-hazard))


def _log_student_cdf(z: Tensor, deg_free: Tensor) -> Tensor:
    from scipy import special

    return by_scipy(lambda nu, z: np.log(special.stdtr(nu, z)), deg_free, z)


def _log_student_density(z: Tensor, deg_free: Tensor) -> Tensor:
    constant = torch.lgamma(0.5 * (deg_free + 1)) - torch.lgamma(0.5 * deg_free) - 0.5 * torch.log(math.pi * deg_free)
    return constant - 0.5 * (deg_free + 1) * torch.log1p(z.square() / deg_free)


def _log_poisson_cdf(log_rate: Tensor, count: Tensor) -> Tensor:
    return log_gamma_survival(log_rate, count + 1)


def _log_poisson_survival(log_rate: Tensor, count: Tensor) -> Tensor:
    if bool(count.any()):
        return log_gamma_cdf(log_rate, count + 1)
    rate = log_rate.exp()
    return torch.where(rate < SMALLEST, log_rate, torch.log(-torch.expm1(-rate)))


def _log_negative_binomial(logits: Tensor, total: Tensor, count: Tensor, upper: bool) -> Tensor:
    from scipy import special

    success, failure = torch.sigmoid(logits), torch.sigmoid(-logits)
    at = count + 1 if upper else count
    log_mass = torch.lgamma(at + total) - torch.lgamma(total) - torch.lgamma(at + 1)
    log_mass = log_mass + at * torch.nn.functional.logsigmoid(logits) + total * torch.nn.functional.logsigmoid(-logits)
    if upper:
        known = by_scipy(special.betainc, count + 1, total, success)
        return log_or_sum(known, lambda: log_mass, lambda j: success * (total + at + j) / (at + 1 + j))
    known = by_scipy(special.betainc, total, count + 1, failure)
    return log_or_sum(known, lambda: log_mass, lambda j: (count - j).clamp_min(0) / ((total + count - j - 1) * success))


def _integrated(distribution: Distribution, low: Tensor, high: Tensor) -> Tensor:
    """Return the logarithm of the integral of the density over an interval so narrow that it is a polynomial there."""
    half = 0.5 * (high - low)
    shape = (-1, *half.dim() * (1,))
    nodes = low + half * (1 + _NODES.to(half).view(shape))
    log_values = distribution.log_prob(nodes)
    half = torch.where(half > 0, half, 1.0)
    return torch.logsumexp(log_values + _WEIGHTS.to(half).view(shape).log(), 0) + half.log()
