r"""Condition D independent latents on sites that couple the latents of a datum [Cha13 Sec. 3.4, Eqs. 30-34].

    q(f) prop. to prod_d N(f_d | mu_d, K_d) prod_i exp(nu_i' f_i - f_i' (diag(gamma_i) + a_i w_i w_i') f_i / 2)

in two steps of the same kind. The diagonal conditions every latent by itself; what is left is one Gaussian factor of
precision a_i, of either sign, for each of the N numbers g_i = w_i' f_i, whose covariance after the first step is

    G = sum_d diag(w_d) V0_d diag(w_d),        V0_d = (K_d^-1 + diag(gamma_d))^-1
    R2 = (G + A^-1)^-1,    V = V0 - V0 W R2 W' V0,    log|I + K U| = sum_d log|I + K_d Gamma_d| + log|I + G A|

so that nothing is inverted, gamma and a may be zero, and D Cholesky factors and one more of size N do: O(D N^3) time,
O(D N^2) memory. Where a <= 0 <= gamma, as for every canonical exponential family, both steps succeed if and only if
the posterior is proper, and the second is that of :mod:`gpext.posteriors.negative_coupling`, which loses no digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from linear_operator import to_linear_operator
from linear_operator.operators import BlockDiagLinearOperator, LinearOperator, MatmulLinearOperator
from torch import Tensor

from gpext.distributions import MultitaskLatentNormal
from gpext.likelihoods.curvature import diagonal_blocks
from gpext.posteriors.dense import DensePosterior, condition_dense
from gpext.posteriors.joint import JointPosterior
from gpext.posteriors.negative_coupling import NegativeCoupling, condition_on_couplings
from gpext.posteriors.whitened_couplings import WhitenedCouplings
from gpext.sites import CoupledSites, GaussianSites


@dataclass(frozen=True)
class CoupledPosterior(JointPosterior):
    """D Gaussian priors over N latent values each, conditioned on sites that couple them; float64.

    Example:
        >>> import torch
        >>> from gpext.posteriors import condition_coupled
        >>> from gpext.sites import CoupledSites
        >>> one = torch.ones(2, 1).double()
        >>> sites = CoupledSites(one, one, torch.ones(1).double(), one)
        >>> posterior = condition_coupled(0 * one, torch.eye(1).double().expand(2, 1, 1), sites)
        >>> posterior.log_det.exp().round(decimals=4)  # |I + K U|
        tensor(8., dtype=torch.float64)
    """

    sites: CoupledSites
    first: DensePosterior  # every latent given the diagonal (..., D, N)
    second: DensePosterior | NegativeCoupling  # g given the couplings (..., N)

    @classmethod
    def of(cls, first: DensePosterior, sites: CoupledSites) -> CoupledPosterior:
        """Return what the couplings of sites make of D latents conditioned on their diagonal; float64."""
        w = sites.direction
        seen_mean = (w * first.mean).sum(-2)
        if bool(first.positive_definite.all()):
            second = condition_on_couplings(seen_mean, first.response, sites.precision, sites.coupling, w)
            if second is not None:
                return cls(sites, first, second)
        seen = (w.unsqueeze(-1) * first.covariance * w.unsqueeze(-2)).sum(-3)
        seen = 0.5 * (seen + seen.mT)
        no_shift = torch.zeros_like(sites.coupling)
        return cls(sites, first, condition_dense(seen_mean, seen, GaussianSites(no_shift, sites.coupling)))

    @property
    def prior_mean(self) -> Tensor:  # type: ignore[override]
        """The prior means (..., D, N)."""
        return self.first.prior_mean

    @property
    def positive_definite(self) -> Tensor:
        """Whether there is such a posterior (...)."""
        return self.first.positive_definite.all(-1) & self.second.positive_definite

    @cached_property
    def mean(self) -> Tensor:
        """The posterior means (..., D, N)."""
        return self.first.mean + self.first.covariance_times(self._spread(self.second.weights))

    @cached_property
    def weights(self) -> Tensor:
        """K^-1 (m - mu) (..., D, N)."""
        return self.first.weights + self.first.respond(self._spread(self.second.weights))

    @cached_property
    def blocks(self) -> Tensor:
        """The posterior covariance of the latents of each datum (..., D, D, N)."""
        if self._whitened is not None:
            return self._whitened.blocks
        coupled = torch.einsum("...dij,...eij->...dei", self._through_response, self._through)
        return diagonal_blocks(self.first.variance) - coupled

    @property
    def log_det(self) -> Tensor:
        """log|I + K U| (...)."""
        return self.first.log_det.sum(-1) + self.second.log_det

    @property
    def log_normalizer(self) -> Tensor:
        r"""The evidence of the sites (...), :math:`A = \log\int N(f|\mu,K) \prod_i t_i(f_i) df`."""
        return self.first.log_normalizer.sum(-1) + self.second.log_normalizer

    @property
    def gradient(self) -> tuple[Tensor, Tensor]:
        """Derivatives of `log_normalizer` at fixed sites in the prior means (..., D, N) and covariances (..., D, N, N).

        a, and (a a' - R_dd) / 2 with R_dd = R0_d + T_d R2 T_d',
        T_d = (I - R0_d K_d) diag(w_d) = diag(w_d) - Gamma_d Z_d.
        """
        outer = self.weights.unsqueeze(-1) * self.weights.unsqueeze(-2)
        return self.weights, outer.sub_(self._response).mul_(0.5)

    def gradient_of_shared(self, response: Tensor | None) -> Tensor:
        """Return the derivative of `log_normalizer` in one covariance (..., N, N) of all latents, from one product.

        The sum of those in :attr:`gradient`, and with a `response` w (..., D, N) of w (m - mu)' K^-1, made symmetric.
        """
        half = 0.5 * self.weights if response is None else 0.5 * self.weights + response
        outer = self.weights.mT @ half
        of_all = self._response.sum(-3) if self._whitened is None else self._whitened.summed_response
        return torch.add(outer, outer.mT).sub_(of_all).mul_(0.5)

    @property
    def _response(self) -> Tensor:
        """R_dd (..., D, N, N)."""
        if self._whitened is not None:
            return self._whitened.full_response
        gamma, w = self.sites.precision.unsqueeze(-1), self.sites.direction
        reduced = torch.diag_embed(w) - gamma * self._through
        weighted = w.unsqueeze(-1) * self.second.response.unsqueeze(-3) - gamma * self._through_response  # T_d R2
        return self.first.response + weighted @ reduced.mT

    @cached_property
    def _whitened(self) -> WhitenedCouplings | None:
        if not isinstance(self.second, NegativeCoupling):
            return None
        sites, first = self.sites, self.first
        return WhitenedCouplings.of(
            first.prior_covariance, sites.precision, sites.direction, first.response, self.second
        )

    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return V vector (..., D, N), in O(D N^2)."""
        alone = self.first.covariance_times(vector)
        pulled = self.second.respond(self.sites.coupling * (self.sites.direction * alone).sum(-2))  # R2 W' V0 x
        return alone - self.first.covariance_times(self._spread(pulled))

    def solve(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return V vector and K^-1 V vector (..., D, N), in O(D N^2).

        Under negative couplings R0, which H was made of, is read twice, in a third of the time of triangular solves.
        """
        if not isinstance(self.second, NegativeCoupling):
            return super().solve(vector)
        return self.second.solve(self.first.prior_covariance, self.first.response, vector)

    def distribution(self, dtype: torch.dtype) -> MultitaskMultivariateNormal:
        """Return the posterior of all latents at the training inputs."""
        columns = self._through.mT.movedim(-3, -2).flatten(-2)  # (..., N, D N): Cov(g, f)
        return self._joint(self.mean, to_linear_operator(self.first.covariance), columns, dtype)

    def predict(
        self, test_mean: Tensor, cross_covariance: Tensor, test_covariance: Tensor | LinearOperator
    ) -> MultitaskMultivariateNormal:
        """Return the posterior of all latents at S new inputs, coupled, its covariance lazily.

        Args:
            test_mean: (..., D, S) prior means there.
            cross_covariance: (..., D, N, S) prior covariances of the training and the new values.
            test_covariance: (..., D, S, S) prior covariances there.
        """
        dtype = test_mean.dtype
        cross = cross_covariance.double()
        mean = test_mean.double() + (cross.mT @ self.weights.unsqueeze(-1)).squeeze(-1)
        reduced = self.first.factor.whiten(cross)
        alone = self.first.covariance_of(test_covariance, cross, reduced, dtype)
        seen = self.sites.direction.unsqueeze(-1) * self.first.covariance_with(cross, reduced)
        return self._joint(mean, alone, seen.movedim(-3, -2).flatten(-2), dtype)

    def _joint(
        self, mean: Tensor, alone: LinearOperator, columns: Tensor, dtype: torch.dtype
    ) -> MultitaskMultivariateNormal:
        """Return N(mean, V0 - C' R2 C) of S values of each latent, given V0 (..., D, S, S) and C (..., N, D S)."""
        coupled = MatmulLinearOperator(-columns.mT.to(dtype), (self.second.response @ columns).to(dtype))
        covariance = BlockDiagLinearOperator(alone.to(dtype)) + coupled
        return MultitaskLatentNormal(mean.to(dtype).mT, covariance, interleaved=False)

    @cached_property
    def _through(self) -> Tensor:
        """Z_d = V0_d diag(w_d), the covariance of f_d and g after the first step (..., D, N, N)."""
        return self.first.covariance * self.sites.direction.unsqueeze(-2)

    @cached_property
    def _through_response(self) -> Tensor:
        """Z_d R2 (..., D, N, N)."""
        return self._through @ self.second.response.unsqueeze(-3)

    def _spread(self, value: Tensor) -> Tensor:
        """Return W value (..., D, N), for a number a datum (..., N)."""
        return self.sites.direction * value.unsqueeze(-2)


def condition_coupled(prior_mean: Tensor, prior_covariance: Tensor, sites: CoupledSites) -> CoupledPosterior:
    """Condition D independent priors on sites that couple them; differentiable in all of them.

    Args:
        prior_mean: mu (..., D, N).
        prior_covariance: K (..., D, N, N), or one (N, N) of all latents, symmetric positive semidefinite; may be
            singular.
        sites: (..., D, N).

    Example:
        >>> import torch
        >>> from gpext.sites import CoupledSites
        >>> one = torch.ones(2, 1).double()  # two latents of one datum
        >>> sites = CoupledSites(one, one, torch.ones(1).double(), one)
        >>> posterior = condition_coupled(0 * one, torch.eye(1).double().expand(2, 1, 1), sites)
        >>> posterior.mean.mT, posterior.blocks.squeeze(-1)
        (tensor([[0.2500, 0.2500]], dtype=torch.float64), tensor([[ 0.3750, -0.1250],
                [-0.1250,  0.3750]], dtype=torch.float64))
    """
    sites = sites.to(torch.float64)
    return CoupledPosterior.of(condition_dense(prior_mean, prior_covariance, sites.diagonal), sites)
