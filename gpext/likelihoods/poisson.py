"""The Poisson likelihood with log link: E[log p] in closed form [KMM12 Sec. 4]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpext.distributions import Poisson
from gpext.likelihoods.checks import check_counts, floating, floating_like
from gpext.likelihoods.latent import LatentLikelihood


class PoissonLikelihood(LatentLikelihood):
    r"""Counts with rate e^f: :math:`\log p(y|f) = y f - e^f - \log y!`, no parameters.

    :math:`E[\log p] = y m - e^{m + v/2} - \log y!`. gpytorch has no log link. Exposure belongs in the mean function, as
    the logarithm of the exposure.
    """

    def _check_support(self, targets: Tensor) -> None:
        check_counts(targets)

    def _log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        y, latent = targets.double(), f.double()  # large terms leave a small sum
        return (y * latent - latent.exp() - torch.lgamma(y + 1)).to(floating_like(targets, f).dtype)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return y m - exp(m + v/2) - log y!, elementwise.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        y, m, v = targets.double(), mean.double(), variance.double()
        return (y * m - (m + 0.5 * v).exp() - torch.lgamma(y + 1)).to(floating_like(targets, mean).dtype)

    def _knots(self, targets: Tensor) -> Tensor:
        # The likelihood peaks at log y with width 1 / sqrt(y); exp(-e^f) falls off near f = 0.
        return floating(targets).clamp(min=1).log().unsqueeze(0)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Poisson:
        """Return p(y | f)."""
        return Poisson(rate=function_samples.exp())
