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
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpext.distributions import LatentNormal
from gpext.linalg.sparse_factor import SparseFactor, factorise_sparse
from gpext.operators.neighbour_covariance import LocalRegressions, NeighbourGraph, NeighbourLinearOperator
from gpext.sites import GaussianSites, JointSites

_JITTERS = (0.0, 1.0, 10.0, 100.0, 1000.0)  # times eps of the dtype and the largest variance
_FEWEST_DIGITS = 1e-3  # eps over this is what rounding may leave of a d_i
_COLUMNS = 128  # new inputs predicted at a time


@dataclass(frozen=True)
class NeighbourPrior:
    """N(mu, K~) over N latent values; float64, in the graph of what it was made from."""

    mean: Tensor  # mu (N,)
    blocks: Tensor  # covariances of each point and its neighbours (P, E, E)
    regressions: LocalRegressions
    jitter: float  # in K

    @classmethod
    def of(cls, mean: Tensor, covariance: LinearOperator, jitter: float) -> tuple[NeighbourPrior, float] | None:
        """Return the prior and the jitter in K, the least that makes every d_i positive; None if it is another one.

        Raises:
            NotImplementedError: a batch of priors.
        """
        if not isinstance(covariance, NeighbourLinearOperator):
            return None
        if mean.dim() > 1:
            raise NotImplementedError(f"a nearest-neighbour prior is of one latent; got means {tuple(mean.shape)}.")
        blocks, graph = covariance.blocks.double(), covariance.graph
        eps = torch.finfo(covariance.dtype).eps
        largest = float(blocks.detach()[:, 0, 0].amax())
        unit = torch.eye(blocks.size(-1), dtype=blocks.dtype, device=blocks.device)
        for factor in _JITTERS:
            added = jitter + factor * eps / _FEWEST_DIGITS * largest
            padded = blocks + added * unit if added else blocks
            regressions = LocalRegressions.of(graph, padded.detach())
            if bool(regressions.positive & (regressions.variance > eps * largest).all()):
                break
        return cls(mean.double(), padded, regressions, added), added

    @property
    def variance(self) -> Tensor:
        """The variances of the kernel (N,), of which K~ has those of the first point and its neighbours alone."""
        return self.blocks[:, 0, 0][self.regressions.graph.point]

    @property
    def distribution(self) -> MultivariateNormal:
        """The same as gpytorch's."""
        return MultivariateNormal(self.mean, NeighbourLinearOperator(self.blocks, graph=self.regressions.graph))

    @property
    def is_finite(self) -> bool:
        """Whether every entry is."""
        return bool(self.blocks.detach().isfinite().all())

    @property
    def requires_grad(self) -> bool:
        """Whether anything learns from it."""
        return self.mean.requires_grad or self.blocks.requires_grad

    def expand_to(self, shape: torch.Size) -> NeighbourPrior:
        """Return this prior.

        Raises:
            NotImplementedError: a batch of data.
        """
        if shape != self.mean.shape:
            raise NotImplementedError(
                f"a nearest-neighbour prior takes one set of data, {tuple(self.mean.shape)}; got {tuple(shape)}."
            )
        return self

    def condition(self, sites: GaussianSites | JointSites) -> NeighbourPosterior:
        """Return the prior conditioned on sites; outside the graph.

        Raises:
            NotImplementedError: sites of several latents.
        """
        if isinstance(sites, JointSites):
            raise NotImplementedError("a nearest-neighbour prior is of one latent; got sites of several.")
        with torch.no_grad():
            return condition_neighbours(self.mean.detach(), self.regressions, sites, self.jitter)

    def follow(self, posterior: NeighbourPosterior, response: Tensor | None) -> Tensor:
        """Return zero (), with the derivatives of the sites' evidence in mu and K; see `DensePrior.follow`."""
        r = posterior.regressions
        graph = r.graph
        by_mean, moved = posterior.weights, posterior.mean_of_points - self.mean.detach()[graph.first]
        product = posterior.row_products  # V b_i, of the entries in the row
        residual = r.residual(moved)
        product = product + moved[graph.rows] * residual.unsqueeze(-1)
        if response is not None:
            by_mean = by_mean + response
            x = r.covariance_times(graph.sum_over_data(response))
            product = product + x[graph.rows] * residual.unsqueeze(-1)
            product = product + moved[graph.rows] * r.residual(x).unsqueeze(-1)
        by_blocks = r.by_covariance(product, (product * r.weights).sum(-1))
        followed = by_mean @ self.mean + by_blocks.flatten() @ self.blocks.flatten()
        return followed - followed.detach()


@dataclass(frozen=True)
class NeighbourPosterior:
    """A nearest-neighbour prior conditioned on N sites; float64. It offers what `DensePosterior` does."""

    prior_mean: Tensor  # mu (N,)
    regressions: LocalRegressions
    sites: GaussianSites
    factor: SparseFactor  # of Q
    jitter: float  # in K

    @property
    def positive_definite(self) -> Tensor:
        """Whether there is such a posterior ()."""
        return self.factor.positive_definite

    @cached_property
    def mean(self) -> Tensor:
        """The posterior mean (N,)."""
        return self.prior_mean + self.covariance_times(self._residual_shift)

    @property
    def mean_of_points(self) -> Tensor:
        """The posterior means (P,)."""
        return self.mean[self.regressions.graph.first]

    @cached_property
    def weights(self) -> Tensor:
        """K~^-1 (m - mu) = nu - tau m (N,)."""
        return self.sites.shift - self.sites.precision * self.mean

    @property
    def variance(self) -> Tensor:
        """The posterior marginal variances v (N,)."""
        return self._inverse[0][self.regressions.graph.point]

    @property
    def row_products(self) -> Tensor:
        """V b_i (P, E), its entries at the i-th point and its neighbours."""
        return self._inverse[1]

    @property
    def cavity_share(self) -> Tensor:
        """1 - tau v (N,)."""
        return 1 - self.sites.precision * self.variance

    @property
    def covariance(self) -> Tensor:
        """The posterior covariance V (N, N), dense."""
        point = self.regressions.graph.point
        unit = torch.eye(len(self.regressions.weights), dtype=self.mean.dtype, device=self.mean.device)
        return self.factor.solve(unit)[point][:, point]

    @property
    def log_det(self) -> Tensor:
        """log|I + K~ T| ()."""
        return self.factor.log_det + self.regressions.variance.log().sum()

    @property
    def log_normalizer(self) -> Tensor:
        """The evidence of the sites (), see `DensePosterior.log_normalizer`."""
        mu, e = self.prior_mean, self._residual_shift
        at_mean = (self.sites.shift * mu - 0.5 * self.sites.precision * mu.square()).sum(-1)
        return at_mean + 0.5 * (e * (self.mean - mu)).sum(-1) - 0.5 * self.log_det

    @property
    def log_peak(self) -> Tensor:
        """A without the sites at the mean (), see `DensePosterior.log_peak`."""
        return -0.5 * (self.weights * (self.mean - self.prior_mean)).sum(-1) - 0.5 * self.log_det

    @property
    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        """Mean and variance (N,) of each f_i given all sites but its own."""
        variance = self.variance / self.cavity_share
        return self.mean - variance * self.weights, variance

    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return V vector (N,)."""
        graph = self.regressions.graph
        return self.factor.solve(graph.sum_over_data(vector).unsqueeze(-1)).squeeze(-1)[graph.point]

    def predict(
        self, test_mean: Tensor, nearest: Tensor, weights: Tensor, rest: Tensor, covariance: Callable[[], Tensor]
    ) -> MultivariateNormal:
        """Return the posterior at S new inputs, f = mu + a'(f - mu)_N + r; differentiable in the arguments.

        Args:
            test_mean: (S,) prior mean there.
            nearest: the points N that each depends on (S, E).
            weights: a (S, E).
            rest: the variances of r (S,).
            covariance: returns the covariance of r (S, S).
        """
        dtype = test_mean.dtype
        graph = self.regressions.graph
        moved = self.mean_of_points - self.prior_mean[graph.first]
        mean = test_mean.double() + (weights * moved[nearest]).sum(-1)
        order = graph.dissection.node[nearest[:, 0]].argsort()  # those together that depend on the same fronts
        squares = [self._half(nearest[i], weights[i]).square().sum(0) for i in order.split(_COLUMNS)]
        variance = rest + torch.cat(squares)[order.argsort()]

        def dense() -> Tensor:
            half = self._half(nearest, weights)
            return (half.mT @ half + covariance()).to(dtype)

        return LatentNormal(mean.to(dtype), LazyCovariance(variance.to(dtype), dense=dense))

    def _half(self, nearest: Tensor, weights: Tensor) -> Tensor:
        """Return H A' (P, S) with H'H = V, for the rows of A of new inputs."""
        columns = torch.arange(len(nearest), device=nearest.device).unsqueeze(-1).expand_as(nearest)
        right = weights.new_zeros(len(self.regressions.weights), len(nearest))
        right = right.index_put((nearest, columns), weights, accumulate=True)
        return self.factor.half_solve(right, nearest)

    @property
    def _residual_shift(self) -> Tensor:
        return self.sites.shift - self.sites.precision * self.prior_mean

    @cached_property
    def _inverse(self) -> tuple[Tensor, Tensor]:
        b = self.regressions.weights
        variance, product = torch.empty_like(b[:, 0]), torch.empty_like(b)
        for front, Z in self.factor.inverse_entries():
            variance[front.own] = Z.diagonal()[: len(front.own)]
            among = Z[front.places.unsqueeze(-1), front.places.unsqueeze(-2)]
            product[front.rows] = (among @ b[front.rows].unsqueeze(-1)).squeeze(-1)
        return variance, product


def condition_neighbours(
    prior_mean: Tensor, regressions: LocalRegressions, sites: GaussianSites, jitter: float = 0.0
) -> NeighbourPosterior:
    """Condition N(prior_mean, K~) on sites of any sign.

    Args:
        prior_mean: mu (N,).
        regressions: of K~.
        sites: (N,).
        jitter: that K~ was made with.
    """
    sites = sites.to(torch.float64)
    graph = regressions.graph
    diagonal = graph.sum_over_data(sites.precision)
    factor = factorise_sparse(graph.dissection, regressions.weights, 1 / regressions.variance, diagonal)
    return NeighbourPosterior(prior_mean, regressions, sites, factor, jitter)


class LazyCovariance(LinearOperator):
    """A covariance whose variances are known, and whose other entries are computed where they are asked for.

    Args:
        variance: (S,).
        dense: returns the matrix (S, S).
    """

    def __init__(self, variance: Tensor, *, dense: Callable[[], Tensor]) -> None:
        super().__init__(variance, dense=dense)
        self._variance, self._dense = variance, dense

    def _size(self) -> torch.Size:
        return torch.Size((*self._variance.shape, self._variance.size(-1)))

    def _transpose_nonbatch(self) -> LazyCovariance:
        return self

    def _diagonal(self) -> Tensor:
        return self._variance

    def to_dense(self) -> Tensor:
        """Return the matrix (S, S)."""
        return self._dense()

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.to_dense() @ rhs

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return to_linear_operator(self.to_dense())._getitem(row_index, col_index, *batch_indices)
