"""A function of a Gaussian process with its credible limits, from closed forms or from draws."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Limits:
    """The posterior median and the central credible interval of a quantity, value by value.

    Attributes:
        median: (...).
        lower: (...).
        upper: (...).
        level: probability between lower and upper.

    Example:
        >>> import torch
        >>> Limits(median=torch.ones(2), lower=torch.zeros(2), upper=2 * torch.ones(2), level=0.9).level
        0.9
    """

    median: Tensor
    lower: Tensor
    upper: Tensor
    level: float


@dataclass(frozen=True)
class Band(Limits):
    """The posterior mean, too.

    Attributes:
        mean: (...).

    Example:
        >>> import torch
        >>> from gpext.survival import Limits
        >>> issubclass(Band, Limits)
        True
    """

    mean: Tensor


def check_level(level: float) -> float:
    """Return a level that is strictly between 0 and 1.

    Raises:
        ValueError: another one.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1; got {level!r}.")
    return float(level)


def probabilities(level: float) -> tuple[float, float, float]:
    """Return the probabilities of lower limit, median and upper limit."""
    tail = 0.5 * (1 - check_level(level))
    return tail, 0.5, 1 - tail


def log_normal_band(mean: Tensor, variance: Tensor, level: float) -> Band:
    """Return the band of e^f for f ~ N(mean, variance), in closed form."""
    z = torch.special.ndtri(mean.new_tensor(probabilities(level)).double()).to(mean)
    lower, median, upper = ((mean + each * variance.sqrt()).exp() for each in z)
    return Band(median, lower, upper, level, (mean + 0.5 * variance).exp())


def band_of_draws(draws: Tensor, level: float) -> Band:
    """Return the band of draws (K, ...), which may be infinite: order statistics, without interpolation."""
    ordered = draws.sort(0).values
    lower, median, upper = (ordered[round(q * (len(draws) - 1))] for q in probabilities(level))
    return Band(median, lower, upper, level, draws.mean(0))
