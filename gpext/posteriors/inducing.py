r"""Condition an inducing-point prior on Gaussian sites, in whitened coordinates [GWO20 App. A.3, Titsias 2009].

With K_zz = L L', u = mu_z + L v and p(v) = N(0, I), the data see f_i = mu_i + a_i' v + noise of variance k_ii - q_ii:

    A = L^-1 K_zx                                (M x N, columns a_i),  q_ii = |a_i|^2
    q(v) = N(Lambda^-1 eta, Lambda^-1)           natural parameters eta and Lambda = S^-1
    Lambda* = I + A diag(tau) A'                 what the sites of all data make of them
    eta*    = A (nu - tau mu)

Where several latents share one prior covariance, A is (M x N) beside posteriors (..., M) of these latents, and the
derivatives in the prior covariance are the sums over them.

No inverse of K_zz or of Lambda is formed. A site's precision may be negative as long as Lambda is positive definite.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gpext.linalg.symmetric_products import symmetric_product
from gpext.sites import GaussianSites


def factorise(inducing_covariance: Tensor) -> Tensor:
    """Return L (..., M, M) with L L' = K_zz, in float64.

    Raises:
        torch.linalg.LinAlgError: K_zz is not positive definite: raise the jitter or remove duplicate inducing points.

    Example:
        >>> import torch
        >>> factorise(torch.tensor([[4.0, 2.0], [2.0, 5.0]]))
        tensor([[2., 0.],
                [1., 2.]], dtype=torch.float64)
    """
    chol, info = torch.linalg.cholesky_ex(inducing_covariance.double())
    if bool(info.any()):
        raise torch.linalg.LinAlgError(
            f"the covariance of the {inducing_covariance.size(-1)} inducing points is not positive definite (leading "
            f"minor {int(info.max())}); raise jitter_val or move inducing points apart."
        )
    return chol


def forward_solve(chol: Tensor, right: Tensor) -> Tensor:
    """Return L^-1 R (..., M, N), in float32 by X L' = R': half the time of L X = R (MKL on AMD; 15 % less on Intel).

    Example:
        >>> import torch
        >>> forward_solve(torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.ones(2, 1))
        tensor([[0.5000],
                [0.2500]])
    """
    if right.dtype == torch.float32:
        return torch.linalg.solve_triangular(chol.mT, right.mT, upper=True, left=False).mT
    return torch.linalg.solve_triangular(chol, right, upper=False)


def squared_norms(columns: Tensor) -> Tensor:
    """Return |a_i|^2 (..., N) of the columns of A (..., M, N): in one pass, if the numbers of each lie together.

    Example:
        >>> import torch
        >>> squared_norms(torch.tensor([[3.0, 0.0], [4.0, 1.0]]))
        tensor([25.,  1.])
    """
    if columns.stride(-2) == 1:
        return torch.linalg.vector_norm(columns, dim=-2).square()
    return columns.square().sum(-2)


def project(whitened: Tensor, prior_mean: Tensor, sites: GaussianSites, weight: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the data's share of the natural parameters: A (nu - tau mu) (..., M) and A diag(tau) A' (..., M, M).

    Each datum counts `weight` times.

    Example:
        >>> import torch
        >>> from gpext.sites import GaussianSites
        >>> A = torch.tensor([[1.0, 2.0]]).double()  # one inducing point, two data
        >>> sites = GaussianSites(torch.tensor([1.0, 1.0]).double(), torch.tensor([1.0, 0.5]).double())
        >>> project(A, torch.zeros(2).double(), sites)
        (tensor([3.], dtype=torch.float64), tensor([[3.]], dtype=torch.float64))
    """
    precision = weight * sites.precision
    residual = weight * sites.shift - precision * prior_mean
    vector = (residual.unsqueeze(-2) @ whitened.mT).squeeze(-2)
    return vector, symmetric_product(whitened * precision.unsqueeze(-2), whitened)


@dataclass(frozen=True)
class InducingPosterior:
    """q(v) = N(m_v, (C C')^-1) over the whitened inducing values.

    Example:
        >>> import torch
        >>> from gpext.posteriors import condition_inducing
        >>> q = condition_inducing(torch.zeros(2), torch.eye(2))
        >>> q.divergence_from_prior  # the prior itself
        tensor(0., dtype=torch.float64)
    """

    chol_precision: Tensor  # C (..., M, M), lower
    half_mean: Tensor  # C' m_v = C^-1 eta (..., M)

    @cached_property
    def mean(self) -> Tensor:
        """m_v (..., M)."""
        half = self.half_mean.unsqueeze(-1)
        return torch.linalg.solve_triangular(self.chol_precision.mT, half, upper=True).squeeze(-1)

    def marginals(self, whitened: Tensor, prior_mean: Tensor, conditional_variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of q(f_i) (..., N), mu_i + r_i' C' m_v and k_ii - q_ii + |r_i|^2, R = C^-1 A.

        Args:
            whitened: A (..., M, N).
            prior_mean: mu (..., N).
            conditional_variance: k_ii - q_ii (..., N), the Nystrom term: what u leaves of the prior variance.

        Raises:
            torch.linalg.LinAlgError: a variance is negative: the prior variance has outgrown what the dtype and the
                jitter can carry.
        """
        reduced = forward_solve(self.chol_precision.to(whitened.dtype), whitened)
        mean = prior_mean + (self.half_mean.to(whitened.dtype).unsqueeze(-2) @ reduced).squeeze(-2)
        variance = conditional_variance + squared_norms(reduced)
        if float(variance.min()) < 0:
            raise torch.linalg.LinAlgError(
                f"the marginals of q(f) have lost their digits in {whitened.dtype}: the smallest variance is "
                f"{variance.min().item():.3g}. Raise jitter_val, rescale the data or work in float64; modules of a "
                "forward that see the whole batch, such as BatchNorm, want eval mode."
            )
        return mean, variance

    @cached_property
    def covariance(self) -> Tensor:
        """S = Lambda^-1 (..., M, M), the inverse of a matrix whose eigenvalues are at least one for positive sites."""
        return torch.cholesky_inverse(self.chol_precision)

    @property
    def complement(self) -> Tensor:
        """I - S (..., M, M)."""
        complement = -self.covariance
        complement.diagonal(dim1=-2, dim2=-1).add_(1)
        return complement

    @property
    def divergence_from_prior(self) -> Tensor:
        """KL(q(v) || N(0, I)) = (|m_v|^2 + tr S - M + log|Lambda|) / 2 (...)."""
        log_det = 2 * self.chol_precision.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        trace = self.covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        return 0.5 * (self.mean.square().sum(-1) + trace - self.mean.size(-1) + log_det)


def condition_inducing(
    natural_vector: Tensor, precision: Tensor, *, dtype: torch.dtype = torch.float64
) -> InducingPosterior:
    """Return q(v) from its natural parameters eta (..., M) and Lambda (..., M, M).

    Args:
        natural_vector: eta.
        precision: Lambda.
        dtype: to work in: float32 is enough for marginals in float32, but not for a divergence. Where its rounding
            errors leave Lambda without a factor, float64 after all.

    Raises:
        torch.linalg.LinAlgError: the precision is not positive definite.

    Example:
        >>> import torch
        >>> q = condition_inducing(torch.tensor([2.0]), torch.tensor([[4.0]]))
        >>> q.mean, q.covariance
        (tensor([0.5000], dtype=torch.float64), tensor([[0.2500]], dtype=torch.float64))
    """
    try:
        chol = torch.linalg.cholesky(precision.to(dtype))
    except torch.linalg.LinAlgError as error:
        if dtype != torch.float64:
            return condition_inducing(natural_vector, precision)
        raise torch.linalg.LinAlgError(
            "the precision of q(u) is not positive definite: a site precision is too negative, or the parameters were "
            "moved by an optimiser other than a natural-gradient step. Lower the rate or work in float64."
        ) from error
    half_mean = torch.linalg.solve_triangular(chol, natural_vector.to(dtype).unsqueeze(-1), upper=False).squeeze(-1)
    return InducingPosterior(chol, half_mean)


def is_shared(chol: Tensor, posterior: InducingPosterior) -> bool:
    """Return whether one prior covariance, whose factor is L (M, M), is that of a batch of posteriors."""
    return chol.dim() == 2 < posterior.chol_precision.dim()


def back_substitute(chol: Tensor, posterior: InducingPosterior, dtype: torch.dtype) -> Tensor:
    """Return L^-T [I - S, m_v] (..., M, M + 1).

    Example:
        >>> import torch
        >>> from gpext.posteriors import condition_inducing
        >>> q = condition_inducing(torch.tensor([2.0]), torch.tensor([[4.0]]))
        >>> back_substitute(torch.tensor([[2.0]]).double(), q, torch.float64)
        tensor([[0.3750, 0.2500]], dtype=torch.float64)
    """
    stacked = torch.cat([posterior.complement, posterior.mean.unsqueeze(-1)], -1)
    return torch.linalg.solve_triangular(chol.mT, stacked, upper=True).to(dtype)


def prior_gradients(
    chol: Tensor, posterior: InducingPosterior, whitened: Tensor, mean_gradient: Tensor, precision: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Return dF/dK_zz (..., M, M), float64, and dF/dK_zx (..., M, N) of F = sum_i F_i(m_i, v_i) at fixed q(v).

    m_i = mu_i + a_i' m_v and v_i = k_ii - |a_i|^2 + a_i' S a_i give G = dF/dA = m_v g' + (I - S) A T with
    g_i = dF_i/dm_i and tau_i = -2 dF_i/dv_i, and through A = L^-1 K_zx

        dF/dK_zx = L^-T G,     dF/dK_zz = -sym(L^-T Phi(G A') L^-1)

    Phi halves the diagonal and drops what is above it. (dF/dk_ii = -tau_i / 2 and dF/dmu_i = g_i.)

    Args:
        chol: L (..., M, M), float64; (M, M) if all latents share it, whose derivatives are added up.
        posterior: q(v).
        whitened: A (..., M, N).
        mean_gradient: g (..., N).
        precision: tau (..., N).

    Example:
        >>> import torch
        >>> from gpext.posteriors import condition_inducing
        >>> A, tau = torch.tensor([[1.0, 2.0]]).double(), torch.tensor([1.0, 0.5]).double()
        >>> q = condition_inducing(A @ tau, torch.eye(1).double() + A @ torch.diag(tau) @ A.mT)
        >>> by_inducing, by_cross = prior_gradients(torch.eye(1).double(), q, A, tau, tau)
        >>> by_inducing.shape, by_cross.shape
        (torch.Size([1, 1]), torch.Size([1, 2]))
    """
    dtype = whitened.dtype
    if is_shared(chol, posterior):
        return _shared_prior_gradients(chol, posterior, whitened, mean_gradient, precision)
    weighted = whitened * precision.unsqueeze(-2)  # A T
    g, mean = mean_gradient.unsqueeze(-2), posterior.mean.unsqueeze(-1)
    # Of the gradient in K_zx the transpose is made, because the kernel wants it column-major.
    if weighted.size(-1) > 2 * weighted.size(-2):  # one solve for L^-T (I - S), and products alone at the data's size
        cross = torch.cat([weighted, g], -2).mT @ back_substitute(chol, posterior, dtype).mT
        inner = mean @ (g @ whitened.mT).double() + posterior.complement @ (weighted @ whitened.mT).double()
    else:
        outer = weighted.mT @ posterior.complement.to(dtype) + g.mT * mean.to(dtype).mT  # G'
        cross = torch.linalg.solve_triangular(chol.to(dtype), outer, upper=False, left=False)
        inner = (whitened @ outer).mT.double()
    return factor_gradient(chol, inner), cross.mT


def _shared_prior_gradients(
    chol: Tensor, posterior: InducingPosterior, whitened: Tensor, mean_gradient: Tensor, precision: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the derivatives in one K_zz (M, M) and one K_zx (M, N), the sums over latents, by products alone."""
    size, num_data = whitened.shape
    mean, complement = posterior.mean.view(-1, size), posterior.complement.view(-1, size, size)
    g, tau = mean_gradient.reshape(-1, num_data), precision.reshape(-1, num_data)
    columns = whitened.mT
    weighted = (columns.unsqueeze(1) * tau.mT.unsqueeze(-1)).flatten(1)  # [T_1 A', T_2 A', ...] (N, D M)
    outer = torch.addmm(g.mT @ mean.to(g), weighted, complement.flatten(0, 1).to(weighted))  # G' (N, M)
    cross = torch.linalg.solve_triangular(chol.to(outer), outer, upper=False, left=False)
    return factor_gradient(chol, (whitened @ outer).mT.double()), cross.mT


def factor_gradient(chol: Tensor, inner: Tensor) -> Tensor:
    r"""Return -sym(L^-T Phi(G_A A') L^-1) (..., M, M): what dF/dA = G_A means for K_zz, through A = L^-1 K_zx.

    Args:
        chol: L (..., M, M), float64.
        inner: G_A A' (..., M, M), float64.

    Example:
        >>> import torch
        >>> factor_gradient(torch.tensor([[2.0]]).double(), torch.tensor([[1.0]]).double())
        tensor([[-0.1250]], dtype=torch.float64)
    """
    inner = inner.tril()
    inner.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    left = torch.linalg.solve_triangular(chol.mT, inner, upper=True)
    right = torch.linalg.solve_triangular(chol, left, upper=False, left=False)
    return -0.5 * (right + right.mT)
