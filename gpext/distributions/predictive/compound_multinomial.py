r"""The predictive distribution of the counts of n trials whose class probabilities pi are those of a softmax.

Trials are exchangeable, so the first two moments are the probabilities of one trial and of two that agree:

    E[y_k] = n E[pi_k],     Var[y_k] = n E[pi_k] E[1 - pi_k] + n (n - 1) Var[pi_k]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import constraints

from gpext.distributions.predictive.latent_mixture import LatentMixture, of_the_others


class CompoundMultinomial(LatentMixture):
    """Counts y of `total_count` trials, event shape (K,), batch shape (..., N).

    Args:
        total_count: n.
        latent_mean: m (..., K, N) of the logits.
        latent_covariance: V (..., K, K, N), positive semidefinite.
        log_density: maps (counts of any total, mean, covariance) to their log probability (..., N).
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import MultinomialLogitLikelihood
        >>> f = MultivariateNormal(torch.zeros(3, 1).double(), torch.eye(1).double().expand(3, 1, 1))
        >>> MultinomialLogitLikelihood(3, total_count=6)(f).mean
        tensor([[2.0000, 2.0000, 2.0000]], dtype=torch.float64)
    """

    def __init__(
        self,
        total_count: int,
        latent_mean: Tensor,
        latent_covariance: Tensor,
        log_density: Callable[[Tensor, Tensor, Tensor], Tensor],
        validate_args: bool | None = None,
    ) -> None:
        self.total_count = total_count
        classes = latent_mean.shape[-2:-1]
        super().__init__(latent_mean, latent_covariance, log_density, classes, validate_args)

    @property
    def support(self) -> constraints.Constraint:
        """Counts that sum to `total_count`."""
        return constraints.multinomial(self.total_count)

    @property
    def probs(self) -> Tensor:
        """E[pi] (..., N, K), the probabilities of the classes in one trial."""
        return self._probability_of(1).to(self.latent_mean.dtype)

    @property
    def mean(self) -> Tensor:
        """E[y] (..., N, K)."""
        return self.total_count * self.probs

    @property
    def variance(self) -> Tensor:
        """The variances of y_k (..., N, K)."""
        n, mean = self.total_count, self._probability_of(1)
        # Rounding alone makes this negative, where pi_k hardly varies and the other term is all there is.
        variance = (self._probability_of(2) - mean.square()).clamp(min=0)
        return (n * mean * of_the_others(mean, -1) + n * (n - 1) * variance).to(self.latent_mean.dtype)

    def _probability_of(self, times: int) -> Tensor:
        """Return E[pi_k^times] (..., N, K), float64: the probability that so many trials have all come out as k."""
        mean, covariance = self.latent_mean.double(), self.latent_covariance.double()  # float32 cancels in the variance
        counts = times * torch.eye(self.event_shape[0], dtype=mean.dtype, device=mean.device)
        shape = self._extended_shape()
        return torch.stack([self._log_density(row.expand(shape), mean, covariance) for row in counts], -1).exp()

    def _validate_sample(self, value: Tensor) -> None:
        super()._validate_sample(value)
        if bool((value.sum(-1) != self.total_count).any()):  # torch takes fewer for counts, too
            raise ValueError(f"the counts of each datum must sum to total_count={self.total_count}.")

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape + (K,)."""
        with torch.no_grad():
            logits = self._draw_latents(sample_shape, generator).mT
            probs = logits.softmax(-1).flatten(0, -2)
            trials = torch.multinomial(probs, self.total_count, replacement=True, generator=generator)
            return torch.nn.functional.one_hot(trials, logits.size(-1)).sum(-2).to(logits).view(logits.shape)
