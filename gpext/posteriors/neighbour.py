r"""Condition a nearest-neighbour prior on Gaussian sites of any sign: a sparse precision and its Cholesky factor.

    q(f) prop. to N(mu, K~) prod_i exp(nu_i f_i - tau_i f_i^2 / 2),    K~^-1 = B' D^-1 B
    V^-1 = Q = B' D^-1 B + T,    m = mu + V (nu - tau mu),    log|I + K~ T| = log|Q| + sum_i log d_i

with the neighbours of :mod:`gpext.operators.neighbour_covariance` and the factor of :mod:`gpext.linalg.sparse_factor`.
Several data at one input add up to one site. Derivatives in the covariances of a point and its neighbours are those of
E_q[log N(f_i | f_N(i))] by Fisher's identity: with S = V + (m - mu)(m - mu)',

    dA = -1/2 sum_i d(log d_i + b_i' S b_i / d_i),    b_i the i-th row of B

which takes entries of V between neighbours alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpext.distributions import LatentNormal
from gpext.linalg.lazy_covariance import LazyCovariance
from gpext.linalg.sparse_factor import SparseFactor, columns_at, factorise_sparse, submatrix
from gpext.operators.neighbour_covariance import LocalRegressions, NeighbourGraph, NeighbourLinearOperator
from gpext.posteriors.neighbour_joint import (
    COLUMNS,
    NeighbourJointPosterior,
    are_sharp,
    condition_neighbours_joint,
    with_digits,
)
from gpext.sites import GaussianSites, JointSites

_JITTERS = (0.0, 1.0, 10.0, 100.0, 1000.0)  # times eps of the dtype and the largest variance
_FEWEST_DIGITS = 1e-3  # eps over this is what rounding may leave of a d_i


@dataclass(frozen=True)
class NeighbourPrior:
    """N(mu, K~) over N latent values; float64, in the graph of what it was made from."""

    mean: Tensor  # mu (..., N)
    blocks: Tensor  # covariances of each point and its neighbours (..., P, E, E)
    regressions: LocalRegressions
    jitter: float  # in K

    @classmethod
    def of(cls, mean: Tensor, covariance: LinearOperator, jitter: float) -> tuple[NeighbourPrior, float] | None:
        """Return the prior and the jitter in K, the least that makes every d_i positive; None if it is another one."""
        if not isinstance(covariance, NeighbourLinearOperator):
            return None
        blocks, graph = covariance.blocks.double(), covariance.graph
        eps = torch.finfo(covariance.dtype).eps
        largest = float(blocks.detach()[..., 0, 0].amax())
        unit = torch.eye(blocks.size(-1), dtype=blocks.dtype, device=blocks.device)
        for factor in _JITTERS:
            added = jitter + factor * eps / _FEWEST_DIGITS * largest
            padded = blocks + added * unit if added else blocks
            regressions = LocalRegressions.of(graph, padded.detach())
            if bool(regressions.positive & (regressions.variance > eps * largest).all()):
                break
        return cls(mean.double(), padded, regressions, added), added

    @property
    def graph(self) -> NeighbourGraph:
        """The neighbours."""
        return self.regressions.graph

    @property
    def variance(self) -> Tensor:
        """The variances of the kernel (..., N), of which K~ has those of the first point and its neighbours alone."""
        return self.blocks[..., 0, 0][..., self.graph.point]

    @property
    def distribution(self) -> MultivariateNormal:
        """The same as gpytorch's."""
        return MultivariateNormal(self.mean, NeighbourLinearOperator(self.blocks, graph=self.graph))

    @property
    def is_finite(self) -> bool:
        """Whether every entry is."""
        return bool(self.blocks.detach().isfinite().all())

    @property
    def requires_grad(self) -> bool:
        """Whether anything learns from it."""
        return self.mean.requires_grad or self.blocks.requires_grad

    def expand_to(self, shape: torch.Size) -> NeighbourPrior:
        """Return the same prior for each of a batch of data of a shape (..., N), or (..., 1, N) for several latents."""
        mean = self.mean.expand(torch.broadcast_shapes(self.mean.shape, shape))
        return NeighbourPrior(mean, self.blocks, self.regressions, self.jitter)

    @overload
    def condition(self, sites: GaussianSites) -> NeighbourPosterior: ...

    @overload
    def condition(self, sites: JointSites) -> NeighbourJointPosterior: ...

    @overload
    def condition(self, sites: GaussianSites | JointSites) -> NeighbourPosterior | NeighbourJointPosterior: ...

    def condition(self, sites: GaussianSites | JointSites) -> NeighbourPosterior | NeighbourJointPosterior:
        """Return the prior, of D latents for coupled sites, conditioned on them; outside the graph."""
        with torch.no_grad():
            mean = self.mean.detach()
            if isinstance(sites, JointSites):
                return condition_neighbours_joint(mean, self.regressions, sites, self.jitter)
            return condition_neighbours(mean, self.regressions, sites, self.jitter)

    def follow(self, posterior: NeighbourPosterior | NeighbourJointPosterior, response: Tensor | None) -> Tensor:
        """Return zero (...), with the derivatives of the sites' evidence in mu and K; see `DensePrior.follow`."""
        r, graph = posterior.regressions, self.graph
        by_mean = posterior.weights
        moved = (posterior.mean - self.mean.detach())[..., graph.first]
        residual = r.residual(moved).unsqueeze(-1)
        product = posterior.row_products + moved[..., graph.rows] * residual  # S b_i, its entries in the row
        if response is not None:
            by_mean = by_mean + response
            x = r.covariance_times(graph.sum_over_data(response))
            product = product + x[..., graph.rows] * residual
            product = product + moved[..., graph.rows] * r.residual(x).unsqueeze(-1)
        by_blocks = r.by_covariance(product)
        followed = (by_mean * self.mean).sum(-1) + (by_blocks * self.blocks).sum((-3, -2, -1))
        return followed - followed.detach()


@dataclass(frozen=True)
class NeighbourPosterior:
    """A nearest-neighbour prior conditioned on N sites; float64. It offers what `DensePosterior` does."""

    prior_mean: Tensor  # mu (..., N)
    regressions: LocalRegressions
    sites: GaussianSites
    factor: SparseFactor  # of Q
    jitter: float  # in K

    @property
    def positive_definite(self) -> Tensor:
        """Whether there is such a posterior (...)."""
        return self.factor.positive_definite

    @cached_property
    def mean(self) -> Tensor:
        """The posterior mean (..., N)."""
        return self.prior_mean + self.covariance_times(self._residual_shift)

    @cached_property
    def weights(self) -> Tensor:
        """K~^-1 (m - mu) = nu - tau m (..., N)."""
        by_sites = self.sites.shift - self.sites.precision * self.mean
        return with_digits(by_sites, self.sites.precision, self.mean - self.prior_mean, self.regressions)

    @property
    def variance(self) -> Tensor:
        """The posterior marginal variances v (..., N)."""
        return self._inverse[0][..., self.regressions.graph.point]

    @property
    def row_products(self) -> Tensor:
        """V b_i (..., P, E), its entries at the i-th point and its neighbours."""
        return self._inverse[1]

    @property
    def cavity_share(self) -> Tensor:
        """1 - tau v (..., N), where sites are sharp from V K~^-1 = I - V T."""
        r, tau = self.regressions, self.sites.precision
        graph = r.graph
        of_point = r.sum_over_rows(self.row_products * r.weights / r.variance.unsqueeze(-1))
        others = graph.sum_over_data(tau)[..., graph.point] - tau
        share = of_point[..., graph.point] + others * self.variance
        return torch.where(are_sharp(tau, r)[..., graph.point], share, 1 - tau * self.variance)

    @property
    def covariance(self) -> LazyCovariance:
        """The posterior covariance V (..., N, N)."""
        point = self.regressions.graph.point

        def dense() -> Tensor:
            unit = torch.eye(self.factor.dissection.size, dtype=self.mean.dtype, device=self.mean.device)
            return self.factor.solve(unit)[..., point, :][..., point]

        return LazyCovariance(self.variance, dense=dense)

    @property
    def log_det(self) -> Tensor:
        """log|I + K~ T| (...)."""
        return self.factor.log_det + self.regressions.variance.log().sum(-1)

    @property
    def log_normalizer(self) -> Tensor:
        """The evidence of the sites (...), see `DensePosterior.log_normalizer`."""
        mu, e = self.prior_mean, self._residual_shift
        at_mean = (self.sites.shift * mu - 0.5 * self.sites.precision * mu.square()).sum(-1)
        return at_mean + 0.5 * (e * (self.mean - mu)).sum(-1) - 0.5 * self.log_det

    @property
    def log_peak(self) -> Tensor:
        """A without the sites at the mean (...), see `DensePosterior.log_peak`."""
        return -0.5 * (self.weights * (self.mean - self.prior_mean)).sum(-1) - 0.5 * self.log_det

    @property
    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        """Mean and variance (..., N) of each f_i given all sites but its own."""
        variance = self.variance / self.cavity_share
        return self.mean - variance * self.weights, variance

    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return V vector (..., N)."""
        graph = self.regressions.graph
        return self.factor.solve(graph.sum_over_data(vector).unsqueeze(-1)).squeeze(-1)[..., graph.point]

    def predict(
        self, test_mean: Tensor, nearest: Tensor, weights: Tensor, rest: Tensor, covariance: Callable[[], Tensor]
    ) -> MultivariateNormal:
        """Return the posterior at S new inputs, f = mu + a'(f - mu)_N + r; differentiable in the arguments.

        Args:
            test_mean: (..., S) prior mean there.
            nearest: the points N that each depends on (S, E).
            weights: a (..., S, E).
            rest: the variances of r (..., S).
            covariance: returns the covariance of r (..., S, S).
        """
        graph = self.regressions.graph
        moved = (self.mean - self.prior_mean)[..., graph.first]
        mean = test_mean.double() + (weights * moved[..., nearest]).sum(-1)
        order = graph.dissection.node[nearest[:, 0]].argsort()  # those together that depend on the same fronts
        halves = (self._half(nearest[i], weights[..., i, :]) for i in order.split(COLUMNS))
        variance = rest + torch.cat([half.square().sum(-2) for half in halves], -1)[..., order.argsort()]

        def dense() -> Tensor:
            half = self._half(nearest, weights)
            return half.mT @ half + covariance()

        return LatentNormal(mean.to(test_mean.dtype), LazyCovariance(variance.to(test_mean.dtype), dense=dense))

    def _half(self, nearest: Tensor, weights: Tensor) -> Tensor:
        """Return H A' (..., P, S) with H'H = V, for the rows of A of new inputs."""
        return self.factor.half_solve(columns_at(nearest, weights, self.factor.dissection.size), nearest)

    @property
    def _residual_shift(self) -> Tensor:
        return self.sites.shift - self.sites.precision * self.prior_mean

    @cached_property
    def _inverse(self) -> tuple[Tensor, Tensor]:
        """The variances (..., P), and V b_i (..., P, E)."""
        b = self.regressions.weights.expand(*self.positive_definite.shape, *self.regressions.weights.shape[-2:])
        variance, product = torch.empty_like(b[..., 0]), torch.empty_like(b)
        for front, Z in self.factor.inverse_entries():
            variance[..., front.own] = Z.diagonal(dim1=-2, dim2=-1)[..., : len(front.own)]
            rows, places = front.parts[0]
            product[..., rows, :] = (submatrix(Z, places) @ b[..., rows, :].unsqueeze(-1)).squeeze(-1)
        return variance, product


def condition_neighbours(
    prior_mean: Tensor, regressions: LocalRegressions, sites: GaussianSites, jitter: float
) -> NeighbourPosterior:
    """Condition N(prior_mean, K~) on sites of any sign.

    Args:
        prior_mean: mu (..., N).
        regressions: of K~.
        sites: (..., N).
        jitter: that K~ was made with.
    """
    sites = sites.to(torch.float64)
    graph = regressions.graph
    diagonal = graph.sum_over_data(sites.precision)
    factor = factorise_sparse(graph.dissection, regressions.weights, 1 / regressions.variance, diagonal)
    return NeighbourPosterior(prior_mean, regressions, sites, factor, jitter)
