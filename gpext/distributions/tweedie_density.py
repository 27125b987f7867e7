r"""The density of Tweedie's compound Poisson-gamma law, 1 < p < 2, to full precision [Dunn & Smyth 2005].

Y is a sum of J ~ Poisson(lambda) gamma variables of shape a and scale g: zero, or positive and continuous, with mean mu
and variance phi mu^p, where

    lambda = mu^(2-p) / (phi (2-p)),    a = (2-p) / (p-1),    g = phi (p-1) mu^(p-1)
    log p(0) = -lambda,    log p(y) = log p(y | mu = y) - D / phi,    D = half the unit deviance

Of mu the density depends through D alone. The rest is a series over J, with L and a L the values of lambda and y / g at
mu = y. Each term is a Poisson mass of j at rate L times one of a j at rate a L, both by their deviances [Loader 2000]:

    y p(y | y) = (sqrt(a) / 2 pi) sum_j exp(-(1 + a) j e2(log(L / j)) - R(j) - R(a j)),    L = y^(2-p) / (phi (2-p))
    D = y^(2-p) (e2((2-p) d) / (2-p) + e2(-(p-1) d) / (p-1)),    d = log mu - log y,    e2(x) = e^x - 1 - x

with R the remainder of Stirling's formula. No term is a difference of large numbers. About L the terms are as wide as
sqrt(L / (1 + a)): narrow sums are over all j within ten widths, and wide ones, nearly integrals of an analytic
function, take the trapezoidal rule with 6.4 nodes a width, whose error is below rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpext.distributions.positive import with_slopes
from gpext.special import exp_remainder, stirling_remainder, stirling_remainder_slope

_HALF = 64  # nodes on either side of the largest term
_A_WIDTH = 6.4  # nodes: ten widths on either side
_WIDTHS, _BEYOND = 10.0, 12.0  # of which terms the last one is below rounding, if they are narrow
_CHUNK = 8192  # data in one sum


def tweedie_log_prob(
    y: Tensor, log_mean: Tensor, dispersion: Tensor, power: Tensor, *, variance: Tensor | float = 0.0
) -> Tensor:
    """Return log p(y), of y = 0 the log probability, or its expectation for a Gaussian log mu; elementwise, float64.

    E[e^(c d)] = e^(c E d + c^2 v / 2). Twice differentiable in log mu, once in phi and p. The series is summed in the
    common shape of y, phi and p: values of log mu with more dimensions in front cost next to nothing.

    Args:
        y: not negative.
        log_mean: log mu, or its mean.
        dispersion: phi.
        power: p.
        variance: of log mu.
    """
    is_zero, by_rate, by_scale = y == 0, 2 - power, power - 1
    log_y = torch.where(is_zero, 1.0, y).log()
    half = 0.5 * torch.as_tensor(variance).to(log_mean)
    d, spread = (torch.where(is_zero, 0.0, each) for each in (log_mean - log_y, half))
    left = exp_remainder(by_rate * (d + by_rate * spread)) / by_rate
    right = exp_remainder(-by_scale * (d - by_scale * spread)) / by_scale
    half_deviance = (by_rate * log_y).exp() * (left + right + spread)
    log_rate = by_rate * torch.where(is_zero, log_mean + by_rate * half, 0.0)
    return torch.where(
        is_zero,
        -log_rate.exp() / (dispersion * by_rate),
        _log_density_at_mean(log_y, dispersion, power) - log_y - half_deviance / dispersion,
    )


def _log_density_at_mean(log_y: Tensor, dispersion: Tensor, power: Tensor) -> Tensor:
    """Return log y p(y | mu = y) for y > 0, float64; differentiable once in all three."""
    log_y, dispersion, power = torch.broadcast_tensors(log_y, dispersion, power)
    L = ((2 - power) * log_y).exp() / (dispersion * (2 - power))
    a = (2 - power) / (power - 1)
    rates, shapes = L.detach().reshape(-1), a.detach().reshape(-1)
    wanted = torch.is_grad_enabled() and (L.requires_grad or a.requires_grad)
    parts = [_log_series(*part, slopes=wanted) for part in zip(rates.split(_CHUNK), shapes.split(_CHUNK), strict=True)]
    value, *slopes = (torch.cat(each).view(L.shape) for each in zip(*parts, strict=True))
    return with_slopes(value, *zip((L, a), slopes, strict=True)) if wanted else value


def _log_series(L: Tensor, a: Tensor, *, slopes: bool) -> tuple[Tensor, ...]:
    """Return the logarithm of the series, and with `slopes` its derivatives in L and in a, each (N,)."""
    j, step = _nodes(L, (L / (1 + a)).sqrt())
    deviance = j * exp_remainder(-torch.log1p((j - L) / L))  # about L the gap j - L has its digits, log(L / j) has not
    terms = step.log() - (1 + a) * deviance - stirling_remainder(j) - stirling_remainder(a * j)
    value = torch.logsumexp(terms, 0) + 0.5 * a.log() - math.log(2 * math.pi)
    if not slopes:
        return (value,)
    share = terms.softmax(0)
    by_rate = (1 + a) * (share * (j - L)).sum(0) / L
    by_shape = 0.5 / a - (share * (deviance + j * stirling_remainder_slope(a * j))).sum(0)
    return value, by_rate, by_shape


def _nodes(centre: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Return places j (J, ...) and their weights (J, ...) for sums over j = 1, 2, ... of terms about a centre.

    Args:
        centre: where the terms are large (...).
        width: their standard deviation (...).
    """
    stride = width / _A_WIDTH
    is_wide = stride > 1
    first = (centre.round() - _HALF).clamp_min(1)
    needed = torch.where(is_wide, 2 * _HALF, centre + _WIDTHS * width + _BEYOND - first)
    count = min(2 * _HALF, int(needed.max())) if needed.numel() else 0
    place = torch.arange(count, dtype=centre.dtype, device=centre.device).view(-1, *centre.dim() * (1,))
    j = torch.where(is_wide, centre + stride * (place - _HALF), first + place)
    weight = torch.where(is_wide, stride, 1.0).expand(j.shape)
    inside = j >= 1  # of a wide sum nothing is below
    return torch.where(inside, j, 1.0), torch.where(inside, weight, 0.0)
