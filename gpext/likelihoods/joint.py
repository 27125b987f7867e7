"""Likelihoods of several latents whose integrals see the correlations of the latents of a datum."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from torch import Tensor

from gpext.likelihoods.curvature import BlockCurvature, Curvature
from gpext.likelihoods.latent import LatentLikelihood
from gpext.quadrature import SecondOrder, joint_expectation, log_joint_expectation


class JointLikelihood(LatentLikelihood):
    """The base of likelihoods of D latents that say their curvature; Laplace and Taylor serve them.

    Where the latents of a datum are correlated, as in a MultitaskMultivariateNormal, their covariances (..., D, D, N)
    are what counts; those of independent latents are diagonal.
    """

    num_latents: int

    @abstractmethod
    def curvature(self, targets: Tensor, f: Tensor) -> Curvature | BlockCurvature:
        """Return log p(y | f) to second order at f (..., D, N).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """

    def joint_log_density(self, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, covariance) df (..., N); see `gpext.quadrature.log_joint_expectation`.

        Args:
            targets: as :meth:`log_prob`.
            mean: (..., D, N).
            covariance: of the latents of each datum (..., D, D, N).

        Raises:
            TypeError, ValueError: as :meth:`check`; a covariance is not positive semidefinite.
        """
        self.check(targets)
        return log_joint_expectation(
            lambda f: self._log_prob(targets, f), lambda f: self._second_order(targets, f), mean, covariance
        )

    def joint_expected_log_density(self, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, covariance), (..., N); arguments as :meth:`joint_log_density`.

        Raises:
            TypeError, ValueError: as :meth:`joint_log_density`.
        """
        self.check(targets)
        return joint_expectation(lambda f: self._log_prob(targets, f), mean, covariance)

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, variance) df (..., N) for independent latents (..., D, N).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        return self.joint_log_density(targets, mean, diagonal_blocks(variance))

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, variance), (..., N), for independent latents (..., D, N).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        return self.joint_expected_log_density(targets, mean, diagonal_blocks(variance))

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return E[log p(y | f)] for each datum, (..., N), its latents as correlated as function_dist says.

        Raises:
            TypeError, ValueError: as :meth:`LatentLikelihood.expected_log_prob`.
        """
        mean, variance = self._fitting_marginals(observations, function_dist)
        covariance = correlated_blocks(function_dist)
        if covariance is None:
            return self.expected_log_density(observations, mean, variance)
        return self.joint_expected_log_density(observations, mean, covariance)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        r"""Return :math:`\log \int p(y_i | f) q(f) df` (..., N), the latents as correlated as function_dist says.

        Raises:
            TypeError, ValueError: as :meth:`LatentLikelihood.log_marginal`.
        """
        mean, variance = self._fitting_marginals(observations, function_dist)
        covariance = correlated_blocks(function_dist)
        if covariance is None:
            return self.log_density(observations, mean, variance)
        return self.joint_log_density(observations, mean, covariance)

    def _blocks(self, function_dist: MultivariateNormal) -> tuple[Tensor, Tensor]:
        """Return means (..., D, N) and covariances (..., D, D, N) of the latents of each datum."""
        mean, variance = self._marginals(function_dist)
        covariance = correlated_blocks(function_dist)
        return mean, diagonal_blocks(variance) if covariance is None else covariance

    def _second_order(self, targets: Tensor, f: Tensor) -> SecondOrder:
        found = self.curvature(targets, f)
        return SecondOrder(found.log_prob, found.gradient, found.blocks)


def diagonal_blocks(variance: Tensor) -> Tensor:
    """Return the covariances (..., D, D, N) of independent latents (..., D, N)."""
    return torch.diag_embed(variance.mT).movedim(-3, -1)


def correlated_blocks(function_dist: MultivariateNormal) -> Tensor | None:
    """Return the covariances (..., D, D, N) of the latents of each datum, or None where all are uncorrelated."""
    if not isinstance(function_dist, MultitaskMultivariateNormal):
        return None
    num_data, num_tasks = function_dist.event_shape
    datum, task = torch.arange(num_data), torch.arange(num_tasks).unsqueeze(-1)
    index = datum * num_tasks + task if function_dist._interleaved else task * num_data + datum  # (D, N)
    rows, columns = (
        t.reshape(-1).to(function_dist.loc.device) for t in torch.broadcast_tensors(index.unsqueeze(1), index)
    )
    blocks = function_dist.lazy_covariance_matrix[..., rows, columns]
    blocks = blocks.view(*blocks.shape[:-1], num_tasks, num_tasks, num_data)
    across = ~torch.eye(num_tasks, dtype=torch.bool, device=blocks.device).unsqueeze(-1)
    return blocks if bool(((blocks != 0) & across).any()) else None
