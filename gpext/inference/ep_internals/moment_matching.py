r"""Sites whose posterior marginals are to have the moments of their tilted distributions [JVV11 Eqs. 8 to 15].

With marginals N(m_i, v_i) and power eta, the cavities r = 1/v - eta tau, b = m/v - eta nu have to be proper, and at a
fixed point of EP the residuals vanish:

    (log(v^_i / v_i), (m^_i - m_i) / sqrt(v_i)),     m^, v^: of N(f | b/r, 1/r) p(y_i | f)^eta / Z^_i

    log Z = A(nu, tau) + (1/eta) sum_i [log Z^_i - log int N(f | b/r, 1/r) exp(eta (nu_i f - tau_i f^2 / 2)) df]

is stationary there in the sites [JVV11 Eq. 16, sign corrected; any prior mean].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.inference.drivers.fixed_point import Norm, over_sites
from gpext.inference.drivers.inexact_newton import NEAR, rough_newton_step
from gpext.inference.problem import Problem
from gpext.likelihoods.tilted_moments import Tilt
from gpext.posteriors import Posterior
from gpext.quadrature import TiltedMoments
from gpext.sites import GaussianSites


def proper_size(norm: Norm, proper: Tensor, residual: Tensor) -> Tensor:
    """Return the norm of residuals (..., N), which are nonnegative: (...), inf where improper."""
    size = over_sites(residual, norm, proper.dim())
    return torch.where(proper & size.isfinite(), size, torch.inf)


@dataclass(frozen=True)
class Match:
    """Sites, what they make of the prior, and how far from matched the moments are."""

    posterior: Posterior
    mean: Tensor  # m (..., N)
    variance: Tensor  # v (..., N)
    cavity_mean: Tensor
    cavity_variance: Tensor
    tilted: TiltedMoments
    proper: Tensor  # (...): there is a posterior, and every cavity is a distribution
    value: Tensor  # log Z (...), -inf where improper
    tilt: Tilt
    power: float
    norm: Norm = "max"

    @property
    def sites(self) -> GaussianSites:
        """The sites of this iterate."""
        return self.posterior.sites

    @property
    def shift_residual(self) -> Tensor:
        """(m^ - m) / sqrt(v) (..., N)."""
        return (self.tilted.mean - self.mean) / self.variance.sqrt()

    @property
    def width_residual(self) -> Tensor:
        """log(v^ / v) (..., N)."""
        return (self.tilted.variance / self.variance).log()

    @property
    def size(self) -> Tensor:
        """The norm of the residuals (...), inf where improper."""
        return proper_size(self.norm, self.proper, self._residual)

    @property
    def is_near(self) -> bool:
        """Whether a Newton step of the means surely leads nearer to a match."""
        return bool((self._residual < NEAR).all() and self.proper.all())

    @property
    def _residual(self) -> Tensor:
        return torch.maximum(self.shift_residual.abs(), self.width_residual.abs())

    def toward(self, proposal: GaussianSites) -> Tensor:
        """Return the norm of how far other sites would move the marginals (...), inf where improper."""
        return proper_size(self.norm, self.proper, self.sites.motion_to(proposal, self.mean, self.variance))

    @property
    def positive_proposal(self) -> GaussianSites:
        """The proposal where its precision is positive; elsewhere none, and the shift that matches the mean alone.

        With no negative precision every cavity is proper: V^-1 - T is the precision of the prior.
        """
        free = self.proposal
        shift = (self.tilted.mean - self.cavity_mean) / (self.power * self.cavity_variance)
        keep = free.precision > 0
        return GaussianSites(torch.where(keep, free.shift, shift), free.precision.clamp_min(0))

    @property
    def proposal(self) -> GaussianSites:
        """The sites that would match if each were alone [JVV11 Eq. 15]."""
        tilted, eta = self.tilted, self.power
        precision = 1 / tilted.variance - 1 / self.variance
        shift = tilted.mean / tilted.variance - self.mean / self.variance
        return GaussianSites(self.sites.shift + shift / eta, self.sites.precision + precision / eta)

    def proposal_ahead(self, problem: Problem) -> GaussianSites:
        """Return the proposal at the means after a rough Newton step, with the variances c of cavities as they are.

        Cavity means are m - eta c w with w = K^-1 (m - mu), and tilted means those of the marginals where the residual
        (m^ - m) / (eta v^) vanishes. Along a move of m by p and of w by K^-1 p it falls by K^-1 p + T p, with the
        precisions T of the proposal.
        """
        tilted, eta, c = self.tilted, self.power, self.cavity_variance
        residual = (tilted.mean - self.mean) / (eta * tilted.variance)
        move, turn = rough_newton_step(problem, self.posterior, self.proposal, residual)
        cavity_mean = self.cavity_mean + move - eta * c * turn
        there = self.tilt(cavity_mean, c)
        shift, precision = there.mean / there.variance - cavity_mean / c, 1 / there.variance - 1 / c
        return GaussianSites(shift / eta, precision / eta)


At = Callable[[GaussianSites], Match]


@torch.no_grad()
def match(problem: Problem, tilt: Tilt, power: float, sites: GaussianSites, norm: Norm = "max") -> Match:
    """Return where some sites stand: one factorisation, the marginal variances, and one tilted integral a datum."""
    posterior = problem.condition(sites)
    mean, variance = posterior.mean, posterior.variance
    proper = posterior.positive_definite & (mean.isfinite() & (variance > 0)).all(-1)
    rest = 1 - power + power * posterior.cavity_share  # r v = 1 - eta tau v
    proper = proper & (rest > 0).all(-1) & rest.isfinite().all(-1)
    # Substitute safe values where the cavity is improper, and mask the results.
    good = proper.unsqueeze(-1)
    safe_mean = torch.where(good, mean, problem.mean)
    safe_variance = torch.where(good, variance, 1.0)
    safe_rest = torch.where(good, rest, 1.0)
    cavity_variance = safe_variance / safe_rest
    weights = torch.where(good, posterior.weights, 0.0)  # nu - tau m
    cavity_mean = safe_mean - power * cavity_variance * weights
    tilted = tilt(cavity_mean, cavity_variance)
    # the integrals of sites under cavities and A, both without the t_i(m_i)
    replaced = 0.5 * safe_rest.log() - 0.5 * power**2 * cavity_variance * weights.square()
    value = posterior.log_peak + (tilted.log_normalizer - replaced).sum(-1) / power
    value = torch.where(proper & value.isfinite(), value, -torch.inf)
    marginals = safe_mean, safe_variance, cavity_mean, cavity_variance
    return Match(posterior, *marginals, tilted, proper, value, tilt, power, norm)
