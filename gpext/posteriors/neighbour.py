r"""Condition a nearest-neighbour prior on Gaussian sites of any sign: a sparse precision and its Cholesky factor.

    q(f) prop. to N(mu, K) prod_i exp(nu_i f_i - tau_i f_i^2 / 2),    f = mu + Phi z + r,   z ~ N(0, I),   r ~ N(0, K~)

with K~^-1 = B' D^-1 B of :mod:`gpext.operators.neighbour_covariance`, and Phi (P x M) of inducing inputs, or M = 0.
With the factor of :mod:`gpext.linalg.sparse_factor` of Q, and e = nu - tau mu,

    Q = B' D^-1 B + T,    C = Q^-1 T Phi,    W = Phi - C,    A = I + Phi' T W
    E[z] = A^-1 W' e,     E[r] = Q^-1 e - C E[z],    m = mu + Phi E[z] + E[r]
    V = Q^-1 + W A^-1 W',    Cov(r) = Q^-1 + C A^-1 C',    log|I + K T| = log|Q| + sum_i log d_i + log|A|

Several data at one input add up to one site. Derivatives are those of the expected log densities of r and of the sites
under q, by Fisher's identity: with S = Cov(r) + E[r] E[r]' and weights w = nu - tau m,

    dA = -1/2 sum_i d(log d_i + b_i' S b_i / d_i) + tr((w E[z]' - T W A^-1)' dPhi),    b_i the i-th row of B

which takes entries of Q^-1 between neighbours alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpext.distributions import LatentNormal
from gpext.linalg.gathered import gathered_sums
from gpext.linalg.lazy_covariance import LazyCovariance
from gpext.linalg.products import times
from gpext.linalg.sparse_factor import SparseFactor, columns_at
from gpext.linalg.sparse_quadratics import sparse_covariances
from gpext.operators.neighbour_covariance import NeighbourGraph, NeighbourLinearOperator, Products, Regressions
from gpext.posteriors.gaussian import GaussianPosterior
from gpext.posteriors.neighbour_joint import (
    NeighbourJointPosterior,
    are_sharp,
    condition_neighbours_joint,
    with_digits,
)
from gpext.sites import GaussianSites, JointSites

_JITTERS = (0.0, 1.0, 10.0, 100.0)  # times the least


@dataclass(frozen=True)
class NeighbourPrior:
    """N(mu, K~ + Phi Phi') over N latent values; float64, in the graph of what it was made from.

    Example:
        >>> import torch
        >>> from gpext.operators.neighbour_covariance import NeighbourGraph, NeighbourLinearOperator
        >>> from gpext.sites import GaussianSites
        >>> x, one = torch.linspace(0, 1, 4).double().unsqueeze(-1), torch.ones(4).double()
        >>> graph = NeighbourGraph.of(x, 1, torch.arange(4))  # of a Markov process one neighbour is enough
        >>> points = graph.points[graph.rows]
        >>> covariance = NeighbourLinearOperator(torch.exp(-torch.cdist(points, points)), graph=graph)
        >>> prior, jitter = NeighbourPrior.of(0 * one, covariance, 0.0)
        >>> K = torch.exp(-torch.cdist(x, x))
        >>> exact = (K @ torch.linalg.inv(K + torch.eye(4))).diagonal()
        >>> torch.allclose(prior.condition(GaussianSites(one, one)).variance, exact)
        True
    """

    mean: Tensor  # mu (..., N)
    blocks: Tensor  # the covariances that the graph takes, less Phi Phi': (..., P, E, E) of points and neighbours
    root: Tensor  # Phi (..., P, M)
    regressions: Regressions
    jitter: float  # in K

    @classmethod
    def of(cls, mean: Tensor, covariance: LinearOperator, jitter: float) -> tuple[NeighbourPrior, float] | None:
        """Return the prior and the jitter in K; None if it is another one.

        There is none where every d_i is above eps^(2/3) of the largest variance. Where one is not, 1 / d_i leaves the
        evidence few digits: then the jitter is of that size, and ten times that if rounding demands it.
        """
        if not isinstance(covariance, NeighbourLinearOperator):
            return None
        blocks, root, graph = covariance.blocks.double(), covariance.root.double(), covariance.graph
        largest = float((graph.variances(blocks.detach()) + root.detach().square().sum(-1)).amax())
        least = torch.finfo(covariance.dtype).eps ** (2 / 3) * largest
        for factor in _JITTERS:
            added = jitter + factor * least
            padded = graph.padded(blocks, added) if added else blocks
            regressions = graph.regress(padded.detach())
            if bool(regressions.positive & (regressions.variance > 0.5 * least).all()):
                break
        return cls(mean.double(), padded, root, regressions, added), added

    @property
    def graph(self) -> NeighbourGraph:
        """The neighbours."""
        return self.regressions.graph

    @property
    def variance(self) -> Tensor:
        """The variances of the kernel (..., N), of which K~ has those of the first point and its neighbours alone."""
        return (self.graph.variances(self.blocks) + self.root.square().sum(-1))[..., self.graph.point]

    @property
    def distribution(self) -> MultivariateNormal:
        """The same as gpytorch's."""
        return MultivariateNormal(self.mean, NeighbourLinearOperator(self.blocks, self.root, graph=self.graph))

    @property
    def is_finite(self) -> bool:
        """Whether every entry is."""
        return bool(self.blocks.detach().isfinite().all() and self.root.detach().isfinite().all())

    @property
    def requires_grad(self) -> bool:
        """Whether anything learns from it."""
        return self.mean.requires_grad or self.blocks.requires_grad or self.root.requires_grad

    @classmethod
    def stack(cls, priors: Sequence[NeighbourPrior]) -> NeighbourPrior:
        """Return a batch of priors with the same neighbours, the first dimension."""
        regressions = type(priors[0].regressions).stack([p.regressions for p in priors])
        mean, blocks, root = (torch.stack([getattr(p, name) for p in priors]) for name in ("mean", "blocks", "root"))
        return cls(mean, blocks, root, regressions, max(p.jitter for p in priors))

    def draw(self, shape: torch.Size, *, generator: torch.Generator | None = None) -> Tensor:
        """Return draws f = mu + Phi z + r of the given shape (..., N), outside the graph.

        Raises:
            ValueError: a conditional variance d_i is not positive.
        """
        r, mean, root = self.regressions, self.mean.detach(), self.root.detach()
        if not bool(r.positive):
            raise ValueError(
                "the prior of a datum given its neighbours must have a positive variance; check the kernel's "
                "parameters, or pass `jitter`."
            )
        num_points, num_inducing = root.shape[-2:]
        numbers = torch.randn(
            *shape[:-1], num_inducing + num_points, dtype=mean.dtype, device=mean.device, generator=generator
        )
        z, e = numbers.split([num_inducing, num_points], -1)
        return mean + (times(root, z) + r.half_times(e))[..., self.graph.point]

    def predict_given(
        self, latent: Tensor, test_mean: Tensor, nearest: Tensor, weights: Tensor, test_root: Tensor, rest: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return means and variances (..., S) of f = mu + phi'z + a'r_N + s given its values at the data.

        z given f = mu + Phi z + r is Gaussian with the precision I + Phi' K~^-1 Phi.

        Args:
            latent: f (..., N), of data at one input the same.
            test_mean: (S,) prior mean at new inputs.
            nearest: see :meth:`NeighbourPosterior.predict`.
            weights: a (S, E).
            test_root: phi (S, M).
            rest: the variances of s (S,).
        """
        r, root = self.regressions, self.root
        moved = (latent - self.mean)[..., self.graph.first]
        scaled = r.whitened(root)
        inner = scaled.mT @ scaled + torch.eye(root.size(-1), dtype=root.dtype, device=root.device)
        chol = torch.linalg.cholesky(inner)
        z = torch.cholesky_solve(scaled.mT @ r.whitened(moved.unsqueeze(-1)), chol).squeeze(-1)
        own = test_root - gathered_sums(root, nearest, weights)  # phi - Phi_N' a
        mean = test_mean.double() + (weights * moved[..., nearest]).sum(-1) + times(own, z)
        variance = rest + torch.linalg.solve_triangular(chol, own.mT, upper=False).square().sum(-2)
        return mean, variance

    def expand_to(self, shape: torch.Size) -> NeighbourPrior:
        """Return the same prior for each of a batch of data of a shape (..., N), or (..., 1, N) for several latents."""
        mean = self.mean.expand(torch.broadcast_shapes(self.mean.shape, shape))
        return NeighbourPrior(mean, self.blocks, self.root, self.regressions, self.jitter)

    @overload
    def condition(self, sites: GaussianSites) -> NeighbourPosterior: ...

    @overload
    def condition(self, sites: JointSites) -> NeighbourJointPosterior: ...

    @overload
    def condition(self, sites: GaussianSites | JointSites) -> NeighbourPosterior | NeighbourJointPosterior: ...

    def condition(self, sites: GaussianSites | JointSites) -> NeighbourPosterior | NeighbourJointPosterior:
        """Return the prior, of D latents for coupled sites, conditioned on them; outside the graph.

        Raises:
            NotImplementedError: coupled sites under a prior with inducing inputs.
        """
        with torch.no_grad():
            mean = self.mean.detach()
            if isinstance(sites, JointSites):
                if self.root.size(-1):
                    raise NotImplementedError(
                        "neighbours and inducing_inputs together serve likelihoods of one latent, and KL for others; "
                        "leave one of the two out."
                    )
                return condition_neighbours_joint(mean, self.regressions, sites, self.jitter)
            return condition_neighbours(mean, self.regressions, self.root.detach(), sites, self.jitter)

    def follow(self, posterior: NeighbourPosterior | NeighbourJointPosterior, response: Tensor | None) -> Tensor:
        """Return zero (...), with the derivatives of the sites' evidence in mu and K; see `DensePrior.follow`."""
        r, graph = posterior.regressions, self.graph
        by_mean, moved = posterior.weights, posterior.residual_mean
        left, right = [moved], [moved]  # S = Cov(r) + left right'
        by_root = posterior.by_root
        if response is not None:
            by_mean = by_mean + response
            sums = graph.sum_over_data(response)
            x = r.covariance_times(sums)
            left, right = [moved, x, moved], [moved, moved, x]
            weights, root = graph.sum_over_data(posterior.weights), self.root.detach()
            for a, b in ((sums, weights), (weights, sums)):
                by_root = by_root + a.unsqueeze(-1) * (b.unsqueeze(-2) @ root)
        by_blocks = r.by_covariance(r.plus(posterior.products, torch.stack(left, -1), torch.stack(right, -1)))
        followed = (by_mean * self.mean).sum(-1) + (by_blocks * self.blocks).flatten(-graph.block_dims).sum(-1)
        followed = followed + (by_root * self.root).sum((-2, -1))
        return followed - followed.detach()


@dataclass(frozen=True)
class NeighbourPosterior(GaussianPosterior):
    """A nearest-neighbour prior conditioned on N sites; float64. It offers what `DensePosterior` does.

    Example:
        >>> import torch
        >>> from gpext.operators.neighbour_covariance import LocalRegressions, NeighbourGraph
        >>> from gpext.posteriors import condition_neighbours
        >>> from gpext.sites import GaussianSites
        >>> graph = NeighbourGraph.of(torch.arange(2).double().unsqueeze(-1), 1, torch.arange(2))
        >>> regressions = LocalRegressions.of(graph, torch.eye(2).double().expand(2, 2, 2))
        >>> one, root = torch.ones(2).double(), torch.zeros(2, 0).double()
        >>> posterior = condition_neighbours(0 * one, regressions, root, GaussianSites(one, one), 0.0)
        >>> posterior.variance
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    prior_mean: Tensor  # mu (..., N)
    regressions: Regressions
    root: Tensor  # Phi (..., P, M)
    sites: GaussianSites
    factor: SparseFactor  # of Q
    across: Tensor  # C (..., P, M)
    chol: Tensor  # L of A = L L' (..., M, M)
    positive_definite: Tensor  # (...), bool
    jitter: float  # in K

    @property
    def coordinates(self) -> Tensor:
        """E[z] (..., M)."""
        return self._parts[0]

    @property
    def residual_mean(self) -> Tensor:
        """E[r] (..., P)."""
        return self._parts[1]

    @cached_property
    def mean(self) -> Tensor:
        """The posterior mean (..., N)."""
        return self.prior_mean + self._moved(*self._parts)

    @cached_property
    def weights(self) -> Tensor:
        """K^-1 (m - mu) = nu - tau m (..., N)."""
        by_sites = self.sites.shift - self.sites.precision * self.mean
        return with_digits(by_sites, self.sites.precision, self.residual_mean, self.regressions)

    @property
    def variance(self) -> Tensor:
        """The posterior marginal variances v (..., N)."""
        return (self._inverse[0] + self._low_rank.square().sum(-1))[..., self.regressions.graph.point]

    @property
    def products(self) -> Products:
        """Those of Cov(r) with K~^-1; see :class:`gpext.operators.neighbour_covariance.Regressions`."""
        return self.regressions.plus_gram(self._inverse[1], self._whitened(self.across))

    @property
    def by_root(self) -> Tensor:
        """The derivative of `log_normalizer` in Phi (..., P, M), at fixed sites and covariances of r."""
        graph = self.regressions.graph
        W = torch.linalg.solve_triangular(self.chol, self._low_rank, upper=False, left=False)  # W A^-1
        weights = graph.sum_over_data(self.weights)
        precision = graph.sum_over_data(self.sites.precision)
        return weights.unsqueeze(-1) * self.coordinates.unsqueeze(-2) - precision.unsqueeze(-1) * W

    @property
    def cavity_share(self) -> Tensor:
        """1 - tau v (..., N), where sites are sharp from Q^-1 K~^-1 = I - Q^-1 T."""
        r, tau = self.regressions, self.sites.precision
        graph = r.graph
        sharp = are_sharp(tau, r)[..., graph.point]
        if not bool(sharp.any()):
            return 1 - tau * self.variance
        of_point = r.share(self._inverse[1]) - graph.sum_over_data(tau) * self._low_rank.square().sum(-1)
        others = graph.sum_over_data(tau)[..., graph.point] - tau
        share = of_point[..., graph.point] + others * self.variance
        return torch.where(sharp, share, 1 - tau * self.variance)

    @property
    def covariance(self) -> LazyCovariance:
        """The posterior covariance V (..., N, N)."""
        point = self.regressions.graph.point

        def dense() -> Tensor:
            unit = torch.eye(self.factor.dissection.size, dtype=self.mean.dtype, device=self.mean.device)
            inverse = self.factor.solve(unit) + self._low_rank @ self._low_rank.mT
            return inverse[..., point, :][..., point]

        return LazyCovariance(self.variance, dense=dense)

    @property
    def log_det(self) -> Tensor:
        """log|I + K T| (...)."""
        of_coordinates = 2 * self.chol.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return self.factor.log_det + self.regressions.variance.log().sum(-1) + of_coordinates

    @property
    def log_peak(self) -> Tensor:
        """See :attr:`GaussianPosterior.log_peak`; of errors in the mean it has their squares alone.

        Of `weights` it would have them as they are, and by neighbours that tell almost all they are large.
        """
        z, r = self._parts
        energy = z.square().sum(-1) + self.regressions.whitened(r.unsqueeze(-1)).square().sum((-2, -1))
        return -0.5 * (energy + self.log_det)

    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return V vector (..., N)."""
        return self._moved(*self._response(vector))

    def predict(
        self,
        test_mean: Tensor,
        nearest: Tensor,
        weights: Tensor,
        test_root: Tensor,
        rest: Tensor,
        covariance: Callable[[], Tensor],
    ) -> MultivariateNormal:
        """Return the posterior at S new inputs, f = mu + phi'z + a'r_N + s; differentiable in the arguments.

        Args:
            test_mean: (..., S) prior mean there.
            nearest: the points N that each depends on (S, E).
            weights: a (..., S, E).
            test_root: phi (..., S, M).
            rest: the variances of s (..., S).
            covariance: returns the covariance of s (..., S, S).
        """
        z, r = self._parts
        mean = test_mean.double() + (weights * r[..., nearest]).sum(-1) + (test_root @ z.unsqueeze(-1)).squeeze(-1)
        of_r = sparse_covariances(self.factor, nearest.unsqueeze(1), weights.unsqueeze(-2))[..., 0, 0]
        of_z = self._turned(nearest, weights, test_root).square().sum(-1)
        variance = rest + of_r + of_z

        def dense() -> Tensor:
            of_r = self.factor.half_solve(columns_at(nearest, weights, self.factor.dissection.size), nearest)
            of_z = self._turned(nearest, weights, test_root)
            return of_r.mT @ of_r + of_z @ of_z.mT + covariance()

        return LatentNormal(mean.to(test_mean.dtype), LazyCovariance(variance.to(test_mean.dtype), dense=dense))

    def _turned(self, nearest: Tensor, weights: Tensor, test_root: Tensor) -> Tensor:
        """Return rows (..., S, M) whose products are the covariance of phi'z + a'r_N beyond that of a'r_N given z."""
        return self._whitened(test_root - gathered_sums(self.across, nearest, weights))

    def _whitened(self, rows: Tensor) -> Tensor:
        """Return rows L^-T (..., S, M)."""
        return torch.linalg.solve_triangular(self.chol.mT, rows, upper=True, left=False)

    @cached_property
    def _low_rank(self) -> Tensor:
        """W L^-T (..., P, M)."""
        return self._whitened(self.root - self.across)

    def _response(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return Cov(z, f) vector (..., M) and Cov(r, f) vector (..., P), of data (..., N)."""
        right = self.regressions.graph.sum_over_data(vector).unsqueeze(-1)
        whitened = self._low_rank.mT @ right
        z = torch.linalg.solve_triangular(self.chol.mT, whitened, upper=True)
        return z.squeeze(-1), (self.factor.solve(right) - self.across @ z).squeeze(-1)

    def _moved(self, z: Tensor, r: Tensor) -> Tensor:
        """Return Phi z + r of the data (..., N)."""
        return ((self.root @ z.unsqueeze(-1)).squeeze(-1) + r)[..., self.regressions.graph.point]

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        """E[z] (..., M) and E[r] (..., P)."""
        return self._response(self._residual_shift)

    @cached_property
    def _inverse(self) -> tuple[Tensor, Products]:
        """The diagonal of Q^-1 (..., P), and its products."""
        return self.regressions.inverse(self.factor, self.regressions.graph.sum_over_data(self.sites.precision))


def condition_neighbours(
    prior_mean: Tensor, regressions: Regressions, root: Tensor, sites: GaussianSites, jitter: float
) -> NeighbourPosterior:
    """Condition N(prior_mean, K~ + root root') on sites of any sign.

    Args:
        prior_mean: mu (..., N).
        regressions: of K~.
        root: Phi (..., P, M).
        sites: (..., N).
        jitter: that K~ was made with.

    Example:
        >>> import torch
        >>> from gpext.operators.neighbour_covariance import LocalRegressions, NeighbourGraph
        >>> from gpext.sites import GaussianSites
        >>> graph = NeighbourGraph.of(torch.arange(2).double().unsqueeze(-1), 1, torch.arange(2))
        >>> regressions = LocalRegressions.of(graph, torch.eye(2).double().expand(2, 2, 2))
        >>> one = torch.ones(2).double()
        >>> condition_neighbours(0 * one, regressions, torch.zeros(2, 0).double(), GaussianSites(one, one), 0.0).mean
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    sites = sites.to(torch.float64)
    graph = regressions.graph
    precision = graph.sum_over_data(sites.precision)
    factor = regressions.factorise(precision)
    weighted = precision.unsqueeze(-1) * root
    across = factor.solve(weighted)
    inner = weighted.mT @ (root - across) + torch.eye(root.size(-1), dtype=root.dtype, device=root.device)
    chol, info = torch.linalg.cholesky_ex(0.5 * (inner + inner.mT))
    positive = factor.positive_definite & (info == 0)
    return NeighbourPosterior(prior_mean, regressions, root, sites, factor, across, chol, positive, jitter)
