"""Generalised Pareto observations: how far a high threshold is exceeded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpext.distributions import GeneralizedPareto
from gpext.likelihoods.checks import floating
from gpext.likelihoods.latent import STRIP
from gpext.likelihoods.positive import PositiveLikelihood


class GeneralizedParetoLikelihood(PositiveLikelihood):
    r"""Excesses over a threshold, of scale e^f: :math:`P(Y > y | f) = (1 + \xi y e^{-f})^{-1/\xi}`, xi > 0 the `shape`.

    The tail is a power law of exponent 1 / xi: the mean is finite for xi < 1 and the variance for xi < 1/2. (For xi = 0
    excesses are exponential, a `GammaLikelihood` of shape 1; for xi < 0 they are bounded.)

    Example:
        >>> import torch
        >>> likelihood = GeneralizedParetoLikelihood().initialize(shape=1.0)
        >>> likelihood.log_prob(torch.tensor([1.0]), torch.zeros(1)).detach()
        tensor([-1.3863])
    """

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        log_y, d, xi, dtype = self.terms(targets, f)
        # log(1 + xi e^d) as a softplus: e^d may overflow
        return (d - log_y - (1 / xi + 1) * torch.nn.functional.softplus(d + xi.log(), threshold=700)).to(dtype)

    def strip(self, targets: Tensor) -> Tensor:
        """Return half the width of a strip in which 1 + xi y e^-f has no zeros."""
        return torch.full_like(floating(targets), STRIP)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> GeneralizedPareto:
        """Return p(y | f)."""
        return GeneralizedPareto(function_samples, self.shape.to(function_samples))
