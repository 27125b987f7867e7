r"""Predictive distributions of data with D correlated Gaussian latents each: p(y) = int p(y | f) N(f | m, V) df."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpytorch.distributions import Distribution
from torch import Tensor
from torch.distributions import constraints

from gpext.distributions.predictive.correlated_latents import draw_latents, in_every
from gpext.quadrature import in_parts, joint_expectation


class LatentMixture(Distribution):
    """The base of predictive mixtures over Gaussian latents: latents, density, and repetition over a batch.

    Args:
        latent_mean: m (..., D, N).
        latent_covariance: V (..., D, D, N), positive semidefinite.
        log_density: maps (value, mean, covariance) to log p(value) (..., N).
        event_shape: of a datum.
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> class Normal(LatentMixture):  # y = f + noise of variance 1
        ...     support = torch.distributions.constraints.real
        >>> def log_density(y, mean, covariance):
        ...     scale = (covariance[..., 0, 0, :] + 1).sqrt()
        ...     return torch.distributions.Normal(mean[..., 0, :], scale).log_prob(y)
        >>> Normal(torch.zeros(1, 2), torch.ones(1, 1, 2), log_density).log_prob(torch.zeros(2))
        tensor([-1.2655, -1.2655])
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


def total_variance(
    moments: Callable[[Tensor], tuple[Tensor, Tensor]], latent_mean: Tensor, latent_covariance: Tensor
) -> Tensor:
    """Return E[Var(y | f)] + Var[E(y | f)] (..., C, N); infinite moments stay so.

    Args:
        moments: maps f (..., D, N) to E(y | f) and Var(y | f), (..., C, N) each.
        latent_mean: m (..., D, N).
        latent_covariance: V (..., D, D, N).
    """

    def of_part(mean: Tensor, covariance: Tensor) -> Tensor:
        # Differences from what the latents' means predict: those of latents that hardly vary keep their digits.
        centre = moments(mean)[0]
        centre = torch.where(centre.isfinite(), centre, 0)

        def first_and_second(f: Tensor) -> Tensor:
            expected, variance = moments(f)
            difference = expected - centre
            return torch.cat([difference, variance + difference.square()], -2)

        first, second = joint_expectation(first_and_second, mean, covariance).chunk(2, -2)
        return torch.where(second.isinf(), second, second - first.square())

    return in_parts(of_part, latent_mean, latent_covariance)


def of_the_others(shares: Tensor, dim: int) -> Tensor:
    """Return 1 - shares along `dim`, of shares that sum to one, as the sum of the others: 1 - 1e-20 has no digits."""
    others = 1 - torch.eye(shares.size(dim), dtype=shares.dtype, device=shares.device)
    return (shares.movedim(dim, -1) @ others).movedim(-1, dim)
