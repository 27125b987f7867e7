"""Quantiles from a distribution function: Newton's method inside a bracket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.distributions import Distribution

_MAX_STEPS = 100  # bisections where Newton's would leave the bracket: more than the bits of a float64
_NEAR = 1e-6  # of the smaller tail, an excess from which Newton's next step leaves far less than half, but for rounding


class HasCdf(Protocol):
    """A distribution with a density and a cumulative distribution function."""

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value)."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density."""


def quantile_between(
    distribution: HasCdf, probability: Tensor, low: Tensor, high: Tensor, *, tolerance: float = 0.0
) -> Tensor:
    """Return the quantiles of a continuous distribution, to rounding of its cdf; no gradient.

    Args:
        distribution: with cdf and log_prob.
        probability: strictly between 0 and 1, (...).
        low: below the quantiles (...).
        high: above them (...).
        tolerance: of the probability, for a cdf that is less exact than that.
    """
    y = low + (high - low) / 2
    ended, vain = torch.zeros_like(y, dtype=torch.bool), torch.zeros_like(y)
    before = torch.full_like(y, torch.inf)  # the last excess
    near = _NEAR * torch.minimum(probability, 1 - probability)
    for _ in range(_MAX_STEPS):
        excess = distribution.cdf(y) - probability
        low, high = torch.where(excess <= 0, y, low), torch.where(excess >= 0, y, high)
        newton = y - excess / distribution.log_prob(y).exp()
        inside = (newton >= low) & (newton <= high)
        following = torch.where(inside, newton, low + (high - low) / 2)
        settled = (following - y).abs() <= 4 * torch.finfo(y.dtype).eps * y.abs()
        settled |= excess.abs() <= tolerance
        vain = vain + ((before <= near) & (excess.abs() > 0.5 * before))
        settled |= vain >= 2  # one may be due to a jump of the density
        y = torch.where(ended, y, following)
        ended, before = ended | settled, excess.abs()
        if bool(ended.all()):
            break
    return y


def mixture_quantile(
    distribution: Distribution, value: Tensor | float, like: Tensor, quantiles: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return a mixture's quantile, which lies between those of its components.

    Args:
        distribution: the mixture.
        value: the probability.
        like: a tensor of the dtype and device to work in.
        quantiles: those of all components, stacked in front.

    Raises:
        NotImplementedError: the support is discrete.
        ValueError: a probability is not strictly between 0 and 1.
    """
    support = distribution.support
    if support is None or support.is_discrete:
        raise NotImplementedError("quantiles of discrete mixtures are not implemented; use cdf.")
    probability = check_probability(value, like)
    with torch.no_grad():
        each = quantiles(probability)
        return quantile_between(distribution, probability, each.amin(0), each.amax(0))


def check_probability(value: Tensor | float, like: Tensor) -> Tensor:
    """Return probabilities in the dtype and on the device of `like`.

    Raises:
        ValueError: one is not strictly between 0 and 1.
    """
    probability = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if not bool(((probability > 0) & (probability < 1)).all()):
        raise ValueError(f"probabilities must be strictly between 0 and 1; got {probability.tolist()}.")
    return probability
