r"""The predictive distribution on the simplex: a Dirichlet whose parameters are functions of correlated Gaussians.

p(y) = int Dir(y | theta(f)) N(f | m, V) df,     E[y] = E[theta / S],   S = sum_j theta_j
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.distributions import constraints

from gpext.distributions.predictive.latent_mixture import LatentMixture, of_the_others, total_variance
from gpext.distributions.predictive.newton_quantiles import check_probability
from gpext.distributions.predictive.simplex_region import SimplexRegion, draw_log_shares, log_average
from gpext.quadrature import in_parts, joint_expectation

_DRAWS_A_COMPONENT = 4


class CompoundDirichlet(LatentMixture):
    """Proportions y, event shape (D,), batch shape (..., N).

    Args:
        latent_mean: m (..., D, N).
        latent_covariance: V (..., D, D, N), positive semidefinite.
        log_concentration: log theta, maps f (..., D, N) to the logarithms (..., D, N) of the parameters.
        log_density: maps (value, mean, covariance) to log p(value) (..., N).
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import DirichletLikelihood
        >>> f = MultivariateNormal(torch.zeros(3, 1).double(), torch.eye(1).double().expand(3, 1, 1))
        >>> DirichletLikelihood(3)(f).mean
        tensor([[0.3333, 0.3333, 0.3333]], dtype=torch.float64)
    """

    support = constraints.simplex

    def __init__(
        self,
        latent_mean: Tensor,
        latent_covariance: Tensor,
        log_concentration: Callable[[Tensor], Tensor],
        log_density: Callable[[Tensor, Tensor, Tensor], Tensor],
        validate_args: bool | None = None,
    ) -> None:
        self._log_concentration = log_concentration
        parts = latent_mean.shape[-2:-1]
        super().__init__(latent_mean, latent_covariance, log_density, parts, validate_args)

    @property
    def mean(self) -> Tensor:
        """E[y] (..., N, D)."""
        mean = in_parts(partial(joint_expectation, lambda f: self._moments(f)[0]), *self._latents).mT
        return mean.to(self.latent_mean.dtype)

    @property
    def variance(self) -> Tensor:
        """The variances of y_j (..., N, D): of m_j = theta_j / S, and E[m_j (1 - m_j) / (S + 1)] of y_j given f."""
        return total_variance(self._moments, *self._latents).mT.to(self.latent_mean.dtype)

    @property
    def _latents(self) -> tuple[Tensor, Tensor]:
        return self.latent_mean.double(), self.latent_covariance.double()  # theta / S cancels in float32

    def _moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return E(y | f) and Var(y | f) (..., D, N)."""
        log_theta = self._log_concentration(f)
        log_total = log_theta.logsumexp(-2, keepdim=True)
        mean = (log_theta - log_total).exp()
        return mean, mean * of_the_others(mean, -2) / (log_total.exp() + 1)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape + (D,)."""
        with torch.no_grad():
            return draw_log_shares(self._draw_log_concentration(sample_shape, generator), generator).exp()

    def credible_region(
        self, probability: float, *, num_draws: int = 4096, generator: torch.Generator | None = None
    ) -> SimplexRegion:
        """Return the regions of highest density that have a probability, one a datum, from draws.

        Args:
            probability: strictly between 0 and 1.
            num_draws: S, of y; the probability of a region has the standard error sqrt(P (1 - P) / S). A quarter as
                many draws of the latents are the density.
            generator: of the draws; torch's global one by default.

        Raises:
            ValueError: the probability is not strictly between 0 and 1, or fewer than 100 draws.
        """
        check_probability(probability, self.latent_mean)
        if num_draws < 100:
            raise ValueError(f"num_draws must be at least 100; got {num_draws}.")
        with torch.no_grad():
            concentration = self._draw_log_concentration((num_draws // _DRAWS_A_COMPONENT,), generator).exp()
            concentration = concentration.clamp_min(torch.finfo(concentration.dtype).tiny)  # 0 has no density
            log_y = draw_log_shares(self._draw_log_concentration((num_draws,), generator), generator)
            density = log_average(concentration, log_y)
            below = max(math.floor((1 - probability) * (num_draws + 1)), 1)
            threshold = density.kthvalue(below, 0).values
        error = math.sqrt(probability * (1 - probability) / num_draws)
        return SimplexRegion(concentration, threshold, probability, error)

    def _draw_log_concentration(self, sample_shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Return log theta of draws of the latents, sample_shape + batch_shape + (D,)."""
        return self._log_concentration(self._draw_latents(sample_shape, generator)).mT
