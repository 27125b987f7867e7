"""Noise whose density is the Matern-3/2 function [GWO20 Table 1].

    p(y) = a/4 (1 + t) e^-t,   t = a |y - loc|,   a = sqrt(3) / scale

t has density (1 + t) e^-t / 2, an even mixture of Gamma(1, 1) and Gamma(2, 1): so E t^2 = (2 + 6) / 2 = 4,
Var y = 4 / a^2 = 4 scale^2 / 3, and the upper tail is (2 + t) e^-t / 4.
"""

from __future__ import annotations

import math

import torch
from gpytorch.distributions import Distribution
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all

_ROOT3 = math.sqrt(3.0)
_NEWTON_STEPS = 8  # quadratic from the first step on; 5 suffice for every float64 tail


class Matern32(Distribution):
    """Symmetric noise with Matern-3/2 density.

    Args:
        loc: mean, median and mode.
        scale: rho, the scale of the Matern function; the standard deviation is 2 rho / sqrt(3).

    Example:
        >>> import torch
        >>> Matern32(0.0, 1.0).cdf(torch.tensor(0.0))
        tensor(0.5000)
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}
    support = constraints.real
    has_rsample = True

    def __init__(self, loc: Tensor | float, scale: Tensor | float, validate_args: bool | None = None) -> None:
        self.loc, self.scale = broadcast_all(loc, scale)
        super().__init__(self.loc.shape, validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: Matern32 | None = None) -> Matern32:
        """The same distribution, repeated over `batch_shape`."""
        new = self._get_checked_instance(Matern32, _instance)
        new.loc, new.scale = self.loc.expand(batch_shape), self.scale.expand(batch_shape)
        super(Matern32, new).__init__(torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        """The location."""
        return self.loc

    @property
    def mode(self) -> Tensor:
        """The location."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """4 scale^2 / 3."""
        return self.scale.square() * (4.0 / 3.0)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density; value and result broadcast with the batch shape."""
        if self._validate_args:
            self._validate_sample(value)
        t = _ROOT3 * (value - self.loc).abs() / self.scale
        return t.log1p() - t - self.scale.log() + math.log(_ROOT3 / 4)

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value), relatively accurate in the lower tail."""
        if self._validate_args:
            self._validate_sample(value)
        t = _ROOT3 * (value - self.loc) / self.scale
        tail = (2 + t.abs()) * (-t.abs()).exp() / 4
        tail = torch.where(t.isinf(), torch.zeros_like(tail), tail)  # inf * 0
        return torch.where(t > 0, 1 - tail, tail)

    def icdf(self, value: Tensor) -> Tensor:
        """The quantile at probability `value` in [0, 1]; differentiable."""
        # Solve h(t) = log((2 + t) / 4) - t - log p = 0 for the smaller tail p. h is concave and decreasing with slope
        # in [-1, -1/2], and -log 2p is left of the root: Newton jumps to its right once and then descends to it.
        p = torch.minimum(value, 1 - value)
        ends = p <= 0
        safe = torch.where(ends, torch.full_like(p, 0.5), p)
        with torch.no_grad():
            t = -(2 * safe).log()
            for _ in range(_NEWTON_STEPS):
                t = t + _height(t, safe) * (2 + t) / (1 + t)
        t = t + _height(t, safe) * (2 + t) / (1 + t)  # with autograd: the derivative of the root in p
        t = torch.where(ends, torch.full_like(t, math.inf), t.clamp(min=0))
        return self.loc + self.scale / _ROOT3 * torch.where(value < 0.5, -t, t)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """The same as `rsample`, without gradients."""
        with torch.no_grad():
            return self.rsample(sample_shape, generator=generator)

    def rsample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape; from torch's global generator by default."""
        shape = self._extended_shape(torch.Size(sample_shape))
        first, second = self.loc.new_empty((2, *shape)).exponential_(generator=generator)
        # Gamma(1) or Gamma(2), then a sign: a fair coin each.
        coins = torch.randint(0, 2, (2, *shape), generator=generator, device=self.loc.device)
        coin, sign = coins.to(self.loc.dtype)
        return self.loc + self.scale / _ROOT3 * (2 * sign - 1) * (first + coin * second)


def _height(t: Tensor, tail: Tensor) -> Tensor:
    return ((2 + t) / 4).log() - t - tail.log()
