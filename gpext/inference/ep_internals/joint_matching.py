r"""Sites that couple the D latents of a datum, whose marginals are to have the moments of their tilted distributions.

As :mod:`gpext.inference.ep_internals.moment_matching`, with vectors and blocks of D instead of numbers: with marginals
N(m_i, V_i) and w_i = nu_i - U_i m_i, the cavity of power eta has the covariance C = (V^-1 - eta U)^-1 and the mean
m - eta C w, and at a fixed point

    L^-1 (m^ - m) = 0,     L^-1 V^ L^-T = I,     V = L L',     m^, V^: of N(f | cavity) p(y_i | f)^eta / Z^_i

    log Z = A(nu, U) - sum_i log t_i(m_i)
            + (1/eta) sum_i [log Z^_i - log|I - eta V U| / 2 + eta^2 w' C w / 2]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.inference.drivers.fixed_point import Norm
from gpext.inference.ep_internals.moment_matching import proper_size
from gpext.inference.problem import Problem
from gpext.likelihoods.curvature import diagonal_blocks
from gpext.posteriors import DensePrior, JointPosterior
from gpext.quadrature import JointMoments
from gpext.sites import BlockSites

JointTilt = Callable[[Tensor, Tensor], JointMoments]
"""Means (..., D, N) and covariances (..., D, D, N) of the cavities -> the moments of the tilted distributions."""


@dataclass(frozen=True)
class JointMatch:
    """Sites, what they make of the prior, and how far from matched the moments are."""

    posterior: JointPosterior
    sites: BlockSites
    mean: Tensor  # m (..., D, N)
    blocks: Tensor  # V (..., D, D, N)
    cavity_mean: Tensor
    cavity_variance: Tensor  # C (..., D, D, N)
    tilted: JointMoments
    proper: Tensor  # (...): there is a posterior, and every cavity is a distribution
    value: Tensor  # log Z (...), -inf where improper
    power: float
    norm: Norm = "max"

    @property
    def variance(self) -> Tensor:
        """The marginal variances (..., D, N)."""
        return self.blocks.diagonal(dim1=-3, dim2=-2).mT

    @property
    def size(self) -> Tensor:
        """The norm of the residuals (...), inf where improper."""
        L = torch.linalg.cholesky(self.blocks.movedim(-1, -3))
        moved = torch.linalg.solve_triangular(L, (self.tilted.mean - self.mean).mT.unsqueeze(-1), upper=False)
        half = torch.linalg.solve_triangular(L, self.tilted.covariance.movedim(-1, -3), upper=False)
        ratio = torch.linalg.solve_triangular(L, half.mT, upper=False)
        unit = torch.eye(L.size(-1), dtype=L.dtype, device=L.device)
        residual = torch.maximum(moved.abs().amax((-2, -1)), (ratio - unit).abs().amax((-2, -1)))
        return proper_size(self.norm, self.proper, residual)

    def toward(self, proposal: BlockSites) -> Tensor:
        """Return the norm of how far other sites would move the marginals (...), inf where improper."""
        return proper_size(self.norm, self.proper, self.sites.motion_to(proposal, self.mean, self.blocks))

    @property
    def proposal(self) -> BlockSites:
        """The sites that would match if each were alone."""
        shift, precision = self._natural(self.tilted.mean, self.tilted.covariance)
        before_shift, before_precision = self._natural(self.mean, self.blocks)
        return BlockSites(
            self.sites.shift + (shift - before_shift) / self.power,
            self.sites.precision + (precision - before_precision) / self.power,
        )

    @staticmethod
    def _natural(mean: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        precision = torch.linalg.inv(blocks.movedim(-1, -3))
        precision = 0.5 * (precision + precision.mT)
        return (precision @ mean.mT.unsqueeze(-1)).squeeze(-1).mT, precision.movedim(-3, -1)


JointAt = Callable[[BlockSites], JointMatch]


@torch.no_grad()
def match_jointly(problem: Problem, tilt: JointTilt, power: float, sites: BlockSites, norm: Norm = "max") -> JointMatch:
    """Return where some sites stand: one conditioning, the marginal blocks, and one tilted integral a datum."""
    two_dense = isinstance(problem.prior, DensePrior) and sites.shift.size(-2) == 2
    # Of two latents a block is diagonal plus rank one: O(N^3) instead of O((2 N)^3).
    posterior = problem.condition(sites.coupled(problem.prior.variance.detach()) if two_dense else sites)
    mean, blocks = posterior.mean, posterior.blocks
    V, U = blocks.movedim(-1, -3), sites.precision.movedim(-1, -3)
    unit = torch.eye(V.size(-1), dtype=V.dtype, device=V.device)
    cavity_mean, cavity = posterior.cavities(power)
    fine = _is_definite(V) & _is_definite(cavity.movedim(-1, -3)) & cavity_mean.isfinite().all(-2)
    proper = posterior.positive_definite & fine.all(-1)
    # Substitute safe values where there is no posterior or no cavity, and mask the results.
    good = proper.unsqueeze(-1).unsqueeze(-1)
    variance = problem.prior.variance.detach().expand(problem.mean.shape)  # one kernel may serve all latents
    prior_blocks = diagonal_blocks(variance)
    mean, cavity_mean = (torch.where(good, value, problem.mean.detach()) for value in (mean, cavity_mean))
    blocks, cavity = (torch.where(good.unsqueeze(-1), value, prior_blocks) for value in (blocks, cavity))
    tilted = tilt(cavity_mean, cavity)
    weights = torch.where(good, posterior.weights, 0.0)
    drawn = (weights.unsqueeze(-2) * cavity * weights.unsqueeze(-3)).sum((-3, -2))
    replaced = 0.5 * torch.linalg.slogdet(unit - power * V @ U).logabsdet - 0.5 * power**2 * drawn
    peak = -0.5 * (posterior.weights * (mean - posterior.prior_mean)).sum((-2, -1)) - 0.5 * posterior.log_det
    value = peak + (tilted.log_normalizer - replaced).sum(-1) / power
    proper = proper & value.isfinite()  # tilted integrals overflow in a cavity of enormous scale
    value = torch.where(proper, value, -torch.inf)
    return JointMatch(posterior, sites, mean, blocks, cavity_mean, cavity, tilted, proper, value, power, norm)


def _is_definite(blocks: Tensor) -> Tensor:
    """Return whether blocks (..., D, D) are positive definite and finite."""
    chol, info = torch.linalg.cholesky_ex(torch.where(blocks.isfinite(), blocks, 0))
    return (info == 0) & blocks.isfinite().all(-1).all(-1) & chol.isfinite().all(-1).all(-1)
