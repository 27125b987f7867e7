"""Weibull observations: times with a hazard that rises or falls as a power."""

from __future__ import annotations

from typing import Any

from gpytorch.distributions import base_distributions
from torch import Tensor
from torch.distributions import Distribution

from gpext.likelihoods.positive import PositiveLikelihood


class WeibullLikelihood(PositiveLikelihood):
    r"""Times of scale e^f: :math:`P(Y > y | f) = \exp(-(y e^{-f})^k)`, k the `shape`.

    The hazard rises with time for k > 1, falls for k < 1, and is constant for k = 1. The expected log density has a
    closed form. Times that are only known to be later are censored: `Censored(WeibullLikelihood())`.

    Example:
        >>> import torch
        >>> likelihood = WeibullLikelihood().initialize(shape=1.0)
        >>> likelihood.log_prob(torch.tensor([2.0]), torch.zeros(1)).detach()
        tensor([-2.])
    """

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        log_y, d, k, dtype = self.terms(targets, f)
        return (k.log() - log_y + k * d - (k * d).exp()).to(dtype)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, variance), by E[e^-kf] = e^(-k mean + k^2 variance / 2).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        log_y, d, k, dtype = self.terms(targets, mean)
        return (k.log() - log_y + k * d - (k * d + 0.5 * k.square() * variance.double()).exp()).to(dtype)

    def strip(self, targets: Tensor) -> Tensor:
        """Return half the width of the strip in which exp(-(y e^-f)^k) is bounded."""
        return (1.2 / self.shape.detach()).expand(targets.shape)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f)."""
        k = self.shape.to(function_samples)
        return base_distributions.Weibull(function_samples.exp(), k.expand(function_samples.shape), validate_args=False)
