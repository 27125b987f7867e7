"""The Poisson likelihood with log link: E[log p] in closed form [KMM12 Sec. 4]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpext.distributions import Poisson
from gpext.likelihoods.checks import check_counts, floating, floating_like
from gpext.likelihoods.latent import LatentLikelihood
from gpext.special import log_poisson


class PoissonLikelihood(LatentLikelihood):
    r"""Counts with rate e^f: :math:`\log p(y|f) = y f - e^f - \log y!`, no parameters.

    :math:`E[\log p] = y m - e^{m + v/2} - \log y!`. gpytorch has no log link. Exposure belongs in the mean function, as
    the logarithm of the exposure.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> f = MultivariateNormal(torch.zeros(1), torch.eye(1))
        >>> PoissonLikelihood()(f).mean  # exp(1/2): a log-normal rate
        tensor([1.6487])
    """

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target is outside the support."""
        check_counts(targets)

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        return log_poisson(targets.double(), f.double()).to(floating_like(targets, f).dtype)

    def log_prob_slopes(self, targets: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivatives of log p(y | f) in f, y - e^f and -e^f, with the digits of :func:`log_poisson`."""
        y = targets.to(f)
        some = torch.where(y > 0, y, 1.0)
        d = f - some.log()
        return torch.where(y > 0, -some * d.expm1(), -f.exp()), -some * d.exp()

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return y m - exp(m + v/2) - log y!, elementwise.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        y, m, half = targets.double(), mean.double(), 0.5 * variance.double()
        return (log_poisson(y, m + half) - y * half).to(floating_like(targets, mean).dtype)

    def knots(self, targets: Tensor) -> Tensor:
        """Return latent values about which p(y | f) may be narrow."""
        # The likelihood peaks at log y with width 1 / sqrt(y); exp(-e^f) falls off near f = 0.
        return floating(targets).clamp(min=1).log().unsqueeze(0)

    def strip(self, targets: Tensor) -> Tensor:
        """Return half the width of the strip in which exp(-e^f) is bounded, less where the mass is narrow."""
        return 1.2 / floating(targets).clamp(min=1).sqrt()

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Poisson:
        """Return p(y | f)."""
        return Poisson(rate=function_samples.exp())
