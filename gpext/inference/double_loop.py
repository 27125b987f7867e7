r"""EP by a double loop, whose objective never falls [Heskes & Zoeter 2002; JVV11 Eq. 13; Opper & Winther 2005].

With natural parameters l = (nu, -tau / 2) of the sites and s of a second set of marginals, phi(f) = (f, f^2), and
Psi(l) = log int exp(l phi(f)) df, power eta:

    F(s) = min over l of  G(l, s) - (1/eta) sum_i Psi(s_i)
    G(l, s) = A(l) + (1/eta) sum_i log int exp((s_i - eta l_i) phi(f)) p(y_i | f)^eta df

G is convex in l: the inner loop takes Newton steps, each shortened until G falls, to where the tilted distributions
under the cavities s - eta l have the moments of the posterior. F is the difference of two convex functions of s, and
the outer loop's s <- (marginals of the posterior) raises it. Where s no longer moves, F = log Z and l is a fixed point
of EP. In units of the marginals (dtau = q / v, dnu = p / sqrt(v) + m dtau), with e = (f - m) / sqrt(v), the Hessian is

    [[R, 0], [0, R o R / 2]] + eta diag of the covariances of (e, -e^2 / 2) under each tilted distribution

Safe but slow: hundreds of outer steps where second-order steps on the residuals take ten.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.inference.problem import Problem
from gpext.inference.tilting import Tilt
from gpext.posteriors import Posterior
from gpext.quadrature import TiltedMoments
from gpext.sites import GaussianSites

_SURE = 1e-9  # of the slope, below which a Newton step is taken unseen: G can no longer tell
_MOST_INNER, _MOST_HALVINGS = 20, 12
_SUFFICIENT = 1e-4


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
    problem: Problem, tilt: Tilt, power: float, sites: GaussianSites, *, max_looks: int, tolerance: float
) -> tuple[GaussianSites, list[Tensor]]:
    """Return the sites at which the outer loop stands still, and F - with l as it is - after each look.

    Where it leads to marginals that leave a cavity improper, the last sites before that.

    Args:
        problem: prior, likelihood and targets; a batch shares its steps.
        tilt: makes the tilted moments.
        power: eta.
        sites: where to begin; their posterior and cavities are proper.
        max_looks: most factorisations.
        tolerance: of the motion of s, in units of the marginals.
    """
    trace: list[Tensor] = []
    posterior = last = problem.condition(sites)
    while len(trace) < max_looks:
        outer = _marginals(posterior)
        current = _look(problem, tilt, power, posterior, outer)
        constant = _log_partition(outer).sum(-1) / power
        if not bool(current.value.isfinite().all()):
            return last.sites, trace
        trace.append(current.value - constant)
        last = posterior
        current = _minimise(problem, tilt, power, current, outer, constant, trace, max_looks, tolerance)
        posterior = current.posterior
        moved = outer.motion_to(_marginals(posterior), posterior.mean, posterior.variance)
        if bool((moved < tolerance).all()):
            break
    return posterior.sites, trace


def _minimise(
    problem: Problem,
    tilt: Tilt,
    power: float,
    current: _Inner,
    outer: GaussianSites,
    constant: Tensor,
    trace: list[Tensor],
    max_looks: int,
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
            if len(trace) >= max_looks:
                return current
            ahead = _step(current.sites, step, rate.unsqueeze(-1))
            candidate = _look(problem, tilt, power, problem.condition(ahead), outer)
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
    """Return the Newton step on G as a change of the sites, and the slope of G along it (...)."""
    m, v, tilted = inner.posterior.mean, inner.posterior.variance, inner.tilted
    s = v.sqrt()
    u, w = (m - tilted.mean) / s, tilted.variance / v
    g, k = tilted.third / (v * s), tilted.fourth / v.square()
    R = inner.posterior.covariance / (s.unsqueeze(-1) * s.unsqueeze(-2))
    across = torch.diag_embed(-0.5 * power * (g - 2 * u * w))
    upper = R + torch.diag_embed(power * w)
    bend = 0.25 * (k - w.square() - 4 * u * g + 4 * u.square() * w)
    lower = 0.5 * R.square() + torch.diag_embed(power * bend)
    hessian = torch.cat([torch.cat([upper, across], -1), torch.cat([across, lower], -1)], -2)
    gradient = torch.cat([u, 0.5 * (u.square() + w - 1)], -1)
    chol, _ = torch.linalg.cholesky_ex(hessian)
    step = -torch.cholesky_solve(gradient.unsqueeze(-1), chol).squeeze(-1)
    p, q = step.chunk(2, -1)
    precision = q / v
    return GaussianSites(p / s + m * precision, precision), (gradient * step).sum(-1)


def _look(problem: Problem, tilt: Tilt, power: float, posterior: Posterior, outer: GaussianSites) -> _Inner:
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
