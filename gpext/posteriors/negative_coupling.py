r"""The second step of :mod:`gpext.posteriors.coupled` where all couplings are negative, without differences.

That is every canonical exponential family: precisions gamma >= 0, couplings a <= 0, and gamma + a w w' positive
semidefinite, singular for classes. With R0_d = (K_d + Gamma_d^-1)^-1 and V0_d = Gamma_d^-1 - Gamma_d^-1 R0_d Gamma_d^-1

    G = sum_d diag(w_d) V0_d diag(w_d),     s = sqrt(-a),     r_d = s w_d / gamma_d
    H = I - diag(s) G diag(s) = diag(1 - sum_d r_d^2 gamma_d) + sum_d diag(r_d) R0_d diag(r_d)
    log|I + G A| = log|H|,     (G + A^-1)^-1 = -diag(s) H^-1 diag(s)

a sum of positive semidefinite matrices. As a difference H has no digits where the data say far more than the prior, and
it is about 1 / (gamma K): with gamma K = 5e9 variances were wrong by a hundredth, and are now by 1e-10.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gpext.linalg.products import times
from gpext.linalg.triangles import solve_whole

_ROUNDING = 8 * torch.finfo(torch.float64).eps  # for each latent, of 1 - sum_d r_d^2 gamma_d


@dataclass(frozen=True)
class NegativeCoupling:
    """N numbers g of mean g0 and covariance G, conditioned on Gaussian factors of precision a <= 0; float64."""

    prior_mean: Tensor  # g0 (..., N)
    root: Tensor  # s (..., N)
    spread: Tensor  # r (..., D, N)
    chol: Tensor  # of H (..., N, N)
    positive_definite: Tensor  # (...), bool

    @property
    def log_det(self) -> Tensor:
        """log|I + G A| (...)."""
        return 2 * self.chol.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @cached_property
    def weights(self) -> Tensor:
        """-(G + A^-1)^-1 g0 (..., N)."""
        return self._between(self.root * self.prior_mean)

    @property
    def log_normalizer(self) -> Tensor:
        r""":math:`\log\int N(g|g_0,G) \prod_i e^{-a_i g_i^2 / 2} dg` (...)."""
        return 0.5 * (self.prior_mean * self.weights).sum(-1) - 0.5 * self.log_det

    @cached_property
    def response(self) -> Tensor:
        """(G + A^-1)^-1 (..., N, N)."""
        return -self.root.unsqueeze(-1) * torch.cholesky_inverse(self.chol) * self.root.unsqueeze(-2)

    def respond(self, x: Tensor) -> Tensor:
        """Return (I + A G)^-1 x (..., N), for an x that is zero where a is."""
        coupled = self.root > 0
        return self._between(torch.where(coupled, x / torch.where(coupled, self.root, 1.0), 0.0))

    def solve(self, covariance: Tensor, response: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return V vector and K^-1 V vector of the D latents (..., D, N), the first the product of K with the second.

        K^-1 V = I - R K, R_de = delta_de R0_d - R0_d diag(r_d) H^-1 diag(r_e) R0_e, in O(D N^2).

        Args:
            covariance: K (..., D, N, N), or one (N, N) of all latents.
            response: R0 (..., D, N, N), in the dtype of H, in which products with R are.
            vector: (..., D, N).
        """
        reduced = times(response, times(covariance, vector).to(response))
        pulled = solve_whole(self.chol, (self.spread * reduced).sum(-2).unsqueeze(-1)).squeeze(-1)
        turned = vector - reduced + times(response, self.spread * pulled.unsqueeze(-2))
        return times(covariance, turned), turned

    def _between(self, x: Tensor) -> Tensor:
        """Return s H^-1 x."""
        return self.root * solve_whole(self.chol, x.unsqueeze(-1)).squeeze(-1)


def condition_on_couplings(
    prior_mean: Tensor, response: Tensor, precision: Tensor, coupling: Tensor, direction: Tensor
) -> NegativeCoupling | None:
    """Return what the couplings make of g, or None where they are not those of a canonical family.

    Args:
        prior_mean: g0 (..., N).
        response: R0 (..., D, N, N), in whose dtype H is.
        precision: gamma (..., D, N).
        coupling: a (..., N).
        direction: w (..., D, N).
    """
    share = torch.where(precision > 0, direction / torch.where(precision > 0, precision, 1.0), 0.0)
    rest = 1 + coupling * (share * direction).sum(-2)
    rounding = _ROUNDING * precision.size(-2)
    reached = (direction == 0) | (precision > 0)
    if not bool((coupling <= 0).all() and (precision >= 0).all() and reached.all() and (rest >= -rounding).all()):
        return None
    root = torch.where(coupling < 0, (-torch.where(coupling < 0, coupling, -1.0)).sqrt(), 0.0)
    r = (share * root.unsqueeze(-2)).to(response)
    H = torch.where(rest > rounding, rest, 0.0).to(response).diag_embed()
    for d in range(r.size(-2)):  # one at a time: the allocator takes as long for all of them as the factorisation
        row = r[..., d, :]
        H = H.addcmul_(row.unsqueeze(-1) * response[..., d, :, :], row.unsqueeze(-2))
    H = 0.5 * (H + H.mT)
    chol, info = torch.linalg.cholesky_ex(H)
    ok = (info == 0) & (chol.diagonal(dim1=-2, dim2=-1) > 0).all(-1)
    return NegativeCoupling(prior_mean, root, r, chol, ok)
