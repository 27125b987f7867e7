r"""Marginal covariances and the response of D latents under negative couplings, from one triangular solve.

In the notation of :mod:`gpext.posteriors.coupled` and :mod:`gpext.posteriors.negative_coupling`, with L L' = H,

    Y_d = L^-1 diag(s w_d) V0_d,      V_ii = diag(v0_i) + Y_i' Y_i,      Y_i = [Y_1 e_i, ..., Y_D e_i]
    E_d = L^-1 diag(r_d) R0_d,        R_dd = R0_d - E_d' E_d,            Y_d Gamma_d + E_d = L^-1 diag(s w_d)

so that one of the two, column by column, determines the other: Y where gamma v0 <= 1/2 and E elsewhere, whichever is
the smaller part of the sum. No inverse beside R0 is needed, as off its diagonal V0 = -Gamma^-1 R0 Gamma^-1, and on it

    v0 = (1 - R0_ii / gamma) / gamma                                      if gamma v0 > 1/2,
    v0 = (k_ii + sum_{j != i} R0_ij k_ji / gamma_i) / (1 + gamma k_ii)    otherwise,

which is row i of V0 (I + Gamma K) = K. For D latents: O(D N^3), of which D + 1 triangular solves are all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gpext.likelihoods.curvature import diagonal_blocks
from gpext.linalg.symmetric_products import lower_blocks, subtract_product, symmetric_matrix, symmetric_product
from gpext.posteriors.negative_coupling import NegativeCoupling

_LEAST = 1e-290  # a precision by which R0 can be divided


@dataclass(frozen=True)
class WhitenedCouplings:
    """The triangular solves of one posterior; float64."""

    response: Tensor  # R0 (..., D, N, N)
    variance: Tensor  # v0 (..., D, N)
    solved: Tensor  # columns of Y_d or E_d, and L^-1 as the last, each transposed (..., D + 1, N, N)
    solved_weights: tuple[Tensor, Tensor]  # p and q (..., D, N): Y_d = solved_d p_d + L^-1 q_d
    reduced_weights: tuple[Tensor, Tensor]  # the same of E_d

    @classmethod
    def of(
        cls, prior_covariance: Tensor, precision: Tensor, direction: Tensor, response: Tensor, second: NegativeCoupling
    ) -> WhitenedCouplings | None:
        """Return them, or None if a precision is too small to divide by.

        Args:
            prior_covariance: K (..., D, N, N), or one (N, N) of all latents.
            precision: gamma (..., D, N).
            direction: w (..., D, N).
            response: R0 (..., D, N, N).
            second: the posterior of the couplings.
        """
        if not bool((precision > _LEAST).all()):
            return None
        # the right-hand sides, transposed, and what comes before them: fresh memory costs more than arithmetic
        rows = response.new_empty(*response.shape[:-3], response.size(-3) + 1, *response.shape[-2:])
        rows[..., -1, :, :] = torch.eye(response.size(-1), dtype=response.dtype, device=response.device)
        of_latents = rows[..., :-1, :, :]
        own, prior = (matrix.diagonal(dim1=-2, dim2=-1) for matrix in (response, prior_covariance))
        others = (torch.mul(response, prior_covariance, out=of_latents).sum(-1) - own * prior) / precision
        share = 1 - own / precision  # gamma v0
        sharp = share > 0.5
        variance = torch.where(sharp, share / precision, (prior + others) / (1 + precision * prior))
        pull = second.root.unsqueeze(-2) * direction  # s w
        torch.mul(response, second.spread.unsqueeze(-2), out=of_latents)  # R0 is symmetric
        of_latents.mul_(torch.where(sharp, 1.0, -1 / precision).unsqueeze(-1))
        diagonal = of_latents.diagonal(dim1=-2, dim2=-1)
        diagonal.copy_(torch.where(sharp, diagonal, pull * variance))
        columns = rows.flatten(-3, -2).mT  # of all latents side by side, in the order that LAPACK solves in place
        torch.linalg.solve_triangular(second.chol, columns, upper=False, out=columns)
        none = torch.zeros_like(pull)
        return cls(
            response,
            variance,
            rows,
            (torch.where(sharp, -1 / precision, 1.0), torch.where(sharp, pull / precision, none)),
            (torch.where(sharp, 1.0, -precision), torch.where(sharp, none, pull)),
        )

    @cached_property
    def blocks(self) -> Tensor:
        """The posterior covariance of the latents of each datum (..., D, D, N)."""
        gram = torch.einsum("...aik,...bik->...abi", self.solved, self.solved)
        p, q = self.solved_weights
        cross = p.unsqueeze(-2) * gram[..., :-1, -1:, :] * q.unsqueeze(-3)
        both = p.unsqueeze(-2) * gram[..., :-1, :-1, :] * p.unsqueeze(-3)
        both = both + q.unsqueeze(-2) * gram[..., -1:, -1:, :] * q.unsqueeze(-3)
        return diagonal_blocks(self.variance) + both + cross + cross.transpose(-3, -2)

    @property
    def full_response(self) -> Tensor:
        """R_dd (..., D, N, N)."""
        found = torch.empty_like(self.response)
        for d in range(self.response.size(-3)):
            reduced = self._reduced(d)
            torch.sub(self.response[..., d, :, :], symmetric_product(reduced, reduced), out=found[..., d, :, :])
        return found

    @property
    def summed_response(self) -> Tensor:
        """sum_d R_dd (..., N, N)."""
        found = self.response.sum(-3)
        blocks, reduced = lower_blocks(found), torch.empty_like(found)
        for d in range(self.response.size(-3)):
            subtract_product(blocks, self._reduced(d, out=reduced))
        return symmetric_matrix(blocks)

    def _reduced(self, d: int, out: Tensor | None = None) -> Tensor:
        """Return E_d' (..., N, N)."""
        p, q = (weight[..., d, :].unsqueeze(-1) for weight in self.reduced_weights)
        return torch.mul(self.solved[..., d, :, :], p, out=out).addcmul_(self.solved[..., -1, :, :], q)
