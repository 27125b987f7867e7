r"""Predictive distributions of data with D correlated Gaussian latents each: p(y) = int p(y | f) N(f | m, V) df."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpytorch.distributions import Distribution
from torch import Tensor
from torch.distributions import constraints

from gpext.distributions.correlated_latents import draw_latents, in_every


class LatentMixture(Distribution):
    """What the mixtures of every likelihood share: latents, density, and repetition over a batch.

    Args:
        latent_mean: m (..., D, N).
        latent_covariance: V (..., D, D, N), positive semidefinite.
        log_density: maps (value, mean, covariance) to log p(value) (..., N).
        event_shape: of a datum.
        validate_args: as in torch.distributions.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(
        self,
        latent_mean: Tensor,
        latent_covariance: Tensor,
        log_density: Callable[[Tensor, Tensor, Tensor], Tensor],
        event_shape: tuple[int, ...] = (),
        validate_args: bool | None = None,
    ) -> None:
        self.latent_mean, self.latent_covariance, self._log_density = latent_mean, latent_covariance, log_density
        super().__init__(latent_mean.select(-2, 0).shape, torch.Size(event_shape), validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: LatentMixture | None = None) -> LatentMixture:
        """The same distribution, repeated over `batch_shape`."""
        new = type(self).__new__(type(self)) if _instance is None else _instance
        new.__dict__.update(self.__dict__)
        *batch, size = new._batch_shape = torch.Size(batch_shape)
        D = self.latent_mean.size(-2)
        new.latent_mean = self.latent_mean.expand(*batch, D, size)
        new.latent_covariance = self.latent_covariance.expand(*batch, D, D, size)
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """Log p(value) of values whose shape ends in that of an event, and otherwise broadcasts with the batch's."""
        if self._validate_args:
            self._validate_sample(value)
        return self._log_density(*self._with_latents(value))

    def _with_latents(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return values, means and covariances of one batch shape."""
        shape = value.shape[: value.dim() - len(self.event_shape)]
        mean, covariance = in_every(shape, self.latent_mean, self.latent_covariance)
        return value.expand(mean.select(-2, 0).shape + self.event_shape), mean, covariance

    def _draw_latents(self, sample_shape: torch.Size | tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Return draws (*sample_shape, ..., D, N) of f."""
        return draw_latents(self.latent_mean, self.latent_covariance, torch.Size(sample_shape), generator)
