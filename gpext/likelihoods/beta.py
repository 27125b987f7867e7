"""The Beta likelihood: proportions from two latent functions, the Dirichlet of two shares y and 1 - y [Cha13 Sec. 4.3].

p(y | eta) = y^{alpha - 1} (1 - y)^{beta - 1} / B(alpha, beta),   (alpha, beta) = softplus(eta)
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Distribution

from gpext.distributions import Beta, CompoundBeta
from gpext.likelihoods.checks import floating_like
from gpext.likelihoods.curvature import Curvature
from gpext.likelihoods.dirichlet import (
    concentration,
    dirichlet_curvature,
    dirichlet_expected_log_prob,
    dirichlet_log_prob,
    log_concentration,
)
from gpext.likelihoods.joint import JointLikelihood


class BetaLikelihood(JointLikelihood):
    """Proportions 0 < y < 1 (..., N) from two latent functions (..., 2, N), whose softplus are alpha and beta.

    Both the mean alpha / (alpha + beta) and the precision alpha + beta vary with the input. gpytorch's BetaLikelihood
    has one latent function, the logit of the mean, and one learnt `scale`, the precision of all data.

    Example:
        >>> import torch
        >>> BetaLikelihood()(torch.tensor([[3.0], [3.0]])).mean
        tensor([0.5000])
    """

    num_latents = 2

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target is outside the support."""
        outside = (targets < 0) | (targets > 1)
        for wrong, remedy in (
            (outside, "Divide counts by their totals, percentages by 100."),
            (
                (targets == 0) | (targets == 1),
                "The logarithms of y and 1 - y count. Smooth: y = (y * (n - 1) + 0.5) / n with n = "
                f"{targets.size(-1) if targets.dim() else 1} data.",
            ),
        ):
            if bool(wrong.any()):
                index = tuple(wrong.nonzero()[0].tolist())
                raise ValueError(
                    f"targets must be proportions strictly between 0 and 1; got {targets[index].item():g} at index "
                    f"{index[0] if len(index) == 1 else index}. {remedy}"
                )

    def expansion_point(self, targets: Tensor) -> Tensor:
        """Return eta = (y, 1 - y) (..., 2, N), where Taylor expands [Cha13]."""
        return torch.stack([targets, 1 - targets], -2)

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        return dirichlet_log_prob(_log_shares(floating_like(targets, f)), f)

    def curvature(self, targets: Tensor, f: Tensor) -> Curvature:
        """Return log p(y | f) to second order at f (..., 2, N).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        return dirichlet_curvature(_log_shares(floating_like(targets, f)), f)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] (..., N) under independent N(mean, variance), (..., 2, N), to 1e-10 of its terms.

        Raises:
            TypeError, ValueError: as :meth:`check`; means or variances are not finite, or a variance is negative.
        """
        self.check(targets)
        return dirichlet_expected_log_prob(_log_shares(floating_like(targets, mean)), mean, variance)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f) for f (..., 2, N), a Beta distribution with batch shape (..., N)."""
        return Beta(*concentration(function_samples).unbind(-2))

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y), a :class:`gpext.distributions.CompoundBeta`: mean, variance, log_prob, cdf, quantile, draws."""
        return CompoundBeta(*self._blocks(function_dist), log_concentration, self.joint_log_density)


def _log_shares(targets: Tensor) -> Tensor:
    """Return (log y, log(1 - y)) (..., 2, N)."""
    return torch.stack([targets.log(), torch.log1p(-targets)], -2)
