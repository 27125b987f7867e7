"""A dense Gaussian prior over N latent values, as every inference rule takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

from gpext.linalg.square_root import SquareRoot
from gpext.posteriors.block import BlockPosterior, condition_blocks
from gpext.posteriors.coupled import CoupledPosterior, condition_coupled
from gpext.posteriors.dense import DensePosterior, condition_dense
from gpext.posteriors.rough import RoughPosterior, condition_roughly
from gpext.sites import BlockSites, CoupledSites, GaussianSites, JointSites

_KNOWN = 1e-30  # for a variance of zero, as a part of the largest
_ROUNDED = (0.0, 1.0, 10.0, 100.0)  # times eps and the largest variance: what rounding may take of an eigenvalue


@dataclass(frozen=True)
class DensePrior:
    """N(mu, K) over N latent values; float64, in the graph of what it was made from.

    Example:
        >>> import torch
        >>> from gpext.sites import GaussianSites
        >>> one = torch.ones(2).double()
        >>> prior = DensePrior(0 * one, torch.eye(2).double())
        >>> prior.condition(GaussianSites(one, one)).mean
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    mean: Tensor  # mu (..., N)
    covariance: Tensor  # K (..., N, N)

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor, jitter: float) -> DensePrior:
        """Return the prior N(mean, covariance + jitter I)."""
        exact = covariance.dtype == torch.float64
        covariance = covariance.double()
        if not exact:
            covariance = 0.5 * (covariance + covariance.mT)  # rounding may have made it unsymmetric
        if jitter:
            covariance = covariance + jitter * torch.eye(mean.size(-1), dtype=torch.float64, device=covariance.device)
        variance = covariance.detach().diagonal(dim1=-2, dim2=-1)
        if bool((variance == 0).any()):  # of a known value; a variance this small is the same to rounding
            little = _KNOWN * torch.where(variance.amax() > 0, variance.amax(), 1)
            covariance = covariance + torch.where(variance == 0, little, 0).diag_embed()
        return cls(mean.double(), covariance)

    def definite(self, eps: float) -> tuple[DensePrior, float]:
        """Return the prior of a K that was rounded to `eps`, made positive definite again, and the jitter that did it.

        The least of a few multiples of eps; none, and K as it is, where K is not positive definite by more than that. A
        singular K, such as that of inputs that occur twice, needs none: it has a posterior as it is.
        """
        size, largest = self.mean.size(-1), float(self.variance.detach().amax())
        unit = torch.eye(size, dtype=torch.float64, device=self.covariance.device)
        singular = size * torch.finfo(torch.float64).eps * largest  # what float64 makes of an eigenvalue of zero
        for factor in _ROUNDED:
            jitter = factor * eps * largest
            covariance = self.covariance + jitter * unit if jitter else self.covariance
            if bool((torch.linalg.cholesky_ex(covariance.detach() + singular * unit)[1] == 0).all()):
                return DensePrior(self.mean, covariance), jitter
        return self, 0.0

    @property
    def variance(self) -> Tensor:
        """The prior variances (..., N)."""
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    @property
    def distribution(self) -> MultivariateNormal:
        """The same as gpytorch's."""
        return MultivariateNormal(self.mean, to_linear_operator(self.covariance))

    @property
    def is_finite(self) -> bool:
        """Whether every entry is."""
        return bool(self.covariance.detach().sum().isfinite()) or bool(self.covariance.isfinite().all())

    @property
    def requires_grad(self) -> bool:
        """Whether anything learns from it."""
        return self.mean.requires_grad or self.covariance.requires_grad

    @cached_property
    def square_root(self) -> SquareRoot:
        """R with K = R R', outside the graph.

        Raises:
            ValueError: K is not positive semidefinite.
        """
        return SquareRoot.of(self.covariance.detach())

    @classmethod
    def stack(cls, priors: Sequence[DensePrior]) -> DensePrior:
        """Return a batch of priors, the first dimension."""
        return cls(torch.stack([p.mean for p in priors]), torch.stack([p.covariance for p in priors]))

    def draw(self, shape: torch.Size, *, generator: torch.Generator | None = None) -> Tensor:
        """Return draws f ~ N(mu, K) of the given shape (..., N), outside the graph.

        Raises:
            ValueError: K is not positive semidefinite.
        """
        mean = self.mean.detach()
        v = torch.randn(shape, dtype=mean.dtype, device=mean.device, generator=generator)
        return mean + self.square_root.times(v)

    def expand_to(self, shape: torch.Size) -> DensePrior:
        """Return the same prior for each of a batch of data of a shape (..., N), or (..., 1, N) for several latents."""
        return DensePrior(self.mean.expand(torch.broadcast_shapes(self.mean.shape, shape)), self.covariance)

    @overload
    def condition(self, sites: GaussianSites) -> DensePosterior: ...

    @overload
    def condition(self, sites: JointSites) -> CoupledPosterior | BlockPosterior: ...

    @overload
    def condition(self, sites: GaussianSites | JointSites) -> DensePosterior | CoupledPosterior | BlockPosterior: ...

    def condition(self, sites: GaussianSites | JointSites) -> DensePosterior | CoupledPosterior | BlockPosterior:
        """Return the prior, of D latents for coupled sites, conditioned on them; outside the graph."""
        with torch.no_grad():
            mean, covariance = self.mean.detach(), self.covariance.detach()
            if isinstance(sites, CoupledSites):
                return condition_coupled(mean, covariance, sites)
            if isinstance(sites, BlockSites):
                return condition_blocks(mean, covariance, sites)
            return condition_dense(mean, covariance, sites)

    def condition_roughly(self, sites: GaussianSites | JointSites) -> RoughPosterior | None:
        """Return the same in float32, to few digits and in half of the time, or None where that does not serve.

        Of one latent a training step gains a twentieth by it, and factorises in float64.
        """
        if not isinstance(sites, CoupledSites):
            return None
        with torch.no_grad():
            return condition_roughly(self.mean.detach(), self.covariance.detach(), sites)

    def follow(self, posterior: DensePosterior | CoupledPosterior | BlockPosterior, response: Tensor | None) -> Tensor:
        """Return zero (...), with the derivatives of the sites' evidence in mu and K, the sites fixed.

        First derivatives only: in closed form they cost a fraction of differentiating through a factorisation. Of D
        coupled latents a part belongs to each, (..., D), or, where they share K, one to all, (..., 1).

        Args:
            posterior: this prior conditioned on the sites, whose log normaliser is the evidence.
            response: w (..., N), if what is followed depends on the posterior mean as well, with derivative
                (I + K T)' w: it adds w (m - mu)' K^-1, made symmetric, to the derivative in K, and w to that in mu.
        """
        if isinstance(posterior, CoupledPosterior) and self.covariance.dim() == 2:
            by_mean = posterior.weights if response is None else posterior.weights + response
            by_covariance = posterior.gradient_of_shared(response)
            moved = (by_mean * self.mean).sum((-2, -1)) + _inner(by_covariance.flatten(-2), self.covariance.flatten())
            return (moved - moved.detach()).unsqueeze(-1)
        by_mean, by_covariance = posterior.gradient  # made anew for each caller, and changed in place
        if response is not None:
            by_covariance.addcmul_(response.unsqueeze(-1), by_mean.unsqueeze(-2), value=0.5)
            by_covariance.addcmul_(by_mean.unsqueeze(-1), response.unsqueeze(-2), value=0.5)
            by_mean = by_mean + response
        followed = (by_mean * self.mean).sum(-1) + _inner(by_covariance.flatten(-2), self.covariance.flatten(-2))
        return followed - followed.detach()


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Return a'b (...) of a (..., N) and b (..., N) or (N,), without a product of their size."""
    return a @ b if b.dim() == 1 else (a.unsqueeze(-2) @ b.unsqueeze(-1)).squeeze((-2, -1))
