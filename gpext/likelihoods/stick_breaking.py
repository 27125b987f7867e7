r"""The stick-breaking likelihood: unordered classes as a chain of K - 1 binary choices [Khan et al. 2012].

    p(y = k | f) = sigma(f_k) prod_{j < k} (1 - sigma(f_j)),   k < K - 1,   the last class taking what is left

The likelihood depends on latent j only if y >= j, as a logistic regression of whether the stick breaks there. So every
integral over independent latents is a sum of one-dimensional ones, and so is that of log p(y | f) over correlated ones.
The prior depends on the order of the classes.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid, pad

from gpext.bounds import Quadrature, SoftplusTerms
from gpext.checks import whole_number
from gpext.distributions import Categorical
from gpext.likelihoods.bernoulli_logit import BernoulliLogitLikelihood
from gpext.likelihoods.checks import check_classes, floating
from gpext.likelihoods.curvature import diagonal_blocks
from gpext.likelihoods.joint import CorrelatedLikelihood, correlated_blocks
from gpext.quadrature import SecondOrder, in_parts, log_joint_expectation


class StickBreakingLikelihood(CorrelatedLikelihood):
    """Classes 0, ..., K - 1 from K - 1 latent functions (..., K - 1, N); targets are class labels (..., N).

    Args:
        num_classes: K, at least 2; with 2 it is the Bernoulli-logit likelihood of class 0.

    Raises:
        ValueError: fewer than two classes.

    Example:
        >>> import torch
        >>> StickBreakingLikelihood(3)(torch.zeros(2, 1)).probs  # half, half of the rest, the rest
        tensor([[0.5000, 0.2500, 0.2500]])
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        num_classes = whole_number("num_classes", num_classes, 2)
        self.num_classes = num_classes
        self.num_latents = num_classes - 1

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target is outside the support."""
        check_classes(targets, self.num_classes)

    def _breaks(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether the stick breaks at latent j and whether it comes there, bool (..., K - 1, N)."""
        latent = torch.arange(self.num_latents or 0, device=targets.device).unsqueeze(-1)
        return targets.unsqueeze(-2) == latent, targets.unsqueeze(-2) >= latent

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        breaks, comes = self._breaks(targets)
        return torch.where(comes, logsigmoid(torch.where(breaks, f, -f)), 0.0).sum(-2)

    def softplus_terms(self, targets: Tensor) -> SoftplusTerms:
        """Return log p(y | f) as the sum over latents of [y = j] f_j - [y >= j] softplus(f_j).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        dtype = floating(targets).dtype
        breaks, comes = (mask.to(dtype) for mask in self._breaks(targets))
        weight, one = comes.unsqueeze(0), torch.ones_like(comes).unsqueeze(0)
        return SoftplusTerms(
            torch.zeros(targets.shape, dtype=dtype, device=targets.device), breaks, weight, one, 0 * one, True
        )

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] (..., N) under independent N(mean, variance), (..., K - 1, N), to rounding.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        return self.softplus_terms(targets).lower_bound(Quadrature().expected_softplus, mean, variance)

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, variance) df (..., N), relatively accurate in every tail.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        breaks, comes = self._breaks(targets)
        log_probs = BernoulliLogitLikelihood().log_density(breaks.to(mean.dtype), mean, variance)
        return torch.where(comes, log_probs, 0.0).sum(-2)

    def joint_log_density(self, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, covariance) df (..., N); see `gpext.quadrature.log_joint_expectation`.

        Args:
            targets: as :meth:`log_prob`.
            mean: (..., K - 1, N).
            covariance: of the latents of each datum (..., K - 1, K - 1, N).

        Raises:
            TypeError, ValueError: as :meth:`check`; a covariance is not positive semidefinite.
        """
        self.check(targets)

        def integral(m: Tensor, V: Tensor, y: Tensor) -> Tensor:
            return log_joint_expectation(
                lambda f: self.unchecked_log_prob(y, f), lambda f: self._second_order(y, f), m, V
            )

        return in_parts(integral, mean, covariance, targets)

    def _second_order(self, targets: Tensor, f: Tensor) -> SecondOrder:
        breaks, comes = self._breaks(targets)
        p = f.sigmoid()
        gradient = torch.where(comes, breaks.to(p) - p, 0.0)
        return SecondOrder(
            self.unchecked_log_prob(targets, f), gradient, diagonal_blocks(torch.where(comes, p * (1 - p), 0.0))
        )

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f) for f (..., K - 1, N), a Categorical distribution with batch shape (..., N)."""
        return _categorical(logsigmoid(function_samples), logsigmoid(-function_samples))

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return the Categorical distribution of y at the marginals of function_dist; small probabilities are exact."""
        mean, variance = self._marginals(function_dist)
        covariance = correlated_blocks(function_dist)
        if covariance is not None:
            labels = (torch.full_like(mean.select(-2, 0), label) for label in range(self.num_classes))
            log_probs = [self.joint_log_density(label, mean, covariance) for label in labels]
            return Categorical(logits=torch.stack(log_probs, -1))
        stops, passes = (
            BernoulliLogitLikelihood().log_density(label, mean, variance)
            for label in (torch.ones_like(mean), torch.zeros_like(mean))
        )
        return _categorical(stops, passes)


def _categorical(stops: Tensor, passes: Tensor) -> Distribution:  # (..., K - 1, N) each
    """Return the distribution of where the stick breaks, from the log probabilities of every choice."""
    log_probs = pad(stops.mT, (0, 1)) + pad(passes.mT.cumsum(-1), (1, 0))
    return Categorical(logits=log_probs)
