r"""Condition a low-rank-plus-diagonal Gaussian prior on Gaussian sites of any sign [Naish-Guzman & Holden 2007].

    p(f) = N(mu, K),  K = Phi Phi' + D,  Phi (N x M):   f = mu + g + noise of variance D_i,   g = Phi z,  z ~ N(0, I)

With inducing inputs Phi = K_xz L^-T, L L' = K_zz, and D_i = k_ii - |phi_i|^2 this is the FITC prior [Snelson &
Ghahramani 2006]. Given z the data are independent, so D is integrated out of each site alone, and the rest is M x M:

    s = 1 + D tau,   tau~ = tau / s,   e = nu - tau mu,   A = I + Phi' diag(tau~) Phi = L L'
    q(z) = N(A^-1 Phi' (e / s), A^-1)
    V = D / s + (1/s) Phi A^-1 Phi' (1/s),    m = mu + V e,    log|I + K T| = sum log s + log|A|
    R = (K + T^-1)^-1 = tau~ - tau~ Phi A^-1 Phi' tau~

in O(N M^2). A posterior exists where every s_i is positive and A is positive definite; no inverse of K is formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import overload

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from linear_operator.operators import (
    DiagLinearOperator,
    LinearOperator,
    LowRankRootAddedDiagLinearOperator,
    LowRankRootLinearOperator,
    MatmulLinearOperator,
)
from torch import Tensor

from gpext.distributions import LatentNormal
from gpext.linalg.added_diagonal import split_diagonal
from gpext.linalg.products import times
from gpext.linalg.square_root import SquareRoot
from gpext.posteriors.gaussian import GaussianPosterior
from gpext.posteriors.low_rank_joint import LowRankJointPosterior, condition_low_rank_joint
from gpext.sites import GaussianSites, JointSites


@dataclass(frozen=True)
class LowRankPrior:
    """N(mu, Phi Phi' + D) over N latent values; float64, in the graph of what it was made from.

    Example:
        >>> import torch
        >>> from gpext.sites import GaussianSites
        >>> one = torch.ones(2).double()
        >>> prior = LowRankPrior(mean=0 * one, root=torch.ones(2, 1).double(), diagonal=0.5 * one)
        >>> prior.variance, prior.condition(GaussianSites(one, one)).mean
        (tensor([1.5000, 1.5000], dtype=torch.float64), tensor([0.7143, 0.7143], dtype=torch.float64))
    """

    mean: Tensor  # mu (..., N)
    root: Tensor  # Phi (..., N, M)
    diagonal: Tensor  # D (..., N), not negative

    @classmethod
    def of(cls, mean: Tensor, covariance: LinearOperator, jitter: float) -> LowRankPrior | None:
        """Return the prior if its covariance is of this structure, as gpytorch's operators say, else None."""
        both = split_diagonal(covariance)
        if both is None or not isinstance(both[0], LowRankRootLinearOperator):
            return None
        root = both[0].root.to_dense().double()
        diagonal = both[1].diagonal(dim1=-2, dim2=-1).double() + jitter
        return cls(mean.double(), root, diagonal.expand(root.shape[:-1]))

    @property
    def variance(self) -> Tensor:
        """The prior variances (..., N)."""
        return self.root.square().sum(-1) + self.diagonal

    @property
    def distribution(self) -> MultivariateNormal:
        """The same as gpytorch's."""
        low_rank = LowRankRootLinearOperator(self.root)
        return MultivariateNormal(
            self.mean, LowRankRootAddedDiagLinearOperator(low_rank, DiagLinearOperator(self.diagonal))
        )

    @property
    def is_finite(self) -> bool:
        """Whether every entry is."""
        return bool(self.root.isfinite().all() and self.diagonal.isfinite().all())

    @property
    def requires_grad(self) -> bool:
        """Whether anything learns from it."""
        return self.mean.requires_grad or self.root.requires_grad or self.diagonal.requires_grad

    def expand_to(self, shape: torch.Size) -> LowRankPrior:
        """Return the same prior for each of a batch of data of a shape (..., N), or (..., 1, N) for several latents."""
        mean = self.mean.expand(torch.broadcast_shapes(self.mean.shape, shape))
        return LowRankPrior(mean, self.root, self.diagonal)

    @overload
    def condition(self, sites: GaussianSites) -> LowRankPosterior: ...

    @overload
    def condition(self, sites: JointSites) -> LowRankJointPosterior: ...

    @overload
    def condition(self, sites: GaussianSites | JointSites) -> LowRankPosterior | LowRankJointPosterior: ...

    def condition(self, sites: GaussianSites | JointSites) -> LowRankPosterior | LowRankJointPosterior:
        """Return the prior, of D latents for coupled sites, conditioned on them; outside the graph."""
        with torch.no_grad():
            parts = self.mean.detach(), self.root.detach(), self.diagonal.detach()
            if isinstance(sites, JointSites):
                return condition_low_rank_joint(*parts, sites)
            return condition_low_rank(*parts, sites)

    def follow(self, posterior: LowRankPosterior | LowRankJointPosterior, response: Tensor | None) -> Tensor:
        """Return zero (...), with the derivatives of the sites' evidence in mu, Phi and D; see `DensePrior.follow`."""
        weights = posterior.weights
        outward = _project(self.root.detach(), weights)
        by_mean, by_diagonal = weights, 0.5 * (weights.square() - posterior.response_diagonal)
        by_root = weights.unsqueeze(-1) * outward.unsqueeze(-2) - posterior.response_root
        if response is not None:
            by_mean, by_diagonal = by_mean + response, by_diagonal + weights * response
            by_root = by_root + response.unsqueeze(-1) * outward.unsqueeze(-2)
            by_root = by_root + weights.unsqueeze(-1) * _project(self.root.detach(), response).unsqueeze(-2)
        moved = (by_mean * (self.mean - self.mean.detach())).sum(-1)
        moved = moved + (by_diagonal * (self.diagonal - self.diagonal.detach())).sum(-1)
        return moved + (by_root * (self.root - self.root.detach())).sum((-2, -1))


@dataclass(frozen=True)
class LowRankPosterior(GaussianPosterior):
    """A low-rank-plus-diagonal prior conditioned on N sites; float64. What `DensePosterior` offers, in O(N M^2).

    Example:
        >>> import torch
        >>> from gpext.posteriors import condition_low_rank
        >>> from gpext.sites import GaussianSites
        >>> root, one = torch.ones(2, 1).double(), torch.ones(2).double()
        >>> posterior = condition_low_rank(0 * one, root, 0 * one, GaussianSites(one, one))
        >>> posterior.log_det.exp().round(decimals=4)  # |I + K T|
        tensor(3., dtype=torch.float64)
    """

    prior_mean: Tensor  # mu (..., N)
    root: Tensor  # Phi (..., N, M)
    diagonal: Tensor  # D (..., N)
    sites: GaussianSites
    chol: Tensor  # L (..., M, M)
    positive_definite: Tensor  # (...), bool
    latent_root: SquareRoot | None = None  # R, of the values that the data are linear functions of

    @cached_property
    def mean(self) -> Tensor:
        """The posterior mean (..., N)."""
        return self.prior_mean + self.covariance_times(self._residual_shift)

    @cached_property
    def weights(self) -> Tensor:
        """K^-1 (m - mu) = (e - tau Phi E[z]) / s (..., N)."""
        low_rank = times(self.root, self._coordinates)
        return (self._residual_shift - self.sites.precision * low_rank) / self._stretch

    @cached_property
    def variance(self) -> Tensor:
        """The posterior marginal variances v (..., N)."""
        return (self.diagonal + self._low_rank_variance / self._stretch) / self._stretch

    @property
    def cavity_share(self) -> Tensor:
        """1 - tau v (..., N)."""
        return (1 - self._weight * self._low_rank_variance) / self._stretch

    @property
    def covariance(self) -> Tensor:
        """The posterior covariance V (..., N, N), dense."""
        reduced = self._whitened / self._stretch.unsqueeze(-2)
        return reduced.mT @ reduced + torch.diag_embed(self.diagonal / self._stretch)

    @property
    def log_det(self) -> Tensor:
        """log|I + K T| (...)."""
        return self._stretch.log().sum(-1) + 2 * self.chol.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @property
    def response_diagonal(self) -> Tensor:
        """The diagonal of R (..., N)."""
        return self._weight - self._weight.square() * self._low_rank_variance

    @property
    def response_root(self) -> Tensor:
        """R Phi = tau~ Phi A^-1 (..., N, M)."""
        solved = torch.linalg.solve_triangular(self.chol.mT, self._whitened, upper=True)
        return self._weight.unsqueeze(-1) * solved.mT

    @property
    def response_parts(self) -> tuple[Tensor, Tensor]:
        """The vector t (..., N) and the matrix Z (..., M, N) of R = diag(t) - Z'Z."""
        return self._weight, self._whitened * self._weight.unsqueeze(-2)

    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return V vector (..., N)."""
        inner = self._solve(_project(self.root, vector / self._stretch))
        return (self.diagonal * vector + times(self.root, inner)) / self._stretch

    def predict(self, test_mean: Tensor, test_root: Tensor, test_covariance: LinearOperator) -> MultivariateNormal:
        """Return the posterior at S new inputs, its covariance lazily; differentiable in the arguments.

        Args:
            test_mean: (..., S) prior mean there.
            test_root: Phi there (..., S, M).
            test_covariance: what the prior has there beyond Phi Phi' (..., S, S).
        """
        dtype = test_mean.dtype
        root = test_root.double()
        mean = test_mean.double() + times(root, self._coordinates)
        reduced = torch.linalg.solve_triangular(self.chol, root.mT, upper=False).to(dtype)
        covariance = to_linear_operator(test_covariance) + MatmulLinearOperator(reduced.mT, reduced)
        return LatentNormal(mean.to(dtype), covariance)

    @property
    def coordinates(self) -> tuple[Tensor, Tensor]:
        """Mean (..., M) and covariance (..., M, M) of the posterior of z."""
        return self._coordinates, torch.cholesky_inverse(self.chol)

    @property
    def _stretch(self) -> Tensor:
        """The s above (..., N)."""
        return 1 + self.diagonal * self.sites.precision

    @property
    def _weight(self) -> Tensor:
        """tau~ (..., N)."""
        return self.sites.precision / self._stretch

    @cached_property
    def _coordinates(self) -> Tensor:
        """E[z] (..., M)."""
        return self._solve(_project(self.root, self._residual_shift / self._stretch))

    @cached_property
    def _whitened(self) -> Tensor:
        """L^-1 Phi' (..., M, N)."""
        return torch.linalg.solve_triangular(self.chol, self.root.mT, upper=False)

    @cached_property
    def _low_rank_variance(self) -> Tensor:
        """The diagonal of Phi A^-1 Phi' (..., N)."""
        return self._whitened.square().sum(-2)

    def _solve(self, right: Tensor) -> Tensor:
        return torch.cholesky_solve(right.unsqueeze(-1), self.chol).squeeze(-1)


def condition_low_rank(prior_mean: Tensor, root: Tensor, diagonal: Tensor, sites: GaussianSites) -> LowRankPosterior:
    """Condition N(prior_mean, root root' + diag(diagonal)) on sites of any sign; differentiable in all of them.

    Args:
        prior_mean: mu (..., N).
        root: Phi (..., N, M).
        diagonal: D (..., N), not negative.
        sites: (..., N).

    Example:
        >>> import torch
        >>> from gpext.sites import GaussianSites
        >>> root, one = torch.ones(2, 1).double(), torch.ones(2).double()
        >>> posterior = condition_low_rank(0 * one, root, 0 * one, GaussianSites(one, one))  # one value, seen twice
        >>> posterior.mean, posterior.variance
        (tensor([0.6667, 0.6667], dtype=torch.float64), tensor([0.3333, 0.3333], dtype=torch.float64))
    """
    sites = sites.to(torch.float64)
    stretch = 1 + diagonal * sites.precision
    inner = root.mT @ ((sites.precision / stretch).unsqueeze(-1) * root)
    inner = inner + torch.eye(root.size(-1), dtype=inner.dtype, device=inner.device)
    chol, info = torch.linalg.cholesky_ex(0.5 * (inner + inner.mT))
    return LowRankPosterior(prior_mean, root, diagonal, sites, chol, (info == 0) & (stretch > 0).all(-1))


def _project(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return matrix' vector (..., M)."""
    return (matrix.mT @ vector.unsqueeze(-1)).squeeze(-1)
