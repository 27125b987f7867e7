"""Quantiles of a predictive distribution from its distribution function alone, wherever they are in its support."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints

from gpext.callers import warn_caller
from gpext.quadrature import QuadratureWarning

_MAX_DOUBLINGS = 1000
_MAX_NEWTON_STEPS = 200
_WHOLE = 2.0**53  # below, float64 has every integer

Function = Callable[[Tensor], Tensor]


def integer_quantile(cdf: Function, q: Tensor, support: constraints.Constraint, *, tolerance: float) -> Tensor:
    """Return the smallest k with cdf(k) >= q, for integers: among those that the dtype has, beyond which it is inf.

    Args:
        cdf: maps values (...) to P(Y <= value).
        q: probabilities strictly between 0 and 1 (...).
        support: of Y.
        tolerance: relative, of the distribution function.
    """
    first = torch.as_tensor(getattr(support, "lower_bound", 0), dtype=q.dtype, device=q.device)
    last = getattr(support, "upper_bound", 1 if support is constraints.boolean else math.inf)
    last = torch.as_tensor(last, dtype=q.dtype, device=q.device)
    accepted = q * (1 - tolerance)  # what the quadrature leaves open
    low, high = (first - 1).expand_as(q), torch.minimum(first, last).expand_as(q)  # cdf(low) < q <= cdf(high)
    largest = torch.full_like(q, torch.finfo(q.dtype).max)
    last = torch.minimum(last, largest)
    width = torch.ones_like(q)
    while True:
        short = (cdf(high) < accepted) & (high < last)
        if not bool(short.any()):
            break
        low = torch.where(short, high, low)
        high = torch.where(short, torch.minimum(high + width, last), high)
        width = torch.where(short, width * torch.where(width < _WHOLE, 2.0, 2.0**16), width)
    beyond = (high == largest) & (cdf(high) < accepted)
    while True:
        middle = (low + (high - low) / 2).floor()
        between = (low < middle) & (middle < high)  # beyond 2^53 neighbouring numbers are further apart than 1
        if not bool(between.any()):
            return torch.where(beyond, torch.inf, high)
        middle = torch.where(between, middle, high)
        enough = ~between | (cdf(middle) >= accepted)
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)


def real_quantile(
    cdf: Function,
    log_density: Function,
    q: Tensor,
    support: constraints.Constraint,
    centre: Tensor,
    width: Tensor,
    *,
    tolerance: float,
) -> Tensor:
    """Return y with cdf(y) = q by Newton's method inside a bracket, on the real line that `biject_to` maps to y.

    Args:
        cdf: maps values (...) to P(Y <= value).
        log_density: its derivative's logarithm.
        q: probabilities strictly between 0 and 1 (...).
        support: of Y.
        centre: of Y (...), roughly.
        width: of Y on the real line (...), roughly.
        tolerance: of the probabilities, relative to the smaller tail.
    """
    to_support = biject_to(support)
    u = to_support.inv(centre)
    low, high = u - width, u + width
    for _ in range(_MAX_DOUBLINGS):
        above, below = cdf(to_support(low)) > q, cdf(to_support(high)) < q
        if not bool((above | below).any()):
            break
        width = 2 * width
        low, high = (
            torch.where(above, low - width, torch.where(below, high, low)),
            torch.where(below, high + width, torch.where(above, low, high)),
        )
    accepted = (tolerance * torch.minimum(q, 1 - q)).clamp(min=4 * torch.finfo(q.dtype).eps)
    u = (low + high) / 2
    for _ in range(_MAX_NEWTON_STEPS):
        y = to_support(u)
        excess = cdf(y) - q
        low, high = torch.where(excess <= 0, u, low), torch.where(excess >= 0, u, high)
        newton = u - excess / (log_density(y) + to_support.log_abs_det_jacobian(u, y)).exp()
        inside = (newton > low) & (newton < high)
        following = torch.where(inside, newton, (low + high) / 2)
        settled = (excess.abs() <= accepted) | ((following - u).abs() <= torch.finfo(u.dtype).eps * u.abs())
        u = torch.where((excess == 0) | (settled & ~inside), u, following)
        if bool(settled.all()):
            return to_support(u)
    warn_caller(
        f"{int((~settled).sum())} of {settled.numel()} quantiles did not reach full precision in "
        f"{_MAX_NEWTON_STEPS} steps; worst error in probability {excess.abs().max().item():.1e}.",
        QuadratureWarning,
    )
    return to_support(u)
