r"""Follow a solution of EP around the turns of its branch, by pseudo-arclength in its cavities [Keller 1977].

Solutions of F(x, t) = 0, where t is a power or how far a likelihood has narrowed, are curves that may turn back in t,
and on which cavities may come to be 10^8 times as wide as their marginals. So the unknowns x are the cavities, by log r
and b of r = 1/v_-, b = m_-/v_-, which are then proper wherever a step leads; tilted moments follow, then sites, and the
marginals N(m, v) of their posterior have to be those moments:

    tau = (1/v^ - r) / eta,  nu = (m^/v^ - b) / eta,    F = (log(v/v^), (m - m^)/s),  s = sqrt(v^)

From one solution to the next a step of some length goes along the tangent of (x, t); Newton steps at right angles to it
return to the curve. One factorisation of F's derivatives gives the Newton step and the tangent; where the former is
short its end counts as on the curve without another look, so that most steps cost one look. With r moved by r dp, b by
m^ dr + dq/s, and g, k the third and fourth standardised moments of p^,

    dm^/s = dq - g w dp / 2,   dv^/v^ = g dq - (k - 1) w dp / 2,   w = r v^
    v^ dtau = -(dv^/v^ + w dp) / eta,   s (dnu - m^ dtau) = (dm^/s - dq) / eta
    dm = V (dnu - m dtau),   dv = -(V o V) dtau

so that the derivatives of F in (p, q) are in closed form; in t they are differences of tilted integrals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpext.inference.problem import Problem
from gpext.inference.tilting import Tilt
from gpext.posteriors import Posterior
from gpext.posteriors.products import times
from gpext.quadrature import TiltedMoments
from gpext.sites import GaussianSites

Path = Callable[[float], tuple[Tilt, float]]
"""t -> the rule of the tilted distributions, and the power."""

_UNIT = 0.05  # of t, which counts as much as a standard deviation or a factor of e
_FIRST, _LONGEST, _SHORTEST = 4.0, 8.0, 1e-2  # steps
_USUAL = 0.5  # length of the first Newton step after a step of the right length
_OFF, _OBLIQUE = 1.0, 0.8  # the most of it, and over that of the step: further off it may be another branch
_CONTRACTION = 0.5  # of Newton steps
_NEAR, _NEARER = 0.8, 0.1  # the last of them; and that where the next step has failed
_MOST_NEWTON = 6
_BACK = (0, 2, 4, 8)  # places before the farthest, where the branch is steep enough to settle
_AT_END = 1e-3  # of the tolerance: what is small here is larger in the sites by 1 / (r v^)
_DIFFERENCE = 1e-4  # of t
_STEADY = 1e-4  # r v^ of a solution before the end: with less, the last digits of its power decide
_WIDEST = 1e-12  # r v^, below which the cavity counts as infinite: there the branch has ended


@dataclass(frozen=True)
class Point:
    """Cavities, the sites that they make, and how far the marginals are from the tilted moments; one posterior."""

    t: float
    power: float
    cavity: GaussianSites  # b and r (N,)
    tilted: TiltedMoments
    posterior: Posterior
    residual: Tensor  # F (2N,), inf where there is no posterior
    value: Tensor  # log Z where F = 0

    @property
    def sites(self) -> GaussianSites:
        """Where this is."""
        return self.posterior.sites

    @property
    def least_share(self) -> float:
        """The least r v^, the part of a marginal's precision that its cavity has."""
        return float((self.cavity.precision * self.tilted.variance).min())

    @property
    def size(self) -> float:
        """The largest residual."""
        return float(self.residual.abs().max())

    def moved(self, origin: GaussianSites, step: Tensor) -> GaussianSites:
        """Return cavities that are a step (p, q) from some others, in the units of this point."""
        p, q = step.chunk(2, -1)
        precision = origin.precision * p.exp()
        shift = origin.shift + q / self.tilted.variance.sqrt() + self.tilted.mean * (precision - origin.precision)
        return GaussianSites(shift, precision)


@dataclass(frozen=True)
class Place:
    """Cavities near the branch: where a Newton step leads from the last point that was looked at, or that point."""

    t: float
    cavity: GaussianSites
    point: Point
    tangent: Tensor  # of the branch (2N + 1,), in the units of the point
    missed: float  # length of the first Newton step

    @property
    def to_end(self) -> float:
        """Length of the step along the tangent to t = 1."""
        return (1 - self.t) / (_UNIT * float(self.tangent[-1])) if self.tangent[-1] > 0 else torch.inf


@dataclass(frozen=True)
class Branch:
    """What was seen of a branch.

    Attributes:
        end: the solution at t = 1, or None.
        farthest: without one, a solution of about the largest t that was seen; None if none is at larger t than the
            first.
        places: near solutions, in their order.
        trace: log Z after each look.
        reason: "arrived"; "turned back", to the lowest t; "cavity", where one became infinite; "lost", where no step,
            however short, returns to the curve; "budget", with no look left.
    """

    end: Point | None
    farthest: Point | None
    places: list[Place]
    trace: list[Tensor]
    reason: str


@torch.no_grad()
def follow_arc(
    problem: Problem, path: Path, cavity: GaussianSites, start: float, *, lowest: float, max_looks: int, tolerance: float
) -> Branch:
    """Follow a solution from t = `start`, upwards first, until it comes to t = 1.

    Args:
        problem: prior, likelihood and targets of one posterior.
        path: the tilted distributions at t, also a little above 1.
        cavity: b and r (N,) near the solution at `start`.
        start: less than 1.
        lowest: t at which the branch counts as one that has turned back.
        max_looks: most factorisations.
        tolerance: of the residuals at t = 1.
    """
    walk = _Walk(problem, path, lowest, _AT_END * tolerance, max_looks)
    places, reason = walk.along(start, cavity)
    if reason == "arrived":
        return Branch(places[-1].point, None, places, walk.trace, reason)
    steady = [k for k, place in enumerate(places) if place.point.least_share > _STEADY] or [0]
    top = max(steady, key=lambda k: places[k].t) if places else 0
    settled = (walk.settle(places[k]) for k in (top - back for back in _BACK) if k > 0 and k in steady)
    farthest = next((point for point in settled if point is not None and point.least_share > _STEADY / 2), None)
    return Branch(None, farthest, places, walk.trace, reason)


@dataclass(frozen=True)
class _Walk:
    """One walk along a branch."""

    problem: Problem
    path: Path
    lowest: float
    goal: float  # of the residuals of a solution
    max_looks: int
    trace: list[Tensor] = field(default_factory=list)

    @property
    def may_go_on(self) -> bool:
        """Whether looks are left for another step, to come nearer where it fails, and to settle."""
        return len(self.trace) + (2 + len(_BACK)) * _MOST_NEWTON <= self.max_looks

    def along(self, start: float, cavity: GaussianSites) -> tuple[list[Place], str]:
        """Return the places of a branch, and how it ends."""
        places: list[Place] = []
        here, length, fresh = self.correct(start, cavity, None, most=torch.inf, near=_NEAR), _FIRST, False
        while here is not None:
            length = min(length, here.to_end)
            if not places or places[-1] is not here:
                places.append(here)
            if not self.may_go_on:
                return places, "budget"
            if here.point.least_share < _WIDEST:
                return places, "cavity"
            if here.t + _UNIT * length * float(here.tangent[-1]) < self.lowest:
                return places, "turned back"
            ahead = self.advance(here, length)
            if ahead is not None:
                growth = min(max((_USUAL / max(ahead.missed, self.goal)) ** 0.5, 0.5), 2.0)
                here, length, fresh = ahead, min(growth * length, _LONGEST), True
                if here.t == 1:
                    places.append(here)
                    return places, "arrived"
            elif length < _SHORTEST:
                break
            else:
                length = length / 2
                if fresh:
                    fresh = False
                    here = self.correct(here.t, here.cavity, here, most=_NEAR, near=_NEARER)
                    if here is None and len(places) > 1:
                        places.pop()
                        here = places[-1]
        return places, "lost"

    def look(self, t: float, cavity: GaussianSites) -> Point:
        """Return the point at some cavities: one tilted integral a datum, one factorisation, the variances."""
        tilt, power = self.path(t)
        tilted, sites = _sites(tilt, power, cavity)
        posterior = self.problem.condition(sites)
        m, v = posterior.mean, posterior.variance
        residual = torch.cat([(v / tilted.variance).log(), (m - tilted.mean) / tilted.variance.sqrt()])
        proper = posterior.positive_definite & residual.isfinite().all()
        after = GaussianSites(tilted.mean / tilted.variance, 1 / tilted.variance)
        local = tilted.log_normalizer + _log_partition(cavity) - _log_partition(after)
        value = torch.where(proper, posterior.log_normalizer + local.sum(-1) / power, -torch.inf)
        residual = torch.where(proper, residual, torch.inf)
        return Point(t, power, cavity, tilted, posterior, residual, value)

    def advance(self, here: Place, length: float) -> Place | None:
        """Return the place after a step of some length, which may be that to the end."""
        step = length * here.tangent
        cavity = here.point.moved(here.cavity, step[:-1])
        if length == here.to_end:
            return self.correct(1.0, cavity, None, most=2 * length, goal=self.goal)
        t = here.t + _UNIT * float(step[-1])
        return self.correct(t, cavity, here, most=min(_OFF, _OBLIQUE * length), near=_NEAR)

    def settle(self, place: Place) -> Point | None:
        """Return the solution nearest to a place, its t as it comes: there may be none at its own."""
        settled = self.correct(place.t, place.cavity, place, most=_NEAR, goal=self.goal)
        return None if settled is None else settled.point

    def correct(
        self, t: float, cavity: GaussianSites, origin: Place | None, *, most: float, near: float = 0, goal: float = 0
    ) -> Place | None:
        """Return the place to which Newton steps lead at right angles to the tangent of another; None if nowhere.

        Args:
            t: where to begin.
            cavity: likewise.
            origin: has the tangent; without it t stays as it is.
            most: length of the first step, from which on they have to contract.
            near: length of a step that may be the last.
            goal: residuals of a point that need no step.
        """
        missed = None
        for _ in range(_MOST_NEWTON):
            point = self.look(t, cavity)
            self.trace.append(point.value)
            if point.size == torch.inf:
                break
            row = _unit_of_t(point) if origin is None else _seen_from(origin.point, point, origin.tangent)
            newton, tangent = self.newton(point, row)
            size = float(newton.norm())
            missed = size if missed is None else missed
            if point.size < goal:
                return Place(t, cavity, point, tangent, missed)
            if not size < most:  # nan as well
                break
            most = _CONTRACTION * size
            cavity = point.moved(cavity, newton[:-1])
            if origin is not None:
                t = t + _UNIT * float(newton[-1])
                if not self.lowest < t < 1:
                    break
            if size < near:
                return Place(t, cavity, point, tangent, missed)
        return None

    def newton(self, point: Point, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the step to where F vanishes, across a row (2N + 1,), and the tangent, along it."""
        derivatives = torch.cat([_jacobian(point), _UNIT * _slope(self.path, point).unsqueeze(-1)], -1)
        bordered = torch.cat([derivatives, row.unsqueeze(0)], 0)
        unit = _unit_of_t(point)
        right = torch.stack([torch.cat([-point.residual, torch.zeros_like(unit[:1])]), unit], -1)
        step, tangent = torch.linalg.solve_ex(bordered, right).result.unbind(-1)
        return step, tangent / tangent.norm()


def _unit_of_t(point: Point) -> Tensor:
    unit = torch.zeros(len(point.residual) + 1, dtype=point.residual.dtype, device=point.residual.device)
    unit[-1] = 1
    return unit


def _seen_from(origin: Point, point: Point, normal: Tensor) -> Tensor:
    """Return what takes vectors in the units of `point` to their products with `normal` in those of `origin`."""
    p, q = normal[:-1].chunk(2, -1)
    s, r = origin.tilted.variance.sqrt(), point.cavity.precision
    turn = (point.tilted.mean - origin.tilted.mean) * r
    return torch.cat([p + s * turn * q, s / point.tilted.variance.sqrt() * q, normal[-1:]])


def _sites(tilt: Tilt, power: float, cavity: GaussianSites) -> tuple[TiltedMoments, GaussianSites]:
    """Return the tilted moments of some cavities, and the sites that make marginals of them."""
    tilted = tilt(cavity.shift / cavity.precision, 1 / cavity.precision)
    shift = (tilted.mean / tilted.variance - cavity.shift) / power
    return tilted, GaussianSites(shift, (1 / tilted.variance - cavity.precision) / power)


def _log_partition(natural: GaussianSites) -> Tensor:
    return 0.5 * natural.shift.square() / natural.precision - 0.5 * natural.precision.log()


def _jacobian(point: Point) -> Tensor:
    """Return the derivatives of F in (p, q), (2N, 2N)."""
    eta, tilted = point.power, point.tilted
    v, s = tilted.variance, tilted.variance.sqrt()
    g, k, w = tilted.third / (v * s), tilted.fourth / v.square(), point.cavity.precision * v
    offset = (point.posterior.mean - tilted.mean) / s
    none, one = torch.zeros_like(g), torch.ones_like(g)
    mean = torch.stack([-0.5 * g * w, one])  # dm^ / s, by p and by q
    width = torch.stack([-0.5 * (k - 1) * w, g])  # dv^ / v^
    precision = -(width + torch.stack([w, none])) / eta  # v^ dtau
    shift = (mean - torch.stack([none, one])) / eta - offset * precision  # s (dnu - m dtau)
    covariance = point.posterior.covariance
    R = covariance / (s.unsqueeze(-1) * s.unsqueeze(-2))
    S = covariance.square() / (point.posterior.variance.unsqueeze(-1) * v.unsqueeze(-2))
    upper = [-S * precision[i] - torch.diag(width[i]) for i in (0, 1)]
    lower = [R * shift[i] - torch.diag(mean[i] + 0.5 * offset * width[i]) for i in (0, 1)]
    return torch.cat([torch.cat(upper, -1), torch.cat(lower, -1)], -2)


def _slope(path: Path, point: Point) -> Tensor:
    """Return the derivatives of F in t at fixed cavities (2N,), from differences of the tilted moments."""
    ahead, after = _sites(*path(point.t + _DIFFERENCE), point.cavity)
    m, v, s = point.posterior.mean, point.tilted.variance, point.tilted.variance.sqrt()
    dtau, dnu = after.precision - point.sites.precision, after.shift - point.sites.shift
    width, mean = (ahead.variance - v) / v, (ahead.mean - point.tilted.mean) / s
    covariance = point.posterior.covariance
    by_width = -times(covariance.square(), dtau) / point.posterior.variance - width
    by_mean = times(covariance, dnu - m * dtau) / s - mean - 0.5 * (m - point.tilted.mean) / s * width
    return torch.cat([by_width, by_mean]) / _DIFFERENCE
