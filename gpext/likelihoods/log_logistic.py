"""Log-logistic observations: times with a hazard that rises and falls again."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import logsigmoid

from gpext.distributions import LogLogistic
from gpext.likelihoods.latent import STRIP
from gpext.likelihoods.positive import PositiveLikelihood


class LogLogisticLikelihood(PositiveLikelihood):
    r"""Times with median e^f and heavy tails: :math:`P(Y > y | f) = 1 / (1 + (y e^{-f})^k)`, k the `shape`.

    The hazard rises to a maximum and falls for k > 1, and falls throughout otherwise.

    Example:
        >>> import torch
        >>> likelihood = LogLogisticLikelihood().initialize(shape=1.0)
        >>> likelihood.log_prob(torch.tensor([1.0]), torch.zeros(1)).detach()
        tensor([-1.3863])
    """

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        log_y, d, k, dtype = self.terms(targets, f)
        return (k.log() - log_y + logsigmoid(k * d) + logsigmoid(-k * d)).to(dtype)

    def strip(self, targets: Tensor) -> Tensor:
        """Return half the width of a strip in which the logistic function of k f has no poles."""
        return (STRIP / self.shape.detach()).expand(targets.shape)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> LogLogistic:
        """Return p(y | f)."""
        return LogLogistic(function_samples, self.shape.to(function_samples))
