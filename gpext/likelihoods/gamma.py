"""Gamma observations with log link."""

from __future__ import annotations

from typing import Any

from gpytorch.distributions import base_distributions
from torch import Tensor
from torch.distributions import Distribution

from gpext.likelihoods.positive import PositiveLikelihood
from gpext.special import log_poisson


class GammaLikelihood(PositiveLikelihood):
    r"""Positive numbers with mean e^f and variance :math:`e^{2 f} / a`, a the `shape`: amounts, durations, intensities.

    :math:`p(y | f) = \frac{a^a}{\Gamma(a)} y^{a - 1} e^{-a f} \exp(-a y e^{-f})`; exponential for a = 1. The expected
    log density has a closed form.

    Example:
        >>> import torch
        >>> likelihood = GammaLikelihood().initialize(shape=1.0)
        >>> likelihood.log_prob(torch.tensor([1.0]), torch.zeros(1)).detach()
        tensor([-1.])
    """

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        log_y, d, a, dtype = self.terms(targets, f)
        # a d - a e^d and the constant are one Poisson mass: its terms are as large as a, it is not.
        return (log_poisson(a, d + a.log()) + a.log() - log_y).to(dtype)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, variance), by E[e^-f] = e^(-mean + variance / 2).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        log_y, d, a, dtype = self.terms(targets, mean)
        half = 0.5 * variance.double()
        return (log_poisson(a, d + half + a.log()) - a * half + a.log() - log_y).to(dtype)

    def strip(self, targets: Tensor) -> Tensor:
        """Return half the width of the strip in which exp(-a y e^-f) is bounded, less where the density is narrow."""
        return (1.2 / self.shape.detach().clamp(min=1).sqrt()).expand(targets.shape)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f)."""
        a = self.shape.to(function_samples)
        return base_distributions.Gamma(a.expand(function_samples.shape), a * (-function_samples).exp())
