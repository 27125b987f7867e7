r"""Condition D independent latents on sites whose precision is any D x D block a datum, as one dense system.

With U_i = Q_i diag(lambda_i) Q_i' the rotated latents g_i = Q_i' f_i have diagonal sites of either sign, and the dense
posterior of all N D of them serves: O((N D)^3) time, O((N D)^2) memory. Where the blocks are diagonal plus rank one,
`gpext.posteriors.condition_coupled` costs O(D N^3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from linear_operator import to_linear_operator
from linear_operator.operators import BlockDiagLinearOperator, LinearOperator
from torch import Tensor

from gpext.distributions import MultitaskLatentNormal
from gpext.posteriors.dense import DensePosterior, condition_dense
from gpext.posteriors.joint import JointPosterior
from gpext.sites import BlockSites, GaussianSites


@dataclass(frozen=True)
class BlockPosterior(JointPosterior):
    """D Gaussian priors over N latent values each, conditioned on sites that couple them in any way; float64.

    Example:
        >>> import torch
        >>> from gpext.posteriors import condition_blocks
        >>> from gpext.sites import BlockSites
        >>> one = torch.ones(2, 1).double()
        >>> U = torch.tensor([[2.0, 1.0], [1.0, 2.0]]).double().unsqueeze(-1)
        >>> posterior = condition_blocks(0 * one, torch.eye(1).double().expand(2, 1, 1), BlockSites(one, U))
        >>> posterior.blocks.squeeze(-1)  # (I + U)^-1
        tensor([[ 0.3750, -0.1250],
                [-0.1250,  0.3750]], dtype=torch.float64)
    """

    sites: BlockSites
    prior_mean: Tensor  # (..., D, N)
    rotation: Tensor  # Q (..., N, D, D), the eigenvectors in columns
    rotated: DensePosterior  # of g (..., D N), latent by latent

    @property
    def positive_definite(self) -> Tensor:
        """Whether there is such a posterior (...)."""
        return self.rotated.positive_definite

    @cached_property
    def mean(self) -> Tensor:
        """The posterior means (..., D, N)."""
        return _back(self.rotation, self.rotated.mean)

    @cached_property
    def weights(self) -> Tensor:
        """K^-1 (m - mu) (..., D, N)."""
        return _back(self.rotation, self.rotated.weights)

    @cached_property
    def blocks(self) -> Tensor:
        """The posterior covariance of the latents of each datum (..., D, D, N)."""
        by_datum = self._by_latents(self.rotated.covariance).diagonal(dim1=-3, dim2=-1)  # (..., D, D, N)
        Q = self.rotation
        return (Q @ by_datum.movedim(-1, -3) @ Q.mT).movedim(-3, -1)

    @property
    def log_det(self) -> Tensor:
        """log|I + K U| (...)."""
        return self.rotated.log_det

    @property
    def log_normalizer(self) -> Tensor:
        r"""The evidence of the sites (...), :math:`A = \log\int N(f|\mu,K) \prod_i t_i(f_i) df`."""
        return self.rotated.log_normalizer

    @property
    def gradient(self) -> tuple[Tensor, Tensor]:
        """Derivatives of `log_normalizer` at fixed sites in the prior means (..., D, N) and covariances (..., D, N, N).

        a, and (a a' - R_dd) / 2, R rotated back.
        """
        weights, Q = self.weights, self.rotation
        response = torch.einsum("...ida,...aibj,...jdb->...dij", Q, self._by_latents(self.rotated.response), Q)
        return weights, 0.5 * (weights.unsqueeze(-1) * weights.unsqueeze(-2) - response)

    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return V vector (..., D, N)."""
        return _back(self.rotation, self.rotated.covariance_times(_turn(self.rotation, vector)))

    def distribution(self, dtype: torch.dtype) -> MultitaskMultivariateNormal:
        """Return the posterior of all latents at the training inputs."""
        Q = self.rotation
        V = torch.einsum("...ida,...aibj,...jeb->...diej", Q, self._by_latents(self.rotated.covariance), Q)
        covariance = to_linear_operator(V.flatten(-4, -3).flatten(-2).to(dtype))
        return MultitaskLatentNormal(self.mean.to(dtype).mT, covariance, interleaved=False)

    def predict(
        self, test_mean: Tensor, cross_covariance: Tensor, test_covariance: Tensor | LinearOperator
    ) -> MultitaskMultivariateNormal:
        """Return the posterior of all latents at S new inputs, coupled, its covariance lazily.

        Args:
            test_mean: (..., D, S) prior means there.
            cross_covariance: (..., D, N, S) prior covariances of the training and the new values.
            test_covariance: (..., D, S, S) prior covariances there.
        """
        *batch, size = test_mean.shape
        cross = cross_covariance.double().expand(*batch, -1, -1)
        cross = torch.einsum("...ida,...dis->...aids", self.rotation, cross)
        alone = BlockDiagLinearOperator(to_linear_operator(test_covariance).expand(*batch, size, size))
        joint = self.rotated.predict(test_mean.flatten(-2), cross.flatten(-4, -3).flatten(-2), alone)
        mean = joint.mean.view(*joint.mean.shape[:-1], *test_mean.shape[-2:]).mT
        return MultitaskLatentNormal(mean, joint.lazy_covariance_matrix, interleaved=False)

    def _by_latents(self, matrix: Tensor) -> Tensor:
        """Return a matrix (..., D N, D N) as (..., D, N, D, N)."""
        shape = self.prior_mean.shape[-2:]
        return matrix.view(*matrix.shape[:-2], *shape, *shape)


def condition_blocks(prior_mean: Tensor, prior_covariance: Tensor, sites: BlockSites) -> BlockPosterior:
    """Condition D independent priors on sites of any D x D precision.

    Args:
        prior_mean: mu (..., D, N).
        prior_covariance: K (..., D, N, N), or one (N, N) of all latents, symmetric positive semidefinite; may be
            singular.
        sites: (..., D, N).

    Example:
        >>> import torch
        >>> from gpext.sites import BlockSites
        >>> one = torch.ones(2, 1).double()
        >>> U = torch.tensor([[2.0, 1.0], [1.0, 2.0]]).double().unsqueeze(-1)
        >>> condition_blocks(0 * one, torch.eye(1).double().expand(2, 1, 1), BlockSites(one, U)).mean.mT
        tensor([[0.2500, 0.2500]], dtype=torch.float64)
    """
    sites, mean = sites.to(torch.float64), prior_mean.double()
    values, Q = torch.linalg.eigh(sites.precision.movedim(-1, -3))
    K = prior_covariance.double()
    K = K.expand(*torch.broadcast_shapes(mean.shape[:-1], K.shape[:-2]), *K.shape[-2:])
    joint = torch.einsum("...ida,...dij,...jdb->...aibj", Q, K, Q)
    joint = joint.flatten(-4, -3).flatten(-2)
    rotated = GaussianSites(_turn(Q, sites.shift), values.mT.flatten(-2))
    return BlockPosterior(sites, mean, Q, condition_dense(_turn(Q, mean), 0.5 * (joint + joint.mT), rotated))


def _turn(rotation: Tensor, f: Tensor) -> Tensor:
    """Return Q_i' f_i (..., D N), latent by latent."""
    return torch.einsum("...ida,...di->...ai", rotation, f).flatten(-2)


def _back(rotation: Tensor, g: Tensor) -> Tensor:
    """Return Q_i g_i (..., D, N)."""
    g = g.view(*g.shape[:-1], rotation.size(-1), rotation.size(-3))
    return torch.einsum("...ida,...ai->...di", rotation, g)
