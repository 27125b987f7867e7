r"""Derivatives of a bound in the prior when the sites are fixed numbers and q(v) follows the prior [Adam et al. 2021].

F = sum_i F_i(m_i, v_i) - KL(q(v) || N(0, I)) at q(v) = N(m_v, S), Lambda = S^-1 = I + A diag(tau) A' and
Lambda m_v = A (nu - tau mu). With g_i = dF_i/dm_i and t_i = -2 dF_i/dv_i, and matrices T = diag(tau), X = diag(t),

    dF/dm_v = A g - m_v,     dF/dS = A (T - X) A' / 2

at fixed A, and q's own way through A adds u and W to what holds at fixed q:

    u = S (A g - m_v),       W = S A (T - X) A' S,       a = nu - tau m
    G = dF/dA = m_v (g - tau A'u)' + u a' + (I - S) A X - W A T
    dF/dK_zx = L^-T G,       dF/dmu = g - tau A'u,       dF/dk_ii = -t_i / 2
    dF/dK_zz = -sym(L^-T Phi(G A') L^-1)
    G A' = m_v (A g - A diag(tau) A' u)' + u m_v' + A X A' - (I - S) + W        because S A T A' = I - S

Phi halves the diagonal and drops what is above it. Where the sites are the best ones, u = W = 0. Of latents that share
one K_zz and K_zx the derivatives in these are added up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.posteriors.inducing import InducingPosterior, back_substitute, factor_gradient, is_shared
from gpext.sites import GaussianSites


class FixedSites:
    """The derivatives above for one prior and one set of sites.

    Args:
        chol: L (..., M, M), float64; (M, M) if all latents of a batch of posteriors share it.
        posterior: q(v).
        gram: A diag(tau) A' (..., M, M), float64.
        best_vector: A (g + t m - t mu) (..., M), float64: eta at the best sites for the marginals of q.
        best_gram: A diag(t) A' (..., M, M), float64.

    Example:
        >>> import torch
        >>> from gpext.posteriors import condition_inducing
        >>> one = torch.eye(1).double()
        >>> q = condition_inducing(one[0], 2 * one)
        >>> FixedSites(one, q, one, one[0], one).inducing().shape
        torch.Size([1, 1])
    """

    def __init__(
        self, chol: Tensor, posterior: InducingPosterior, gram: Tensor, best_vector: Tensor, best_gram: Tensor
    ) -> None:
        mean, covariance = posterior.mean.unsqueeze(-1), posterior.covariance
        self._chol, self._mean, self._gram, self._best_gram = chol, mean, gram, best_gram
        self._is_shared = is_shared(chol, posterior)
        self._complement = posterior.complement
        self._vector = best_vector.unsqueeze(-1) - best_gram @ mean  # A g
        self._response = covariance @ (self._vector - mean)  # u
        self._warp = covariance @ (gram - best_gram) @ covariance  # W
        through_q = torch.linalg.solve_triangular(chol.mT, torch.cat([-self._warp, self._response], -1), upper=True)
        self._back = torch.cat([back_substitute(chol, posterior, chol.dtype), through_q], -1)

    def inducing(self) -> Tensor:
        """Return dF/dK_zz, of the shape of L, float64."""
        by_mean = self._vector - self._gram @ self._response
        inner = self._mean @ by_mean.mT + self._response @ self._mean.mT
        inner += self._best_gram - self._complement + self._warp
        return factor_gradient(self._chol, inner.flatten(0, -3).sum(0) if self._is_shared else inner)

    def cross(
        self, whitened: Tensor, mean: Tensor, sites: GaussianSites, mean_gradient: Tensor, precision: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return dF/dK_zx, of the shape of A, and dF/dmu (..., N) for a block of data.

        Args:
            whitened: A (..., M, N), or (M, N) if shared.
            mean: m (..., N).
            sites: nu and tau.
            mean_gradient: g (..., N).
            precision: t (..., N).
        """
        response = (self._response.to(whitened.dtype).mT @ whitened).squeeze(-2)
        by_mean = mean_gradient - sites.precision * response
        columns = whitened.mT  # a triangular solve leaves A column-major: these products stream through it
        size = columns.size(-1)
        # [A'X, g - tau A'u, A'T, a]', written in place; of shared columns those of all latents side by side
        batch, num_data = precision.shape[:-1], columns.size(-2)
        if self._is_shared:
            together = columns.new_empty((num_data, batch.numel(), 2 * size + 2))
            weighted = together.movedim(1, 0).unflatten(0, batch)
        else:
            weighted = columns.new_empty((*batch, num_data, 2 * size + 2))
        torch.mul(columns, precision.unsqueeze(-1), out=weighted[..., :size])
        weighted[..., size] = by_mean
        torch.mul(columns, sites.precision.unsqueeze(-1), out=weighted[..., size + 1 : -1])
        weighted[..., -1] = sites.shift - sites.precision * mean
        back = self._back.to(whitened.dtype).mT  # (..., 2 M + 2, M)
        if self._is_shared:
            return (together.flatten(1) @ back.flatten(0, -2)).mT, by_mean
        return (weighted @ back).mT, by_mean
