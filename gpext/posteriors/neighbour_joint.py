r"""Condition D nearest-neighbour priors on sites that couple the latents of a datum.

    V^-1 = Q = blockdiag_d(B_d' D_d^-1 B_d) + U,   log|I + K~ U| = log|Q| + sum_di log d_di

as :mod:`gpext.posteriors.neighbour` has it for one latent: Q has D indices for each point, which a tree of its own
eliminates. In two dimensions a factor takes O(D^3 n^(3/2)) operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from torch import Tensor

from gpext.distributions import MultitaskLatentNormal
from gpext.linalg.lazy_covariance import LazyCovariance
from gpext.linalg.sparse_factor import SparseFactor, columns_at
from gpext.linalg.sparse_quadratics import sparse_covariances
from gpext.operators.neighbour_covariance import Products, Regressions
from gpext.posteriors.joint import JointPosterior, precision_blocks
from gpext.sites import JointSites


@dataclass(frozen=True)
class NeighbourJointPosterior(JointPosterior):
    """D nearest-neighbour priors conditioned on N sites that couple them; float64.

    Example:
        >>> import torch
        >>> from gpext.operators.neighbour_covariance import LocalRegressions, NeighbourGraph
        >>> from gpext.posteriors import condition_neighbours_joint
        >>> from gpext.sites import CoupledSites
        >>> graph = NeighbourGraph.of(torch.arange(2).double().unsqueeze(-1), 1, torch.arange(2))
        >>> regressions = LocalRegressions.of(graph, torch.eye(2).double().expand(2, 2, 2))
        >>> one = torch.ones(2, 2).double()
        >>> condition_neighbours_joint(0 * one, regressions, CoupledSites(one, one, one[0], one), 0.0).variance
        tensor([[0.3750, 0.3750],
                [0.3750, 0.3750]], dtype=torch.float64)
    """

    prior_mean: Tensor  # mu (..., D, N)
    regressions: Regressions  # of each latent, or of all
    sites: JointSites
    factor: SparseFactor  # of Q, value d of point p at the index d P + p
    jitter: float  # in K

    @property
    def positive_definite(self) -> Tensor:
        """Whether there is such a posterior (...)."""
        return self.factor.positive_definite

    @cached_property
    def mean(self) -> Tensor:
        """The posterior means (..., D, N)."""
        return self.prior_mean + self.covariance_times(self._residual_shift)

    @cached_property
    def weights(self) -> Tensor:
        """K~^-1 (m - mu) = nu - U m (..., D, N)."""
        by_sites = self.sites.shift - self.sites.times(self.mean)
        own = precision_blocks(self.sites).diagonal(dim1=-3, dim2=-2).mT
        return with_digits(by_sites, own, self.residual_mean, self.regressions)

    @property
    def residual_mean(self) -> Tensor:
        """E[r] = m - mu at the points (..., D, P)."""
        return (self.mean - self.prior_mean)[..., self.regressions.graph.first]

    @property
    def by_root(self) -> Tensor:
        """The derivative in Phi (..., D, P, 0), of which there is none."""
        return self.residual_mean.unsqueeze(-1)[..., :0]

    @property
    def blocks(self) -> Tensor:
        """The posterior covariance of the latents of each datum (..., D, D, N)."""
        return self._inverse[0][..., self.regressions.graph.point]

    @property
    def products(self) -> Products:
        """Those of each latent's covariance with its K~^-1."""
        return self._inverse[1]

    @property
    def log_det(self) -> Tensor:
        """log|I + K~ U| (...)."""
        variance = self.regressions.variance
        each = variance.expand(*self.prior_mean.shape[:-1], variance.size(-1))
        return self.factor.log_det + each.log().sum((-2, -1))

    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return V vector (..., D, N)."""
        graph = self.regressions.graph
        right = graph.sum_over_data(vector)
        solved = self.factor.solve(right.flatten(-2).unsqueeze(-1)).squeeze(-1)
        return solved.unflatten(-1, right.shape[-2:])[..., graph.point]

    def distribution(self, dtype: torch.dtype) -> MultitaskMultivariateNormal:
        """Return the posterior of all latents at the training inputs, its covariance lazily."""
        point = self.regressions.graph.point

        def dense() -> Tensor:
            unit = torch.eye(self.factor.dissection.size, dtype=self.mean.dtype, device=self.mean.device)
            index = self._indices(point).flatten()
            return self.factor.solve(unit)[..., index, :][..., index]

        covariance = LazyCovariance(self.variance.flatten(-2).to(dtype), dense=dense, blocks=self.blocks.to(dtype))
        return MultitaskLatentNormal(self.mean.to(dtype).mT, covariance, interleaved=False)

    def predict(  # type: ignore[override]
        self,
        test_mean: Tensor,
        nearest: Tensor,
        weights: Tensor,
        test_root: Tensor,
        rest: Tensor,
        covariance: Callable[[], Tensor],
    ) -> MultitaskMultivariateNormal:
        """Return the posterior of all latents at S new inputs; see `NeighbourPosterior.predict`.

        Args:
            test_mean: (..., D, S) prior means there.
            nearest: the points that each depends on (S, E).
            weights: a (..., D, S, E), or (S, E).
            test_root: of no columns.
            rest: the variances of r (..., D, S), or (S,).
            covariance: returns the covariances of r (..., D, S, S), or (S, S).
        """
        dtype = test_mean.dtype
        mean = test_mean.double() + (weights * self.residual_mean[..., nearest]).sum(-1)
        weights = weights.expand(*mean.shape, weights.size(-1))
        index = self._indices(nearest).movedim(0, 1)
        blocks = sparse_covariances(self.factor, index, weights.movedim(-3, -2)).movedim(-3, -1)
        blocks = blocks + torch.diag_embed(rest.expand(mean.shape).mT).movedim(-3, -1)

        def dense() -> Tensor:
            half = self._half(nearest, weights).flatten(-2)
            left = covariance()
            left = left.expand(*mean.shape, left.size(-1))
            return half.mT @ half + _block_diagonal(left)

        variance = blocks.diagonal(dim1=-3, dim2=-2).mT.flatten(-2)
        found = LazyCovariance(variance.to(dtype), dense=dense, blocks=blocks.to(dtype))
        return MultitaskLatentNormal(mean.to(dtype).mT, found, interleaved=False)

    def _half(self, nearest: Tensor, weights: Tensor) -> Tensor:
        """Return H A' (..., D P, D, S) with H'H = V, for the rows of A of each latent at new inputs."""
        index = self._indices(nearest)
        columns = columns_at(index.flatten(0, 1), weights.flatten(-3, -2), self.factor.dissection.size)
        return self.factor.half_solve(columns, index.flatten()).unflatten(-1, index.shape[:2])

    def _indices(self, point: Tensor) -> Tensor:
        """Return the indices (D, *) of the latents of points (*)."""
        latents = torch.arange(self.prior_mean.size(-2), device=point.device)
        return latents.view(-1, *point.dim() * (1,)) * len(self.regressions.graph.points) + point

    @cached_property
    def _inverse(self) -> tuple[Tensor, Products]:
        """The blocks (..., D, D, P), and the products."""
        return self.regressions.inverse_joint(self.factor, _at_points(self.regressions, self.sites))


def condition_neighbours_joint(
    prior_mean: Tensor, regressions: Regressions, sites: JointSites, jitter: float
) -> NeighbourJointPosterior:
    """Condition D independent priors N(prior_mean, K~) on sites that couple them.

    Args:
        prior_mean: mu (..., D, N).
        regressions: of K~, of each latent or of all.
        sites: (..., D, N).
        jitter: that K~ was made with.

    Example:
        >>> import torch
        >>> from gpext.operators.neighbour_covariance import LocalRegressions, NeighbourGraph
        >>> from gpext.sites import CoupledSites
        >>> graph = NeighbourGraph.of(torch.arange(2).double().unsqueeze(-1), 1, torch.arange(2))
        >>> regressions = LocalRegressions.of(graph, torch.eye(2).double().expand(2, 2, 2))
        >>> one = torch.ones(2, 2).double()
        >>> condition_neighbours_joint(0 * one, regressions, CoupledSites(one, one, one[0], one), 0.0).mean
        tensor([[0.2500, 0.2500],
                [0.2500, 0.2500]], dtype=torch.float64)
    """
    sites = sites.to(torch.float64)
    factor = regressions.factorise_joint(_at_points(regressions, sites))
    return NeighbourJointPosterior(prior_mean.expand(sites.shift.shape), regressions, sites, factor, jitter)


def _at_points(regressions: Regressions, sites: JointSites) -> Tensor:
    """Return the precisions of the sites of the data at each point (..., P, D, D)."""
    return regressions.graph.sum_over_data(precision_blocks(sites)).movedim(-1, -3)


def are_sharp(precision: Tensor, regressions: Regressions) -> Tensor:
    """Return at which points (..., P) sites of these precisions (..., N) outweigh the prior."""
    return regressions.graph.sum_over_data(precision) > regressions.precision_diagonal


def with_digits(by_sites: Tensor, precision: Tensor, moved: Tensor, regressions: Regressions) -> Tensor:
    """Return K^-1 (m - mu) (..., N), which nu - tau m has few digits of where sites are sharp.

    There it is made to have the sums of K~^-1 E[r], which it equals, over the data at each point.

    Args:
        by_sites: nu - tau m (..., N).
        precision: tau (..., N).
        moved: E[r] (..., P), m - mu at the points, less Phi E[z].
        regressions: of K~.
    """
    graph, sharp = regressions.graph, are_sharp(precision, regressions)
    if not bool(sharp.any()):
        return by_sites
    missing = regressions.precision_times(moved) - graph.sum_over_data(by_sites)
    each = torch.where(sharp, missing / graph.sum_over_data(precision), 0.0)
    return by_sites + precision * each[..., graph.point]


def _block_diagonal(blocks: Tensor) -> Tensor:
    """Return the matrix (..., D S, D S) of blocks (..., D, S, S)."""
    unit = torch.eye(blocks.size(-3), dtype=blocks.dtype, device=blocks.device)
    return torch.einsum("...dst,de->...dset", blocks, unit).flatten(-4, -3).flatten(-2)
