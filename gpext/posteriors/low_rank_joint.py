r"""Condition D low-rank-plus-diagonal Gaussian priors on sites that couple the latents of a datum.

    p(f_d) = N(mu_d, Phi_d Phi_d' + diag(D_d)),   f_d = mu_d + Phi_d z_d + noise,   Phi_d (N x M),   z_d ~ N(0, I)

as :mod:`gpext.posteriors.low_rank` has it for one latent. Given z the data are independent, so the noise of a datum,
of covariance E_i = diag(D_1i, ..., D_Di), is integrated out of its site, and one system of all D M coordinates is left:

    B_i = I + E^1/2 U_i E^1/2,   Gamma_i = E^1/2 B_i^-1 E^1/2,   P_i = I - Gamma_i U_i,   T_i = U_i P_i
    e = nu - U mu,   A = I + sum_i Phi_i' T_i Phi_i = L L',   z^ = A^-1 sum_i Phi_i' P_i' e_i,   Phi_i (D x D M)
    a = P' e - T Phi z^,     m = mu + Phi z^ + E a,     V_ii = Gamma_i + P_i Phi_i A^-1 Phi_i' P_i'
    log|I + K U| = sum_i log|B_i| + log|A|,     R = (K + U^-1)^-1 = T - T Phi A^-1 Phi' T

in O(N D^2 M^2 + (D M)^3). A posterior exists where every B_i and A are positive definite.

Latents share no coordinate, so that of L^-1 Phi_i' the columns of latent d begin at its own block of rows: they are the
product of a block of columns of L^-1 and Phi_d', and data are taken some at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from gpext.linalg.triangles import solve_lower, solve_whole
from gpext.posteriors.joint import JointPosterior, precision_blocks
from gpext.sites import JointSites, block_times

_NUMBERS = 2**21  # of L^-1 Phi' held at a time


@dataclass(frozen=True)
class LowRankJointPosterior(JointPosterior):
    """D low-rank-plus-diagonal priors conditioned on N sites that couple them; float64.

    Example:
        >>> import torch
        >>> from gpext.posteriors import condition_low_rank_joint
        >>> from gpext.sites import CoupledSites
        >>> one = torch.ones(2, 1).double()
        >>> sites = CoupledSites(one, one, torch.ones(1).double(), one)
        >>> posterior = condition_low_rank_joint(0 * one, torch.ones(2, 1, 1).double(), 0 * one, sites)
        >>> posterior.variance.mT
        tensor([[0.3750, 0.3750]], dtype=torch.float64)
    """

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
    def response_diagonal(self) -> Tensor:
        """The diagonal of R (..., D, N)."""
        T, C = self._precision.movedim(-1, -3), self._low_rank_blocks.movedim(-1, -3)
        return (T - T @ C @ T).diagonal(dim1=-2, dim2=-1).mT

    @property
    def response_root(self) -> Tensor:
        """The blocks of R Phi = T Phi A^-1 that belong to one latent, (..., D, N, M)."""
        found = torch.empty_like(self.root)
        width = self.root.size(-1)
        for some in self._some_data():
            weighted = self._precision[..., some].movedim(-1, -3) @ self._whitened(some)  # T Phi L^-T (..., n, D, D M)
            for d in range(self.root.size(-3)):
                back = self._inverse_factor[..., d * width :, d * width : (d + 1) * width]
                found[..., d, some, :] = weighted[..., d, d * width :] @ back
        return found

    @property
    def response_parts(self) -> tuple[Tensor, Tensor]:
        """The blocks T (..., D, D, N) and the matrix Z (..., D M, D, N) of R = T - Z'Z."""
        T = self._precision.movedim(-1, -3)
        return self._precision, (T @ self._whitened()).transpose(-3, -1)

    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return V vector (..., D, N)."""
        inner = self._solve(times(self.root.mT, self._passed_back(vector)))
        return block_times(self.noise, vector) + block_times(self._kept, times(self.root, inner))

    def distribution(self, dtype: torch.dtype) -> MultitaskMultivariateNormal:
        """Return the posterior of all latents at the training inputs, its covariance dense: (D N)^2 numbers."""
        reduced = (self._kept.movedim(-1, -3) @ self._whitened()).transpose(-3, -1).flatten(-2)
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
        dtype = test_mean.dtype
        root = test_root.double().expand(*test_mean.shape, test_root.size(-1))
        mean = test_mean.double() + times(root, self._coordinates)
        reduced = _whiten(self._inverse_factor, root).transpose(-3, -1).flatten(-2).to(dtype)
        shape = (*test_mean.shape, test_mean.size(-1))
        alone = BlockDiagLinearOperator(to_linear_operator(test_covariance).expand(*shape))
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
    def _inverse_factor(self) -> Tensor:
        """L^-1 (..., D M, D M), block by block of columns."""
        inverse, width = torch.zeros_like(self.chol), self.root.size(-1)
        unit = torch.eye(self.chol.size(-1), width, dtype=self.chol.dtype, device=self.chol.device)
        for i in range(0, self.chol.size(-1), width):
            own = self.chol[..., i:, i:]
            inverse[..., i:, i : i + width] = solve_lower(own, unit[: own.size(-1)])
        return inverse

    def _some_data(self) -> Iterator[slice]:
        """Yield data, so many that their L^-1 Phi' stays small."""
        latents, size = self.prior_mean.shape[-2:]
        count = max(_NUMBERS // (latents * self.chol[..., 0].numel()), 1)
        yield from (slice(i, i + count) for i in range(0, size, count))

    def _whitened(self, some: slice = slice(None)) -> Tensor:
        """Return Phi_i L^-T of some data (..., n, D, D M)."""
        return _whiten(self._inverse_factor, self.root[..., some, :])

    @cached_property
    def _low_rank_blocks(self) -> Tensor:
        """Phi_i A^-1 Phi_i' (..., D, D, N)."""
        whitened = (self._whitened(some) for some in self._some_data())
        return torch.cat([(W @ W.mT).movedim(-3, -1) for W in whitened], -1)

    def _solve(self, right: Tensor) -> Tensor:
        """Return A^-1 right (..., D, M)."""
        return solve_whole(self.chol, right.flatten(-2).unsqueeze(-1)).view(right.shape)


def condition_low_rank_joint(
    prior_mean: Tensor, root: Tensor, diagonal: Tensor, sites: JointSites
) -> LowRankJointPosterior:
    """Condition D independent priors N(prior_mean, root root' + diag(diagonal)) on sites that couple them.

    Args:
        prior_mean: mu (..., D, N).
        root: Phi (..., D, N, M), or one (N, M) of all latents.
        diagonal: D (..., D, N), or (N,), not negative.
        sites: (..., D, N).

    Example:
        >>> import torch
        >>> from gpext.sites import CoupledSites
        >>> one = torch.ones(2, 1).double()
        >>> sites = CoupledSites(one, one, torch.ones(1).double(), one)
        >>> posterior = condition_low_rank_joint(0 * one, torch.ones(2, 1, 1).double(), 0 * one, sites)
        >>> posterior.mean.mT
        tensor([[0.2500, 0.2500]], dtype=torch.float64)
    """
    sites = sites.to(torch.float64)
    diagonal = diagonal.expand(torch.broadcast_shapes(diagonal.shape, sites.shift.shape))
    root = root.expand(*diagonal.shape, root.size(-1))
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
    """Return I + sum_i Phi_i' T_i Phi_i (..., D M, D M) for symmetric T (..., D, D, N)."""
    latents, width = root.size(-3), root.size(-1)
    A = root.new_empty(*precision.shape[:-3], latents * width, latents * width)
    for d in range(latents):
        rows = slice(d * width, (d + 1) * width)
        for e in range(d + 1):
            columns = slice(e * width, (e + 1) * width)
            block = (root[..., d, :, :] * precision[..., d, e, :].unsqueeze(-1)).mT @ root[..., e, :, :]
            A[..., rows, columns] = block
            A[..., columns, rows] = block.mT
    A.diagonal(dim1=-2, dim2=-1).add_(1)
    return A


def _whiten(inverse: Tensor, root: Tensor) -> Tensor:
    """Return Phi_i L^-T (..., N, D, D M) for L^-1 (..., D M, D M) and Phi (..., D, N, M)."""
    latents, size, width = root.shape[-3:]
    batch = torch.broadcast_shapes(inverse.shape[:-2], root.shape[:-3])
    whitened = root.new_zeros(*batch, latents, size, latents * width)
    for d in range(latents):
        own = inverse[..., d * width :, d * width : (d + 1) * width]
        whitened[..., d, :, d * width :] = root[..., d, :, :] @ own.mT
    return whitened.movedim(-3, -2)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of blocks (..., D, D, N), datum by datum."""
    return torch.einsum("...dkn,...ken->...den", left, right)


def _unit_like(blocks: Tensor) -> Tensor:
    """Return the identity (D, D, 1)."""
    return torch.eye(blocks.size(-2), dtype=blocks.dtype, device=blocks.device).unsqueeze(-1)
