"""Classes: torch's Categorical with draws from a generator, ordered ones, and logarithms of small probabilities."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpytorch.distributions import base_distributions
from torch import Tensor

from gpext.distributions.drawing import drawn_from
from gpext.distributions.predictive.correlated_latents import in_every

_RARE = 1e-6  # a probability below which its logarithm is integrated by itself; torch cuts logarithms off at rounding


class Categorical(base_distributions.Categorical):
    """Categorical whose `sample` takes a generator.

    Example:
        >>> import torch
        >>> Categorical(probs=torch.tensor([0.0, 1.0])).sample(generator=torch.Generator().manual_seed(0))
        tensor(1)
    """

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape; from torch's global generator by default."""
        with drawn_from(generator):
            return super().sample(torch.Size(sample_shape))


class OrderedCategorical(Categorical):
    """Categorical of classes 0, ..., K - 1 whose order means something: `cdf`, `icdf` and `quantile`.

    Example:
        >>> import torch
        >>> OrderedCategorical(probs=torch.tensor([0.25, 0.5, 0.25])).cdf(torch.tensor(1))
        tensor(0.7500)
    """

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value), for values that broadcast with the batch shape."""
        if self._validate_args:
            self._validate_sample(value)
        shape = torch.broadcast_shapes(value.shape, self.batch_shape)
        below = self.probs.cumsum(-1).clamp(max=1).expand(*shape, -1)
        return below.gather(-1, value.long().expand(shape).unsqueeze(-1)).squeeze(-1)

    def icdf(self, value: Tensor) -> Tensor:
        """The smallest class k with P(Y <= k) >= value, as an integer."""
        within = self.probs.cumsum(-1)[..., :-1] < value.unsqueeze(-1)  # all of it is in the last class
        return within.sum(-1)

    def quantile(self, q: Tensor | float) -> Tensor:
        """The same as `icdf`."""
        return self.icdf(torch.as_tensor(q, dtype=self.probs.dtype, device=self.probs.device))


class CompoundCategorical(Categorical):
    """The classes of D Gaussian latents a datum, batch shape (..., N): `log_prob` is exact however small it is.

    Args:
        probs: of the classes (..., N, K).
        latent_mean: m (..., D, N).
        latent_covariance: V (..., D, D, N), positive semidefinite.
        log_density: maps (classes, mean, covariance) to their log probabilities (..., N).
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import MultinomialLogitLikelihood
        >>> f = MultivariateNormal(torch.zeros(3, 1).double(), torch.eye(1).double().expand(3, 1, 1))
        >>> MultinomialLogitLikelihood(3)(f).probs
        tensor([[0.3333, 0.3333, 0.3333]], dtype=torch.float64)
    """

    def __init__(
        self,
        probs: Tensor,
        latent_mean: Tensor,
        latent_covariance: Tensor,
        log_density: Callable[[Tensor, Tensor, Tensor], Tensor],
        validate_args: bool | None = None,
    ) -> None:
        self.latent_mean, self.latent_covariance, self._log_density = latent_mean, latent_covariance, log_density
        super().__init__(probs=probs, validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: CompoundCategorical | None = None) -> CompoundCategorical:
        """The same distribution, repeated over `batch_shape`."""
        latents = in_every(torch.Size(batch_shape), self.latent_mean, self.latent_covariance)
        new = CompoundCategorical(self.probs.expand(*batch_shape, -1), *latents, self._log_density, False)
        new._validate_args = self._validate_args
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """Log probability of classes that broadcast with the batch shape."""
        if self._validate_args:
            self._validate_sample(value)
        shape = torch.broadcast_shapes(value.shape, self.batch_shape)
        value = value.expand(shape)
        chosen = self.probs.expand(*shape, -1).gather(-1, value.long().unsqueeze(-1)).squeeze(-1)
        rare = chosen < _RARE
        found = torch.where(rare, 1.0, chosen).log()
        if not bool(rare.any()):
            return found
        index = rare.nonzero(as_tuple=True)
        mean, covariance = in_every(shape, self.latent_mean, self.latent_covariance)
        mean, covariance = mean.mT[index].mT, covariance.movedim(-1, -3)[index].movedim(0, -1)
        return found.index_put(index, self._log_density(value[index], mean, covariance).to(found.dtype))
