r"""Condition D low-rank-plus-diagonal Gaussian priors on sites that couple the latents of a datum.

    p(f_d) = N(mu_d, Phi_d Phi_d' + diag(D_d)),   f_d = mu_d + Phi_d z_d + noise,   Phi_d (N x M),   z_d ~ N(0, I)

as :mod:`gpext.posteriors.low_rank` has it for one latent. Given z the data are independent, so the noise of a datum,
of covariance E_i = diag(D_1i, ..., D_Di), is integrated out of its site, and one system of all D M coordinates is left:

    B_i = I + E^1/2 U_i E^1/2,   Gamma_i = E^1/2 B_i^-1 E^1/2,   P_i = I - Gamma_i U_i,   T_i = U_i P_i
    e = nu - U mu,   A = I + sum_i Phi_i' T_i Phi_i = L L',   z^ = A^-1 sum_i Phi_i' P_i' e_i,   Phi_i (D x D M)
    a = P' e - T Phi z^,     m = mu + Phi z^ + E a,     V_ii = Gamma_i + P_i Phi_i A^-1 Phi_i' P_i'
    log|I + K U| = sum_i log|B_i| + log|A|,     R = (K + U^-1)^-1 = T - T Phi A^-1 Phi' T

in O(N D^2 M^2 + (D M)^3). A posterior exists where every B_i and A are positive definite.
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
from gpext.linalg.products import times
from gpext.linalg.square_root import SquareRoot
from gpext.posteriors.joint import JointPosterior, precision_blocks
from gpext.sites import JointSites, block_times


@dataclass(frozen=True)
class LowRankJointPosterior(JointPosterior):
    """D low-rank-plus-diagonal priors conditioned on N sites that couple them; float64."""

    prior_mean: Tensor  # mu (..., D, N)
    root: Tensor  # Phi (..., D, N, M)
    diagonal: Tensor  # D (..., D, N)
    sites: JointSites
    noise: Tensor  # Gamma (..., D, D, N)
    noise_log_det: Tensor  # log|B_i| (..., N)
    chol: Tensor  # L (..., D M, D M)
    is_proper: Tensor  # (...), bool
    latent_root: SquareRoot | None = None  # R, of the values that the data are linear functions of

    @property
    def positive_definite(self) -> Tensor:
        """Whether there is such a posterior (...)."""
        return self.is_proper

    @cached_property
    def weights(self) -> Tensor:
        """The weights a = K^-1 (m - mu) (..., D, N)."""
        return self._passed_back(self._residual_shift) - block_times(self._precision, self._low_rank_mean)

    @cached_property
    def mean(self) -> Tensor:
        """The posterior means (..., D, N)."""
        return self.prior_mean + self._low_rank_mean + self.diagonal * self.weights

    @cached_property
    def blocks(self) -> Tensor:
        """The posterior covariance of the latents of each datum (..., D, D, N)."""
        P, C = self._kept.movedim(-1, -3), self._low_rank_blocks.movedim(-1, -3)
        return self.noise + (P @ C @ P.mT).movedim(-3, -1)

    @property
    def log_det(self) -> Tensor:
        """log|I + K U| (...)."""
        return self.noise_log_det.sum(-1) + 2 * self.chol.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @property
    def log_normalizer(self) -> Tensor:
        """The evidence of the sites (...), see `DensePosterior.log_normalizer`."""
        mu, e = self.prior_mean, self._residual_shift
        at_mean = self.sites.shift * mu - 0.5 * mu * self.sites.times(mu)
        return (at_mean + 0.5 * e * (self.mean - mu)).sum((-2, -1)) - 0.5 * self.log_det

    @property
    def response_diagonal(self) -> Tensor:
        """The diagonal of R (..., D, N)."""
        T, C = self._precision.movedim(-1, -3), self._low_rank_blocks.movedim(-1, -3)
        return (T - T @ C @ T).diagonal(dim1=-2, dim2=-1).mT

    @property
    def response_root(self) -> Tensor:
        """The blocks of R Phi = T Phi A^-1 that belong to one latent, (..., D, N, M)."""
        solved = torch.linalg.solve_triangular(self.chol.mT, self._whitened.flatten(-2), upper=True)
        latents, size = self.prior_mean.shape[-2:]
        solved = solved.view(*solved.shape[:-2], latents, -1, latents, size)  # A^-1 Phi'
        return torch.einsum("...den,...dmen->...dnm", self._precision, solved)

    @property
    def response_parts(self) -> tuple[Tensor, Tensor]:
        """The blocks T (..., D, D, N) and the matrix Z (..., D M, D, N) of R = T - Z'Z."""
        return self._precision, torch.einsum("...ken,...edn->...kdn", self._whitened, self._precision)

    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return V vector (..., D, N)."""
        inner = self._solve(times(self.root.mT, self._passed_back(vector)))
        return block_times(self.noise, vector) + block_times(self._kept, times(self.root, inner))

    def distribution(self, dtype: torch.dtype) -> MultitaskMultivariateNormal:
        """Return the posterior of all latents at the training inputs, its covariance dense: (D N)^2 numbers."""
        reduced = torch.einsum("...den,...ken->...kdn", self._kept, self._whitened).flatten(-2)
        covariance = torch.diag_embed(self.noise).movedim(-3, -2).flatten(-4, -3).flatten(-2) + reduced.mT @ reduced
        operator = to_linear_operator(covariance.to(dtype))
        return MultitaskLatentNormal(self.mean.to(dtype).mT, operator, interleaved=False)

    def predict(
        self, test_mean: Tensor, test_root: Tensor, test_covariance: LinearOperator
    ) -> MultitaskMultivariateNormal:
        """Return the posterior of all latents at S new inputs, coupled, its covariance lazily.

        Args:
            test_mean: (..., D, S) prior means there.
            test_root: Phi there (..., D, S, M).
            test_covariance: what the prior has there beyond Phi Phi' (..., D, S, S).
        """
        dtype, root = test_mean.dtype, test_root.double()
        mean = test_mean.double() + times(root, self._coordinates)
        reduced = _whiten(self.chol, root).flatten(-2).to(dtype)
        alone = BlockDiagLinearOperator(to_linear_operator(test_covariance))
        covariance = alone + MatmulLinearOperator(reduced.mT, reduced)
        return MultitaskLatentNormal(mean.to(dtype).mT, covariance, interleaved=False)

    @cached_property
    def _kept(self) -> Tensor:
        """P (..., D, D, N)."""
        return _unit_like(self.noise) - _product(self.noise, precision_blocks(self.sites))

    @cached_property
    def _precision(self) -> Tensor:
        """T (..., D, D, N)."""
        return _product(precision_blocks(self.sites), self._kept)

    @property
    def _residual_shift(self) -> Tensor:
        return self.sites.shift - self.sites.times(self.prior_mean)

    def _passed_back(self, vector: Tensor) -> Tensor:
        """Return P' vector, datum by datum (..., D, N)."""
        return block_times(self._kept.transpose(-3, -2), vector)

    @cached_property
    def _coordinates(self) -> Tensor:
        """E[z] (..., D, M)."""
        return self._solve(times(self.root.mT, self._passed_back(self._residual_shift)))

    @cached_property
    def _low_rank_mean(self) -> Tensor:
        """Phi E[z] (..., D, N)."""
        return times(self.root, self._coordinates)

    @cached_property
    def _whitened(self) -> Tensor:
        """L^-1 Phi' (..., D M, D, N)."""
        return _whiten(self.chol, self.root)

    @cached_property
    def _low_rank_blocks(self) -> Tensor:
        """Phi_i A^-1 Phi_i' (..., D, D, N)."""
        return torch.einsum("...kdn,...ken->...den", self._whitened, self._whitened)

    def _solve(self, right: Tensor) -> Tensor:
        """Return A^-1 right (..., D, M)."""
        return torch.cholesky_solve(right.flatten(-2).unsqueeze(-1), self.chol).view(right.shape)


def condition_low_rank_joint(
    prior_mean: Tensor, root: Tensor, diagonal: Tensor, sites: JointSites
) -> LowRankJointPosterior:
    """Condition D independent priors N(prior_mean, root root' + diag(diagonal)) on sites that couple them.

    Args:
        prior_mean: mu (..., D, N).
        root: Phi (..., D, N, M).
        diagonal: D (..., D, N), not negative.
        sites: (..., D, N).
    """
    sites = sites.to(torch.float64)
    U, spread = precision_blocks(sites).movedim(-1, -3), diagonal.sqrt().mT  # by datum
    inner = spread.unsqueeze(-1) * U * spread.unsqueeze(-2)
    unit = torch.eye(U.size(-1), dtype=U.dtype, device=U.device)
    small, info = torch.linalg.cholesky_ex(unit + 0.5 * (inner + inner.mT))
    is_proper = (info == 0).all(-1)
    small = torch.where((info == 0)[..., None, None], small, unit)  # a placeholder; the result is not used
    scaled = torch.linalg.solve_triangular(small, torch.diag_embed(spread), upper=False)
    noise = scaled.mT @ scaled
    log_det = 2 * small.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    seen = U - U @ noise @ U  # T
    A = _gram(root, 0.5 * (seen + seen.mT).movedim(-3, -1))
    chol, failed = torch.linalg.cholesky_ex(A)
    return LowRankJointPosterior(
        prior_mean, root, diagonal, sites, noise.movedim(-3, -1), log_det, chol, is_proper & (failed == 0)
    )


def _gram(root: Tensor, precision: Tensor) -> Tensor:
    """Return I + sum_i Phi_i' T_i Phi_i (..., D M, D M) for T (..., D, D, N)."""
    latents = root.size(-3)
    rows = []
    for d in range(latents):
        left = root[..., d, :, :].mT.unsqueeze(-3) * precision[..., d, :, :].unsqueeze(-2)  # (..., D, M, N)
        rows.append((left @ root).movedim(-3, -2).flatten(-2))
    A = torch.cat(rows, -2)
    return A + torch.eye(A.size(-1), dtype=A.dtype, device=A.device)


def _whiten(chol: Tensor, root: Tensor) -> Tensor:
    """Return L^-1 Phi' (..., D M, D, N) for Phi (..., D, N, M), whose latents share no coordinate."""
    latents, size = root.shape[-3:-1]
    apart = torch.eye(latents, dtype=root.dtype, device=root.device)
    columns = torch.einsum("de,...enm->...dmen", apart, root).flatten(-4, -3).flatten(-2)
    return torch.linalg.solve_triangular(chol, columns, upper=False).unflatten(-1, (latents, size))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of blocks (..., D, D, N), datum by datum."""
    return torch.einsum("...dkn,...ken->...den", left, right)


def _unit_like(blocks: Tensor) -> Tensor:
    """Return the identity (D, D, 1)."""
    return torch.eye(blocks.size(-2), dtype=blocks.dtype, device=blocks.device).unsqueeze(-1)
