"""Likelihoods of several latents whose integrals see the correlations of the latents of a datum."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator.operators import (
    BlockDiagLinearOperator,
    LinearOperator,
    MatmulLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from gpext.distributions.predictive.correlated_latents import in_every
from gpext.likelihoods.curvature import BlockCurvature, Curvature, diagonal_blocks
from gpext.likelihoods.latent import LatentLikelihood
from gpext.linalg.lazy_covariance import LazyCovariance
from gpext.quadrature import (
    JointMoments,
    SecondOrder,
    in_parts,
    independent_expectation,
    joint_expectation,
    log_joint_expectation,
)

Integral = Callable[[Tensor, Tensor, Tensor], Tensor]  # of targets, means and variances or covariances

_SMALL_VARIANCE = 1e-4  # below, `independent_expectation` loses the digits of its derivatives


class CorrelatedLikelihood(LatentLikelihood):
    """A likelihood of D latent functions whose predictive density depends on the correlations within a datum."""

    @abstractmethod
    def joint_log_density(self, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return log p(y_i) (..., N) under N(m_i, V_i), means (..., D, N) and covariances (..., D, D, N)."""

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        r"""Return :math:`\log \int p(y_i | f) q(f) df` (..., N), with the correlations of the latents in function_dist.

        Raises:
            TypeError, ValueError: as :meth:`LatentLikelihood.log_marginal`.
        """
        return self._by_latents(observations, function_dist, self.log_density, self.joint_log_density)

    def _by_latents(
        self, observations: Tensor, function_dist: MultivariateNormal, independent: Integral, correlated: Integral
    ) -> Tensor:
        """Return one integral given variances (..., D, N), or the other given blocks (..., D, D, N) where there are."""
        mean, variance = self._fitting_marginals(observations, function_dist)
        covariance = correlated_blocks(function_dist)
        if covariance is None:
            return independent(observations, mean, variance)
        return correlated(observations, mean, covariance)


class JointLikelihood(CorrelatedLikelihood):
    """The base of likelihoods of D latents that say their curvature; Laplace and Taylor serve them.

    Where the latents of a datum are correlated, as in a MultitaskMultivariateNormal, their covariances (..., D, D, N)
    are what counts; those of independent latents are diagonal.

    Example:
        >>> from gpext.likelihoods import VonMisesLikelihood
        >>> isinstance(VonMisesLikelihood(), JointLikelihood), VonMisesLikelihood().num_latents
        (True, 2)
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

        def integral(m: Tensor, V: Tensor, y: Tensor) -> Tensor:
            return log_joint_expectation(
                lambda f: self.unchecked_log_prob(y, f), lambda f: self._second_order(y, f), m, V
            )

        return self._in_parts(integral, targets, mean, covariance)

    def joint_tilted_moments(self, targets: Tensor, mean: Tensor, covariance: Tensor, power: float) -> JointMoments:
        r"""Return the moments of N(f | mean, covariance) p(y | f)^power, for EP.

        By the derivatives of log Z^ in the mean m and the covariance V: with a = d log Z^ / dm and symmetric
        S = d log Z^ / dV, m^ = m + V a and V^ = V + V (2 S - a a') V. Arguments as :meth:`joint_log_density`.
        """
        wanted = torch.is_grad_enabled()
        with torch.enable_grad():
            m, V = mean.detach().requires_grad_(), covariance.detach().requires_grad_()
            log_z = self.joint_log_density(targets, m, V) if power == 1 else self._log_of_power(targets, m, V, power)
            by_mean, by_covariance = torch.autograd.grad(log_z.sum(), (m, V), retain_graph=wanted)
        with torch.no_grad():
            V, S = covariance.movedim(-1, -3), by_covariance.movedim(-1, -3)
            a = by_mean.mT.unsqueeze(-1)
            moved = mean + (V @ a).squeeze(-1).mT
            tilted = V + V @ (S + S.mT - a @ a.mT) @ V
        return JointMoments(log_z if wanted else log_z.detach(), moved, tilted.movedim(-3, -1))

    def _log_of_power(self, targets: Tensor, mean: Tensor, covariance: Tensor, power: float) -> Tensor:
        def integral(m: Tensor, V: Tensor, y: Tensor) -> Tensor:
            def expand(f: Tensor) -> SecondOrder:
                found = self._second_order(y, f)
                return SecondOrder(power * found.value, power * found.gradient, power * found.precision)

            return log_joint_expectation(lambda f: power * self.unchecked_log_prob(y, f), expand, m, V)

        return self._in_parts(integral, targets, mean, covariance)

    def joint_expected_log_density(self, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, covariance), (..., N); arguments as :meth:`joint_log_density`.

        Raises:
            TypeError, ValueError: as :meth:`joint_log_density`.
        """
        self.check(targets)

        def integral(m: Tensor, V: Tensor, y: Tensor) -> Tensor:
            return joint_expectation(lambda f: self.unchecked_log_prob(y, f), m, V)

        return self._in_parts(integral, targets, mean, covariance)

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
        self.check(targets)
        learns = any(parameter.requires_grad for parameter in self.parameters())

        def integral(m: Tensor, V: Tensor, y: Tensor) -> Tensor:
            is_small = bool((V.diagonal(dim1=-3, dim2=-2) < _SMALL_VARIANCE).any())
            by_graph = torch.is_grad_enabled() and (learns or is_small)
            expectation = joint_expectation if by_graph else independent_expectation
            return expectation(lambda f: self.unchecked_log_prob(y, f), m, V)

        return self._in_parts(integral, targets, mean, diagonal_blocks(variance))

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return E[log p(y | f)] for each datum, (..., N), its latents as correlated as function_dist says.

        Raises:
            TypeError, ValueError: as :meth:`LatentLikelihood.expected_log_prob`.
        """
        integrals = self.expected_log_density, self.joint_expected_log_density
        return self._by_latents(observations, function_dist, *integrals)

    def _blocks(self, function_dist: MultivariateNormal) -> tuple[Tensor, Tensor]:
        """Return means (..., D, N) and covariances (..., D, D, N) of the latents of each datum."""
        mean, variance = self._marginals(function_dist)
        covariance = correlated_blocks(function_dist)
        return mean, diagonal_blocks(variance) if covariance is None else covariance

    def _in_parts(self, integral: Callable[..., Tensor], targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        mean, covariance = in_every(self.datum_shape(targets), mean, covariance)
        return in_parts(integral, mean, covariance, targets, -1 - self.target_dims(targets))

    def _second_order(self, targets: Tensor, f: Tensor) -> SecondOrder:
        found = self.curvature(targets, f)
        return SecondOrder(found.log_prob, found.gradient, found.blocks)


def correlated_blocks(function_dist: MultivariateNormal) -> Tensor | None:
    """Return the covariances (..., D, D, N) of the latents of each datum, or None where all are uncorrelated."""
    if not isinstance(function_dist, MultitaskMultivariateNormal):
        return None
    num_data, num_tasks = function_dist.event_shape
    operator = function_dist.lazy_covariance_matrix
    if function_dist._interleaved:
        dense = operator.to_dense().contiguous()
        blocks = dense.view(*dense.shape[:-2], num_data, num_tasks, num_data, num_tasks)
        blocks = blocks.diagonal(dim1=-4, dim2=-2)
    else:
        blocks = _blocks_of(operator, num_tasks)
    across = ~torch.eye(num_tasks, dtype=torch.bool, device=blocks.device).unsqueeze(-1)
    return blocks if bool(((blocks != 0) & across).any()) else None


def _blocks_of(operator: LinearOperator, num_tasks: int) -> Tensor:
    """Return the blocks (..., D, D, N) of a covariance (..., D N, D N), latent by latent, without making it dense.

    Only the operators that the posteriors of `gpext` are made of are known; any other is made dense.
    """
    if isinstance(operator, SumLinearOperator):
        return functools.reduce(torch.add, (_blocks_of(part, num_tasks) for part in operator.linear_ops))
    if isinstance(operator, BlockDiagLinearOperator) and operator.base_linear_op.size(-3) == num_tasks:
        return diagonal_blocks(operator.base_linear_op.diagonal(dim1=-2, dim2=-1))
    if isinstance(operator, LazyCovariance) and operator.blocks is not None:
        return operator.blocks
    if isinstance(operator, MatmulLinearOperator):
        left, right = operator.left_linear_op.to_dense(), operator.right_linear_op.to_dense().mT
        left, right = (
            t.view(*t.shape[:-2], num_tasks, -1, t.size(-1)) for t in (left.contiguous(), right.contiguous())
        )
        return torch.einsum("...dnk,...enk->...den", left, right)
    dense = operator.to_dense().contiguous()
    size = dense.size(-1) // num_tasks
    return dense.view(*dense.shape[:-2], num_tasks, size, num_tasks, size).diagonal(dim1=-3, dim2=-1)
