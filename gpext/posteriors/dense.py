r"""Condition a dense Gaussian prior on Gaussian sites of any sign, without inverting K [JVV11 Sec. 4.1, R&W 3.5].

    q(f) prop. to N(f | mu, K) prod_i exp(nu_i f_i - tau_i f_i^2 / 2) = N(m, V)
    V = (K^-1 + T)^-1,   m = mu + V (nu - tau mu),   T = diag(tau)

The sites are split by sign, T = P^2 - Q^2, and conditioned on in turn:

    B1 = I + P K P = L1 L1',    W1 = L1^-1 P K,    V1 = K - W1' W1
    B2 = I - Q V1 Q = L2 L2',   W2 = L2^-1 Q V1,   V  = V1 + W2' W2
    log|I + K T| = log|B1| + log|B2|

B1 is positive definite whatever K and P are, duplicates included; B2 failing means that V is not positive definite,
which the result says. The second stage is skipped where no precision is negative. Everything is computed in float64,
in O(N^3): one Cholesky a stage, and one triangular solve with N right-hand sides where variances are asked for; the
mean and the evidence do without.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from linear_operator.operators import LinearOperator, MatmulLinearOperator
from torch import Tensor

from gpext.sites import GaussianSites


@dataclass(frozen=True)
class DensePosterior:
    """A Gaussian prior over N latent values conditioned on N sites; float64.

    `positive_definite` is False when no such posterior exists (too negative a precision, or a prior covariance that is
    not positive semidefinite); every number is then meaningless.
    """

    prior_mean: Tensor  # (..., N)
    prior_covariance: Tensor  # (..., N, N)
    sites: GaussianSites
    chol_positive: Tensor  # L1 (..., N, N)
    chol_negative: Tensor | None  # L2
    positive_definite: Tensor  # (...), bool

    @cached_property
    def whitened_positive(self) -> Tensor:
        """W1 = L1^-1 P K (..., N, N)."""
        root, _ = _sign_split(self.sites.precision)
        return torch.linalg.solve_triangular(
            self.chol_positive, root.unsqueeze(-1) * self.prior_covariance, upper=False
        )

    @cached_property
    def whitened_negative(self) -> Tensor | None:
        """W2 = L2^-1 Q V1 (..., N, N), if there are negative precisions."""
        if self.chol_negative is None:
            return None
        _, negative = _sign_split(self.sites.precision)
        remaining = _remaining(self.prior_covariance, self.whitened_positive)
        return torch.linalg.solve_triangular(self.chol_negative, negative.unsqueeze(-1) * remaining, upper=False)

    @cached_property
    def mean(self) -> Tensor:
        """The posterior mean (..., N)."""
        return self.prior_mean + self.covariance_times(self._residual_shift)

    @cached_property
    def variance(self) -> Tensor:
        """The posterior marginal variances (..., N)."""
        variance = self.prior_covariance.diagonal(dim1=-2, dim2=-1) - self.whitened_positive.square().sum(-2)
        if self.whitened_negative is not None:
            variance = variance + self.whitened_negative.square().sum(-2)
        return variance

    @property
    def covariance(self) -> Tensor:
        """The posterior covariance V (..., N, N)."""
        covariance = _remaining(self.prior_covariance, self.whitened_positive)
        if self.whitened_negative is not None:
            covariance = covariance + self.whitened_negative.mT @ self.whitened_negative
        return covariance

    @property
    def log_det(self) -> Tensor:
        """log|I + K T| (...)."""
        log_det = 2 * self.chol_positive.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        if self.chol_negative is not None:
            log_det = log_det + 2 * self.chol_negative.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return log_det

    @property
    def log_normalizer(self) -> Tensor:
        r"""The evidence of the sites, :math:`A = \log\int N(f|\mu,K) \prod_i t_i(f_i) df` (...).

        With e = nu - tau mu: A = sum(nu mu - tau mu^2 / 2) + e' V e / 2 - log|I + K T| / 2.
        """
        mu, residual = self.prior_mean, self._residual_shift
        at_mean = (self.sites.shift * mu - 0.5 * self.sites.precision * mu.square()).sum(-1)
        return at_mean + 0.5 * (residual * self.covariance_times(residual)).sum(-1) - 0.5 * self.log_det

    @property
    def gradient(self) -> tuple[Tensor, Tensor]:
        """Derivatives of `log_normalizer` at fixed sites in the prior mean (..., N) and covariance (..., N, N).

        With a = K^-1 (m - mu): a, and (a a' - R) / 2 where R = (K + T^-1)^-1 = P B1^-1 P = T - T V T.
        """
        weights = self.weights
        outer = weights.unsqueeze(-1) * weights.unsqueeze(-2)
        if self.chol_negative is None:
            root = self.sites.precision.sqrt()
            inverse = torch.cholesky_inverse(self.chol_positive)
            return weights, 0.5 * (outer - root.unsqueeze(-1) * inverse * root.unsqueeze(-2))
        tau = self.sites.precision
        response = torch.diag_embed(tau) - tau.unsqueeze(-1) * self.covariance * tau.unsqueeze(-2)
        return weights, 0.5 * (outer - response)

    @property
    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        """Mean and variance (..., N) of each f_i given all sites but its own: the cavities of JVV11 Sec. 4.

        A variance that is not positive means that the datum alone holds the posterior together: there is no cavity.
        """
        mean, variance = self.mean, self.variance
        remaining = 1 - self.sites.precision * variance
        return (mean - self.sites.shift * variance) / remaining, variance / remaining

    @property
    def weights(self) -> Tensor:
        """K^-1 (m - mu) = nu - tau m (..., N): what prediction at new inputs multiplies."""
        return self.sites.shift - self.sites.precision * self.mean

    def predict(
        self, test_mean: Tensor, cross_covariance: Tensor, test_covariance: Tensor | LinearOperator
    ) -> MultivariateNormal:
        """Return the posterior at S new inputs, its covariance lazily; differentiable in the arguments.

        Args:
            test_mean: (..., S) prior mean there.
            cross_covariance: (..., N, S) prior covariance of the training and the new values.
            test_covariance: (..., S, S) prior covariance there.
        """
        dtype = test_mean.dtype
        cross = cross_covariance.double()
        mean = test_mean.double() + (cross.mT @ self.weights.unsqueeze(-1)).squeeze(-1)
        root, negative = _sign_split(self.sites.precision)
        reduced = torch.linalg.solve_triangular(self.chol_positive, root.unsqueeze(-1) * cross, upper=False)
        covariance = to_linear_operator(test_covariance) + _gram(reduced, -1, dtype)
        if self.chol_negative is not None:
            remaining = cross - self.whitened_positive.mT @ reduced  # covariance of the two under V1
            extra = torch.linalg.solve_triangular(self.chol_negative, negative.unsqueeze(-1) * remaining, upper=False)
            covariance = covariance + _gram(extra, 1, dtype)
        return MultivariateNormal(mean.to(dtype), covariance)

    @property
    def _residual_shift(self) -> Tensor:
        return self.sites.shift - self.sites.precision * self.prior_mean

    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return V vector (..., N), in O(N^2) where no precision is negative."""
        root, _ = _sign_split(self.sites.precision)
        root, product = root.unsqueeze(-1), self.prior_covariance @ vector.unsqueeze(-1)
        column = vector.unsqueeze(-1)
        solved = torch.cholesky_solve(root * product, self.chol_positive)
        product = product - self.prior_covariance @ (root * solved)
        if self.whitened_negative is not None:
            product = product + self.whitened_negative.mT @ (self.whitened_negative @ column)
        return product.squeeze(-1)


def condition_dense(prior_mean: Tensor, prior_covariance: Tensor, sites: GaussianSites) -> DensePosterior:
    """Condition N(prior_mean, prior_covariance) on sites; differentiable in all of them.

    Args:
        prior_mean: mu (..., N).
        prior_covariance: K (..., N, N), symmetric positive semidefinite; may be singular.
        sites: (..., N), of any sign.
    """
    prior_mean, covariance, sites = prior_mean.double(), prior_covariance.double(), sites.to(torch.float64)
    root, negative = _sign_split(sites.precision)
    chol_positive, ok = _factor(covariance, root, sign=1)
    chol_negative = None
    if bool(negative.any()):
        scaled = root.unsqueeze(-1) * covariance
        whitened = torch.linalg.solve_triangular(chol_positive, scaled, upper=False)
        chol_negative, second_ok = _factor(_remaining(covariance, whitened), negative, sign=-1)
        ok = ok & second_ok
    return DensePosterior(prior_mean, covariance, sites, chol_positive, chol_negative, ok)


def _factor(covariance: Tensor, root: Tensor, *, sign: int) -> tuple[Tensor, Tensor]:
    """Return L with L L' = I + sign R C R, and whether the factorisation succeeded."""
    inner = covariance * (sign * root.unsqueeze(-1) * root.unsqueeze(-2))
    inner.diagonal(dim1=-2, dim2=-1).add_(1)
    chol, info = torch.linalg.cholesky_ex(inner)
    return chol, info == 0


def _gram(columns: Tensor, sign: int, dtype: torch.dtype) -> LinearOperator:
    """Return sign columns' columns."""
    columns = columns.to(dtype)
    return MatmulLinearOperator(sign * columns.mT, columns)


def _remaining(covariance: Tensor, whitened: Tensor) -> Tensor:
    """Return V1 = K - W1' W1."""
    return covariance - whitened.mT @ whitened


def _sign_split(precision: Tensor) -> tuple[Tensor, Tensor]:
    """Return P and Q with precision = P^2 - Q^2, both nonnegative and one of them zero."""
    return precision.clamp_min(0).sqrt(), (-precision).clamp_min(0).sqrt()
