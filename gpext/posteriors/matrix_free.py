r"""Condition a Gaussian process prior, known by its products alone, on Gaussian sites of positive precision.

    V = (K^-1 + T)^-1,    (I + T K)^-1 = I - P B^-1 P K = P B^-1 P^-1,    B = I + P K P,    P = T^1/2

Systems with B are solved by conjugate gradients: B is K + T^-1 in units of the noise, so that one tolerance suits every
datum, however sharp or blunt its site. Their preconditioner is P L L' P + I, L a partial Cholesky factor of K. The
prior is drawn as

    f0 = mu + L z1 + (K - L L')^1/2 z2,     z1, z2 ~ N(0, I)

the second part by Lanczos' recursion, up to an error whose root mean square is some hundredth of the noise's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpext.sites import GaussianSites
from gpext.solvers import LowRankPreconditioner, SolveStatus, conjugate_gradients, partial_cholesky, square_root_times

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}  # of solves
_SHARE = 0.03  # of the noise, for the error of a draw of the prior as estimated, some three times what it is


@dataclass(frozen=True)
class MatrixFreePosterior:
    """A Gaussian prior over N latent values conditioned on N sites, in the prior's own precision.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.posteriors import condition_matrix_free
        >>> from gpext.sites import GaussianSites
        >>> one = torch.ones(2).double()
        >>> prior = MultivariateNormal(0 * one, torch.eye(2).double())
        >>> posterior = condition_matrix_free(prior, GaussianSites(one, one))
        >>> posterior.respond(torch.ones(2, 1).double()).mT  # (I + T K)^-1
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """

    prior_mean: Tensor  # mu (N,)
    prior_covariance: LinearOperator  # K (N, N)
    sites: GaussianSites
    root: Tensor  # L (N, k), K - L L' positive semidefinite

    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return V vector (N,).

        Raises:
            ArithmeticError: a solve has not converged.
        """
        return self._times(self.respond(vector.unsqueeze(-1))).squeeze(-1)

    def respond(self, x: Tensor) -> Tensor:
        """Return (I + T K)^-1 x (N, R): by the second formula where sites are sharp, by the first elsewhere.

        Raises:
            ArithmeticError: a solve has not converged.
        """
        P = self._scale
        is_sharp = P.square() * self.prior_covariance.diagonal().unsqueeze(-1) > 1
        blunt = torch.where(is_sharp, 0.0, x)
        right = torch.where(is_sharp, x / torch.where(is_sharp, P, 1.0), 0.0) - P * self._times(blunt)
        return blunt + P * self._solve(right)

    def predict(self, test_mean: Tensor, cross: Tensor, test_variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return posterior means and variances (S,) at new inputs.

        Args:
            test_mean: (S,) prior mean there.
            cross: (N, S) prior covariance of the training and the new values.
            test_variance: (S,) prior variances there.

        Raises:
            ArithmeticError: a solve has not converged.
        """
        residual = (self.sites.shift - self.sites.precision * self.prior_mean).unsqueeze(-1)
        mean = test_mean + (cross.mT @ self.respond(residual)).squeeze(-1)
        scaled = self._scale * cross
        return mean, test_variance - (scaled * self._solve(scaled)).sum(-2)

    def draw_prior(self, *, generator: torch.Generator | None = None) -> Tensor:
        """Return f0 ~ N(mu, K) (N,)."""
        size, rank = self.root.shape
        z = torch.randn(rank + size, dtype=self.root.dtype, device=self.root.device, generator=generator)
        noise = float(self.sites.precision.mean().rsqrt())
        rest = square_root_times(
            lambda v: self._times(v) - self.root @ (self.root.mT @ v), z[rank:], tolerance=_SHARE * noise * size**0.5
        )
        return self.prior_mean + self.root @ z[:rank] + rest.value

    def _times(self, v: Tensor) -> Tensor:
        return self.prior_covariance.matmul(v)

    @property
    def _scale(self) -> Tensor:
        return self.sites.precision.sqrt().unsqueeze(-1)

    @cached_property
    def _preconditioner(self) -> LowRankPreconditioner:
        return LowRankPreconditioner.of(self._scale * self.root, torch.ones_like(self.prior_mean))

    def _solve(self, right: Tensor) -> Tensor:
        """Return B^-1 right (N, R)."""
        P = self._scale
        found = conjugate_gradients(
            lambda v: v + P * self._times(P * v),
            right,
            precondition=self._preconditioner,
            tolerance=_TOLERANCE[right.dtype],
        )
        if found.status is not SolveStatus.CONVERGED:
            raise ArithmeticError(
                f"a solve of size {len(right)} ended after {found.num_steps} steps, residual "
                f"{float(found.residual_norm.max()):.1g}: {found.status.value}"
            )
        return found.solution


@torch.no_grad()
def condition_matrix_free(
    prior: MultivariateNormal, sites: GaussianSites, *, generator: torch.Generator | None = None
) -> MatrixFreePosterior:
    """Condition a prior on sites, outside the graph.

    Args:
        prior: of N latent values, no batch; its covariance need not be at hand but for products, some columns and the
            diagonal.
        sites: (N,), of positive precision.
        generator: for the pivots of the partial Cholesky factor, on the CPU.

    Raises:
        ValueError: a precision is not positive.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.sites import GaussianSites
        >>> one = torch.ones(2).double()
        >>> prior = MultivariateNormal(0 * one, torch.eye(2).double())
        >>> condition_matrix_free(prior, GaussianSites(one, one)).covariance_times(one)
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    if not bool((sites.precision > 0).all()):
        raise ValueError(f"expected sites of positive precision; got {float(sites.precision.min()):g}.")
    K = prior.lazy_covariance_matrix.evaluate_kernel()
    L = partial_cholesky(
        lambda index: K[:, index].to_dense(),
        K.diagonal(),
        noise=float(sites.precision.mean().reciprocal()),
        generator=generator,
    )
    return MatrixFreePosterior(prior.mean, K, sites.to(prior.mean.dtype), L)
