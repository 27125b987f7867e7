r"""EP by a double loop, whose objective never falls [Heskes & Zoeter 2002; JVV11 Eq. 13; Opper & Winther 2005].

With natural parameters l = (nu, -tau / 2) of the sites and s of a second set of marginals, phi(f) = (f, f^2), and
Psi(l) = log int exp(l phi(f)) df, power eta:

    F(s) = min over l of  G(l, s) - (1/eta) sum_i Psi(s_i)
    G(l, s) = A(l) + (1/eta) sum_i log int exp((s_i - eta l_i) phi(f)) p(y_i | f)^eta df

G is convex in l: the inner loop takes Newton steps, each shortened until G falls, to where the tilted distributions
under the cavities s - eta l have the moments of the posterior. F is the difference of two convex functions of s, and
the outer loop's s <- (marginals of the posterior) raises it, and so does a part of that step, where all of it would
leave a cavity improper. Where s no longer moves, F = log Z and l is a fixed point of EP. In units of the marginals
(dtau = q / v, dnu = p / sqrt(v) + m dtau), with e = (f - m) / sqrt(v), the Hessian is

    [[R, 0], [0, R o R / 2]] + eta diag of the covariances of (e, -e^2 / 2) under each tilted distribution

Safe but slow: hundreds of outer steps where second-order steps on the residuals take ten.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.inference.problem import Problem
from gpext.likelihoods.tilted_moments import Tilt
from gpext.posteriors import Posterior
from gpext.quadrature import TiltedMoments
from gpext.sites import GaussianSites

_SURE = 1e-9  # of the slope, below which a Newton step is taken unseen: G can no longer tell
_MOST_INNER, _MOST_HALVINGS = 20, 12
_SUFFICIENT = 1e-4
_SAFE = 0.5  # of an outer step to where a cavity is improper
_NEAR = 1.0  # standard deviations between means; further apart they are matched first, with precisions as they are


@dataclass(frozen=True)
class _Inner:
    """Sites l, and what they make of the cavities s - eta l."""

    posterior: Posterior
    tilted: TiltedMoments
    value: Tensor  # G (...), inf where improper

    @property
    def sites(self) -> GaussianSites:
        return self.posterior.sites


@torch.no_grad()
def loop_doubly(
    problem: Problem, tilt: Tilt, power: float, sites: GaussianSites, *, max_evaluations: int, tolerance: float
) -> tuple[GaussianSites, list[Tensor]]:
    """Return the sites at which the outer loop stands still, and F - with l as it is - after each look.

    Where it is stopped before that, the last sites that leave the cavities of their own marginals proper.

    Args:
        problem: prior, likelihood and targets; a batch shares its steps.
        tilt: makes the tilted moments.
        power: eta.
        sites: where to begin; their posterior and cavities are proper.
        max_evaluations: most factorisations.
        tolerance: of the motion of s, in units of the marginals.
    """
    trace: list[Tensor] = []
    posterior = problem.condition(sites)
    outer = _first(problem, tilt, power, posterior)
    while len(trace) < max_evaluations:
        current = _evaluate(problem, tilt, power, posterior, outer)
        if not bool(current.value.isfinite().all()):
            break
        constant = _log_partition(outer).sum(-1) / power
        trace.append(current.value - constant)
        current = _minimise(problem, tilt, power, current, outer, constant, trace, max_evaluations, tolerance)
        posterior = current.posterior
        goal = _marginals(posterior)
        proper = (goal.precision > power * posterior.sites.precision).all(-1, keepdim=True)
        sites = sites.choose(posterior.sites, proper)
        if bool((outer.motion_to(goal, posterior.mean, posterior.variance) < tolerance).all()):
            break
        outer = _toward(goal, outer, posterior.sites, power)
    return sites, trace


def _first(problem: Problem, tilt: Tilt, power: float, posterior: Posterior) -> GaussianSites:
    """Return s to begin with: the marginals of the posterior, or the tilted distributions where these are narrower.

    Under Gaussian noise of precision t, with o the part of the other sites in the marginal's precision, cavities at the
    least G have precisions (s - eta^2 t + eta o) / (1 + eta): improper for a wide prior's s, proper for s > eta t.
    """
    wide = _marginals(posterior)
    tilted = _evaluate(problem, tilt, power, posterior, wide).tilted
    narrow = GaussianSites(tilted.mean / tilted.variance, 1 / tilted.variance)
    return wide.choose(narrow, narrow.precision > wide.precision)


def _toward(goal: GaussianSites, outer: GaussianSites, sites: GaussianSites, power: float) -> GaussianSites:
    """Return s moved to the marginals, or as far as cavities stay proper: F is never lower on the way."""
    here = outer.precision - power * sites.precision
    change = goal.precision - outer.precision
    rate = torch.where(here + change > 0, 1.0, -_SAFE * here / change).amin(-1, keepdim=True)
    return _step(outer, _step(goal, outer, -1.0), rate)


def _minimise(
    problem: Problem,
    tilt: Tilt,
    power: float,
    current: _Inner,
    outer: GaussianSites,
    constant: Tensor,
    trace: list[Tensor],
    max_evaluations: int,
    tolerance: float,
) -> _Inner:
    """Return the inner loop's end: Newton steps on G, none of which raises it."""
    for _ in range(_MOST_INNER):
        step, slope = _newton(current, power)
        moving = -slope > tolerance**2
        rate = moving.to(slope)
        if not bool(moving.any()):
            break
        for _ in range(_MOST_HALVINGS):
            if len(trace) >= max_evaluations:
                return current
            ahead = _step(current.sites, step, rate.unsqueeze(-1))
            candidate = _evaluate(problem, tilt, power, problem.condition(ahead), outer)
            trace.append(torch.where(candidate.value.isfinite(), candidate.value, current.value) - constant)
            fallen = candidate.value <= current.value + _SUFFICIENT * rate * slope
            fallen = fallen | ((-slope < _SURE) & candidate.value.isfinite())
            if bool((fallen | ~moving).all()):
                current = candidate
                break
            rate = torch.where(fallen, rate, rate / 2)
        else:
            break  # rounding
    return current


def _newton(inner: _Inner, power: float) -> tuple[GaussianSites, Tensor]:
    """Return the Newton step on G as a change of the sites, far out of their shifts, and its slope (...)."""
    m, v, tilted = inner.posterior.mean, inner.posterior.variance, inner.tilted
    s = v.sqrt()
    u, w = (m - tilted.mean) / s, tilted.variance / v
    g, k = tilted.third / (v * s), tilted.fourth / v.square()
    R = inner.posterior.covariance / (s.unsqueeze(-1) * s.unsqueeze(-2))
    near = (u.abs() < _NEAR).all(-1, keepdim=True).to(u)
    across = torch.diag_embed(-0.5 * power * near * (g - 2 * u * w))
    upper = R + torch.diag_embed(power * w)
    bend = 0.25 * (k - w.square() - 4 * u * g + 4 * u.square() * w)
    lower = 0.5 * R.square() + torch.diag_embed(power * bend)
    hessian = torch.cat([torch.cat([upper, across], -1), torch.cat([across, lower], -1)], -2)
    gradient = torch.cat([u, 0.5 * near * (u.square() + w - 1)], -1)
    chol, _ = torch.linalg.cholesky_ex(hessian)
    step = -torch.cholesky_solve(gradient.unsqueeze(-1), chol).squeeze(-1)
    p, q = step.chunk(2, -1)
    precision = q / v
    return GaussianSites(p / s + m * precision, precision), (gradient * step).sum(-1)


def _evaluate(problem: Problem, tilt: Tilt, power: float, posterior: Posterior, outer: GaussianSites) -> _Inner:
    """Return G at the sites of a posterior: one factorisation, and one tilted integral a datum."""
    sites = posterior.sites
    cavity = _step(outer, sites, -power)
    proper = posterior.positive_definite & (cavity.precision > 0).all(-1) & (posterior.variance > 0).all(-1)
    good = proper.unsqueeze(-1)
    cavity = GaussianSites(torch.zeros_like(cavity.shift), torch.ones_like(cavity.precision)).choose(cavity, good)
    tilted = tilt(cavity.shift / cavity.precision, 1 / cavity.precision)
    value = posterior.log_normalizer + (tilted.log_normalizer + _log_partition(cavity)).sum(-1) / power
    return _Inner(posterior, tilted, torch.where(proper & value.isfinite(), value, torch.inf))


def _marginals(posterior: Posterior) -> GaussianSites:
    """Return the natural parameters of the marginals."""
    return GaussianSites(posterior.mean / posterior.variance, 1 / posterior.variance)


def _log_partition(natural: GaussianSites) -> Tensor:
    """Return Psi (..., N), without its constant."""
    return 0.5 * natural.shift.square() / natural.precision - 0.5 * natural.precision.log()


def _step(sites: GaussianSites, step: GaussianSites, rate: float | Tensor) -> GaussianSites:
    return GaussianSites(sites.shift + rate * step.shift, sites.precision + rate * step.precision)
