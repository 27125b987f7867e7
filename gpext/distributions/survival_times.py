"""Positive distributions that torch has not: log-logistic and generalised Pareto, by the logarithm of their scale."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from gpytorch.distributions import Distribution
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all
from torch.nn.functional import logsigmoid, softplus

from gpext.distributions.drawing import drawn_from


class _ScaledPositive(Distribution):
    """Y = e^f Z with a law of Z that has one parameter."""

    arg_constraints: ClassVar = {"log_scale": constraints.real, "shape": constraints.positive}
    support = constraints.positive

    def __init__(self, log_scale: Tensor | float, shape: Tensor | float, validate_args: bool | None = None) -> None:
        self.log_scale, self.shape = broadcast_all(log_scale, shape)
        super().__init__(self.log_scale.shape, validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: _ScaledPositive | None = None) -> _ScaledPositive:
        """The same distribution, repeated over `batch_shape`."""
        new = self._get_checked_instance(type(self), _instance)
        new.log_scale, new.shape = self.log_scale.expand(batch_shape), self.shape.expand(batch_shape)
        super(_ScaledPositive, new).__init__(torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return draws of shape sample_shape + batch_shape, by inversion."""
        shape = self._extended_shape(torch.Size(sample_shape))
        with torch.no_grad(), drawn_from(generator):
            u = torch.rand(shape, dtype=torch.float64, device=self.log_scale.device)
            return self.icdf(u.clamp_min(torch.finfo(torch.float64).tiny)).to(self.log_scale.dtype)

    def icdf(self, value: Tensor) -> Tensor:
        """Return the quantile at a probability."""
        raise NotImplementedError

    def _log_ratio(self, value: Tensor) -> Tensor:
        """Return log(y / scale), -inf for y = 0."""
        return value.log() - self.log_scale


class LogLogistic(_ScaledPositive):
    """P(Y <= y) = 1 / (1 + (y / scale)^-k).

    Args:
        log_scale: the logarithm of the median.
        shape: k > 0.
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> LogLogistic(torch.tensor(0.0), torch.tensor(2.0)).cdf(torch.tensor(1.0))
        tensor(0.5000)
    """

    @property
    def mean(self) -> Tensor:
        """Scale (pi / k) / sin(pi / k); infinite for k <= 1."""
        angle = math.pi / self.shape
        return torch.where(self.shape > 1, self.log_scale.exp() * angle / angle.sin(), torch.inf)

    @property
    def variance(self) -> Tensor:
        """scale^2 (2 pi / k) / sin(2 pi / k) - mean^2; infinite for k <= 2."""
        angle = 2 * math.pi / self.shape
        second = (2 * self.log_scale).exp() * angle / angle.sin()
        mean = torch.where(self.shape > 2, self.mean, 0.0)
        return torch.where(self.shape > 2, second - mean.square(), torch.inf)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density."""
        z = self.shape * self._log_ratio(value)
        return self.shape.log() - value.log() + logsigmoid(z) + logsigmoid(-z)

    def cdf(self, value: Tensor) -> Tensor:
        """Return P(Y <= value)."""
        return torch.sigmoid(self.shape * self._log_ratio(value.clamp_min(0)))

    def icdf(self, value: Tensor) -> Tensor:
        """Return the quantile at a probability."""
        return (self.log_scale + torch.logit(value) / self.shape).exp()


class GeneralizedPareto(_ScaledPositive):
    """P(Y > y) = (1 + xi y / scale)^(-1/xi).

    Args:
        log_scale: the logarithm of the scale.
        shape: xi > 0.
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> GeneralizedPareto(torch.tensor(0.0), torch.tensor(1.0)).cdf(torch.tensor(1.0))  # 1 - 1 / (1 + y)
        tensor(0.5000)
    """

    @property
    def mean(self) -> Tensor:
        """Scale / (1 - xi); infinite for xi >= 1."""
        return torch.where(self.shape < 1, self.log_scale.exp() / (1 - self.shape), torch.inf)

    @property
    def variance(self) -> Tensor:
        """scale^2 / ((1 - xi)^2 (1 - 2 xi)); infinite for xi >= 1/2."""
        xi = self.shape
        return torch.where(xi < 0.5, (2 * self.log_scale).exp() / ((1 - xi).square() * (1 - 2 * xi)), torch.inf)

    def _log_survival(self, value: Tensor) -> Tensor:
        return -softplus(self._log_ratio(value) + self.shape.log(), threshold=700) / self.shape

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density."""
        return (1 + self.shape) * self._log_survival(value) - self.log_scale

    def cdf(self, value: Tensor) -> Tensor:
        """Return P(Y <= value)."""
        return -torch.expm1(self._log_survival(value.clamp_min(0)))

    def icdf(self, value: Tensor) -> Tensor:
        """Return the quantile at a probability."""
        return self.log_scale.exp() * torch.expm1(-self.shape * torch.log1p(-value)) / self.shape
