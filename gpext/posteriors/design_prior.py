r"""The prior of N linear functions of P < N latent values, h = A f: inference in the space of the P values.

    p(h) = N(A mu, A K A'),   K = R R':   the low-rank prior of root Phi = A R without a diagonal, in O(N P^2)

:mod:`gpext.posteriors.low_rank` conditions it on sites of h. With its response S = (A K A' + T^-1)^-1 and weights w,

    d(log normaliser)/dK = (u u' - M) / 2,     u = A' w,   M = A' S A

so that derivatives need no inverse of K or of R, and K may be singular; predictions take the pseudo-inverse of R.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from linear_operator.operators import LinearOperator, RootLinearOperator
from torch import Tensor

from gpext.designs import Design, DesignLinearOperator
from gpext.posteriors.dense_prior import DensePrior
from gpext.posteriors.low_rank import LowRankPosterior, condition_low_rank
from gpext.posteriors.low_rank_joint import LowRankJointPosterior, condition_low_rank_joint
from gpext.sites import GaussianSites, JointSites


@dataclass(frozen=True)
class DesignPrior:
    """N(A mu, A K A') over N linear functions of P latent values; float64, in the graph of what it was made from.

    Example:
        >>> import torch
        >>> from gpext.designs import pairs
        >>> from gpext.posteriors import DensePrior
        >>> latent = DensePrior(torch.zeros(2).double(), torch.eye(2).double())
        >>> DesignPrior(torch.zeros(1).double(), latent, pairs(torch.tensor([[0, 1]]), 2), 0.0).variance  # of f_0 - f_1
        tensor([2.], dtype=torch.float64)
    """

    mean: Tensor  # A mu (..., N)
    latent: DensePrior  # of f, its mean without meaning
    design: Design  # A
    jitter: float  # on the diagonal of A K A'

    @classmethod
    def of(cls, mean: Tensor, covariance: LinearOperator, jitter: float) -> tuple[DesignPrior, float] | None:
        """Return the prior, and the jitter that rounding made necessary in K; None if the covariance has no design.

        None, too, if K is not positive semidefinite: it has no root, and rules report such a prior.
        """
        if not isinstance(covariance, DesignLinearOperator):
            return None
        K = covariance.covariance.to_dense()
        latent, added = DensePrior.of(mean.new_zeros(K.shape[:-1]), K, 0.0), 0.0
        if K.dtype != torch.float64:
            latent, added = latent.definite(torch.finfo(K.dtype).eps)
        prior = cls(mean.double(), latent, covariance.design, jitter)
        try:
            prior.root.isfinite()
        except ValueError:  # no root
            return None
        return prior, max(added, jitter)

    @cached_property
    def root(self) -> Tensor:
        """Phi = A R (..., N, P), outside the graph."""
        return self.design.times_matrix(self.latent.square_root.matrix)

    @property
    def diagonal(self) -> Tensor:
        """The jitter (..., N)."""
        return torch.full_like(self.root[..., 0], self.jitter)

    @property
    def variance(self) -> Tensor:
        """The prior variances (..., N)."""
        return self.design.row_variances(self.latent.covariance) + self.jitter

    @property
    def distribution(self) -> MultivariateNormal:
        """The same as gpytorch's."""
        covariance: LinearOperator = DesignLinearOperator(self.latent.covariance, design=self.design)
        return MultivariateNormal(self.mean, covariance.add_jitter(self.jitter) if self.jitter else covariance)

    @property
    def is_finite(self) -> bool:
        """Whether every entry is."""
        return self.latent.is_finite

    @property
    def requires_grad(self) -> bool:
        """Whether anything learns from it."""
        return self.mean.requires_grad or self.latent.covariance.requires_grad

    def expand_to(self, shape: torch.Size) -> DesignPrior:
        """Return the same prior for each of a batch of data of a shape (..., N), or (..., 1, N) for several latents."""
        mean = self.mean.expand(torch.broadcast_shapes(self.mean.shape, shape))
        return DesignPrior(mean, self.latent, self.design, self.jitter)

    @overload
    def condition(self, sites: GaussianSites) -> LowRankPosterior: ...

    @overload
    def condition(self, sites: JointSites) -> LowRankJointPosterior: ...

    @overload
    def condition(self, sites: GaussianSites | JointSites) -> LowRankPosterior | LowRankJointPosterior: ...

    def condition(self, sites: GaussianSites | JointSites) -> LowRankPosterior | LowRankJointPosterior:
        """Return the prior, of D latents for coupled sites, conditioned on them; outside the graph."""
        with torch.no_grad():
            parts, root = (self.mean.detach(), self.root, self.diagonal), self.latent.square_root
            if isinstance(sites, JointSites):
                return replace(condition_low_rank_joint(*parts, sites), latent_root=root)
            return replace(condition_low_rank(*parts, sites), latent_root=root)

    def follow(self, posterior: LowRankPosterior | LowRankJointPosterior, response: Tensor | None) -> Tensor:
        """Return zero (...), with the derivatives of the sites' evidence in A mu and K; see `DensePrior.follow`."""
        by_mean, u = posterior.weights, self.design.transposed_times(posterior.weights)
        by_covariance = 0.5 * (u.unsqueeze(-1) * u.unsqueeze(-2) - _of_one_latent(posterior, self.design))
        if response is not None:
            by_mean = by_mean + response
            product = self.design.transposed_times(response).unsqueeze(-1) * u.unsqueeze(-2)
            by_covariance = by_covariance + 0.5 * (product + product.mT)
        K = self.latent.covariance
        moved = (by_mean * (self.mean - self.mean.detach())).sum(-1)
        return moved + (by_covariance * (K - K.detach())).sum((-2, -1))


def predict_latent(
    posterior: LowRankPosterior | LowRankJointPosterior,
    test_mean: Tensor,
    cross_covariance: Tensor,
    test_covariance: LinearOperator,
) -> MultivariateNormal:
    """Return the posterior of f at S new inputs, its covariance lazily; differentiable in the last three arguments.

    With c = R^+ K_x* that is N(mu_* + c' E[z], K_** - c'c + c' Cov[z] c), f = mu + R z: no difference of numbers that
    are larger than the prior's, however sharp the sites are.

    Args:
        posterior: of h = A f, conditioned by a :class:`DesignPrior`.
        test_mean: (..., S) prior mean there, or (..., D, S).
        cross_covariance: (..., P, S) prior covariance of f at the training and at the new inputs.
        test_covariance: (..., S, S) prior covariance there.

    Example:
        >>> import torch
        >>> from linear_operator import to_linear_operator
        >>> from gpext.designs import pairs
        >>> from gpext.posteriors import DensePrior
        >>> from gpext.sites import GaussianSites
        >>> K, zero, one = torch.eye(2).double(), torch.zeros(2).double(), torch.ones(1).double()
        >>> prior = DesignPrior(zero[:1], DensePrior(zero, K), pairs(torch.tensor([[0, 1]]), 2), 0.0)
        >>> posterior = prior.condition(GaussianSites(one, one))  # f_0 - f_1 is near 1
        >>> predict_latent(posterior, zero, K, to_linear_operator(K)).mean
        tensor([ 0.3333, -0.3333], dtype=torch.float64)
    """
    assert posterior.latent_root is not None  # of a design
    root = posterior.latent_root.solve(cross_covariance.double()).mT
    rest = to_linear_operator(test_covariance) - RootLinearOperator(root.to(test_mean.dtype))
    return posterior.predict(test_mean, root, rest)


def _response(posterior: LowRankPosterior | LowRankJointPosterior, design: Design) -> Tensor:
    """Return M = A' S A (..., P, P), or of all D latents (..., D P, D P)."""
    own, columns = posterior.response_parts  # S = own - columns' columns
    if isinstance(posterior, LowRankPosterior):
        inner = design.transposed_times(columns)
        return design.gram(own) - inner.mT @ inner
    inner = design.transposed_times(columns).flatten(-2)  # (..., D M, D P)
    blocks = design.gram(own)  # (..., D, D, P, P)
    return blocks.movedim(-2, -3).flatten(-2).flatten(-3, -2) - inner.mT @ inner


def _of_one_latent(posterior: LowRankPosterior | LowRankJointPosterior, design: Design) -> Tensor:
    """Return the blocks of M that belong to one latent (..., D, P, P), or M (..., P, P)."""
    M = _response(posterior, design)
    if isinstance(posterior, LowRankPosterior):
        return M
    latents, size = posterior.prior_mean.size(-2), design.shape[1]
    apart = M.unflatten(-1, (latents, size)).unflatten(-3, (latents, size))  # (..., D, P, D, P)
    return apart.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
