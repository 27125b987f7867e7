"""Log-normal observations."""

from __future__ import annotations

import math
from typing import Any

from gpytorch.distributions import base_distributions
from torch import Tensor
from torch.distributions import Distribution

from gpext.likelihoods.latent import STRIP
from gpext.likelihoods.positive import PositiveLikelihood


class LogNormalLikelihood(PositiveLikelihood):
    r"""Positive numbers whose logarithm is normal: :math:`\log y \sim N(f, s^2)`, s the `shape`; e^f is the median.

    Both integrals over f have closed forms, and every rule is exact.

    Example:
        >>> import torch
        >>> likelihood = LogNormalLikelihood().initialize(shape=1.0)
        >>> likelihood.log_prob(torch.tensor([1.0]), torch.zeros(1)).detach()
        tensor([-0.9189])
    """

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        log_y, d, s, dtype = self.terms(targets, f)
        return (_log_normal(d, s.square()) - log_y).to(dtype)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, variance).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        log_y, d, s, dtype = self.terms(targets, mean)
        return (_log_normal(d, s.square()) - 0.5 * variance.double() / s.square() - log_y).to(dtype)

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, variance) df.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        log_y, d, s, dtype = self.terms(targets, mean)
        return (_log_normal(d, s.square() + variance.double()) - log_y).to(dtype)

    def strip(self, targets: Tensor) -> Tensor:
        """Return half the width of the strip in which the normal density of log y grows little."""
        return (STRIP * self.shape.detach()).expand(targets.shape)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f)."""
        s = self.shape.to(function_samples)
        return base_distributions.LogNormal(function_samples, s.expand(function_samples.shape))


def _log_normal(d: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * (d.square() / variance + variance.log() + math.log(2 * math.pi))
