r"""Follow a solution of EP around the turns of its branch, by pseudo-arclength in its cavities [Keller 1977].

Solutions of F(x, t) = 0, where t is a power or how far a likelihood has narrowed, are curves that may turn back in t,
and on which cavities may come to be 10^8 times as wide as their marginals. So the unknowns x are the cavities, by log r
and b of r = 1/v_-, b = m_-/v_-, which are then proper wherever a step leads; tilted moments follow, then sites, and the
marginals N(m, v) of their posterior have to be those moments:

    tau = (1/v^ - r) / eta,  nu = (m^/v^ - b) / eta,    F = (log(v/v^), (m - m^)/s),  s = sqrt(v^)

From one solution to the next a step of some length goes along the tangent of (x, t); Newton steps at right angles to it
return to the curve. With r moved by r dp, b by m^ dr + dq/s, and g, k the third and fourth standardised moments of p^,

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

from gpext.inference.matching import Match
from gpext.inference.problem import Problem
from gpext.inference.tilting import Tilt
from gpext.posteriors import Posterior
from gpext.posteriors.products import times
from gpext.quadrature import TiltedMoments
from gpext.sites import GaussianSites

Path = Callable[[float], tuple[Tilt, float]]
"""t -> the rule of the tilted distributions, and the power."""

_UNIT = 0.05  # of t, which counts as much as a standard deviation or a factor of e
_FIRST, _LONGEST, _SHORTEST = 0.5, 3.0, 1e-3  # steps
_ON_CURVE = 1e-3  # residuals of a point between the ends
_BACK = (0, 2, 4, 8)  # points before the farthest, where the branch is steep enough to settle
_AT_END = 1e-3  # of the tolerance: what is small here is larger in the sites by 1 / (r v^)
_MOST_NEWTON, _EASY, _HARD = 6, 2, 4
_STRAIGHT = 0.5  # cosine of the angle between the tangent and the step that came of it
_DIFFERENCE = 1e-4  # of t
_STEADY = 1e-4  # r v^ of a solution before the end: with less, the last digits of its power decide
_WIDEST = 1e-12  # r v^, below which the cavity counts as infinite: there the branch has ended


@dataclass(frozen=True)
class Point:
    """Cavities, the sites that they make, and how far the marginals are from the tilted moments; one posterior."""

    t: float
    power: float
    precision: Tensor  # r (N,)
    shift: Tensor  # b (N,)
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
        return float((self.precision * self.tilted.variance).min())

    @property
    def size(self) -> float:
        """The largest residual."""
        return float(self.residual.abs().max())

    def moved(self, step: Tensor) -> GaussianSites:
        """Return the natural parameters of the cavities after a step (p, q)."""
        p, q = step.chunk(2, -1)
        precision = self.precision * p.exp()
        shift = self.shift + q / self.tilted.variance.sqrt() + self.tilted.mean * (precision - self.precision)
        return GaussianSites(shift, precision)


@dataclass(frozen=True)
class Branch:
    """What was seen of a branch.

    Attributes:
        end: the solution at t = 1, or None.
        farthest: without one, a solution of about the largest t that was seen; None if none is at larger t than the
            first.
        points: near solutions, in their order.
        trace: log Z after each look.
        reason: "arrived"; "turned back", to the lowest t; "cavity", where one became infinite; "lost", where no step,
            however short, returns to the curve; "budget", with no look left.
    """

    end: Point | None
    farthest: Point | None
    points: list[Point]
    trace: list[Tensor]
    reason: str


@torch.no_grad()
def follow_arc(
    problem: Problem, path: Path, found: Match, start: float, *, lowest: float, max_looks: int, tolerance: float
) -> Branch:
    """Follow a solution from t = `start`, upwards first, until it comes to t = 1.

    Args:
        problem: prior, likelihood and targets of one posterior.
        path: the tilted distributions at t, also a little below `lowest` and above 1.
        found: the solution at `start`.
        start: less than 1.
        lowest: t towards which the branch counts as one that has turned back.
        max_looks: most factorisations.
        tolerance: of the residuals at t = 1.
    """
    walk = _Walk(problem, path, lowest, tolerance, max_looks)
    begin = GaussianSites(found.cavity_mean / found.cavity_variance, 1 / found.cavity_variance)
    current = walk.look(start, begin)
    tangent, length = _unit_of_t(current), _FIRST
    points, tangents = [current], [tangent]
    reason = "lost" if current.size == torch.inf else ""
    while not reason:
        try:
            tangent = _normalised(torch.linalg.solve(walk.bordered(current, tangent), _unit_of_t(current)))
            current, tangent, length = walk.advance(current, tangent, length)
        except (_LostError, torch.linalg.LinAlgError):
            reason = "lost" if walk.may_go_on else "budget"
            break
        points.append(current)
        tangents.append(tangent)
        if current.t == 1:
            return Branch(current, None, points, walk.trace, "arrived")
        if current.t < min(points[-2].t, lowest + _UNIT):
            reason = "turned back"
        elif current.least_share < _WIDEST:
            reason = "cavity"
    steady = [k for k, point in enumerate(points) if point.least_share > _STEADY] or [0]
    top = max(steady, key=lambda k: points[k].t)
    settled = (walk.settle(points[k], tangents[k]) for k in (top - back for back in _BACK) if k > 0 and k in steady)
    farthest = next((point for point in settled if point is not None and point.least_share > _STEADY / 2), None)
    return Branch(None, farthest, points, walk.trace, reason)


class _LostError(Exception):
    """No step, however short, returns to the curve; or there is none left."""


@dataclass(frozen=True)
class _Walk:
    """One walk along a branch."""

    problem: Problem
    path: Path
    lowest: float
    tolerance: float
    max_looks: int
    trace: list[Tensor] = field(default_factory=list)

    @property
    def may_go_on(self) -> bool:
        """Whether looks are left for another step, and to settle."""
        return len(self.trace) + (1 + len(_BACK)) * (_MOST_NEWTON + 1) <= self.max_looks

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
        return Point(t, power, cavity.precision, cavity.shift, tilted, posterior, residual, value)

    def advance(self, origin: Point, tangent: Tensor, length: float) -> tuple[Point, Tensor, float]:
        """Return the next solution, the tangent carried there, and how long a step to try from there."""
        while length > _SHORTEST and self.may_go_on:
            step = length * tangent
            if origin.t + _UNIT * float(step[-1]) >= 1:
                step = step * ((1 - origin.t) / (_UNIT * step[-1]))
                point, newton = self._correct(origin, step, _unit_of_t(origin), _AT_END * self.tolerance, ends=True)
            else:
                point, newton = self._correct(origin, step, tangent, _ON_CURVE, ends=False)
            if point is not None and _is_along(origin, point, step):
                length = min(1.7 * length, _LONGEST) if newton <= _EASY else length
                return point, _normalised(_carried(origin, point, tangent)), length if newton < _HARD else length / 1.5
            length = length / 2
        raise _LostError

    def settle(self, point: Point, tangent: Tensor) -> Point | None:
        """Return the solution nearest to a point, to the tolerance, its t as it comes: there may be none at its own."""
        return self._correct(point, torch.zeros_like(tangent), tangent, _AT_END * self.tolerance, ends=False)[0]

    def _correct(
        self, origin: Point, step: Tensor, normal: Tensor, goal: float, *, ends: bool
    ) -> tuple[Point | None, int]:
        """Return the point, of residuals below `goal`, to which Newton steps at right angles to `normal` lead.

        And how many; None if they lead nowhere. Where the path ends t stays as it is.
        """
        before = 2 * max(float(step.norm()), _UNIT)
        t, cavity = (1.0 if ends else origin.t + _UNIT * float(step[-1])), origin.moved(step[:-1])
        for taken in range(_MOST_NEWTON + 1):
            if not self.lowest < t < 1 + ends:
                break
            point = self.look(t, cavity)
            self.trace.append(point.value)
            if point.size < goal:
                return point, taken
            if point.size == torch.inf:
                break
            row = normal if ends else _seen_from(origin, point, normal)
            right = torch.cat([-point.residual, torch.zeros_like(normal[:1])])
            newton = torch.linalg.solve_ex(self.bordered(point, row), right).result
            size = float(newton.norm())
            if not size < before:  # nan as well
                break
            before = size
            t, cavity = (1.0 if ends else point.t + _UNIT * float(newton[-1])), point.moved(newton[:-1])
        return None, taken

    def bordered(self, point: Point, row: Tensor) -> Tensor:
        """Return the derivatives of F in (p, q, t), over a row (2N + 1, 2N + 1)."""
        derivatives = torch.cat([_jacobian(point), _UNIT * _slope(self.path, point).unsqueeze(-1)], -1)
        return torch.cat([derivatives, row.unsqueeze(0)], 0)


def _unit_of_t(point: Point) -> Tensor:
    unit = torch.zeros(len(point.residual) + 1, dtype=point.residual.dtype, device=point.residual.device)
    unit[-1] = 1
    return unit


def _normalised(vector: Tensor) -> Tensor:
    return vector / vector.norm()


def _is_along(origin: Point, point: Point, step: Tensor) -> bool:
    """Whether the way from one point to another is about a step's: else it is of another branch."""
    p = (point.precision / origin.precision).log()
    b = point.shift - origin.shift - origin.tilted.mean * (point.precision - origin.precision)
    t = point.residual.new_tensor([(point.t - origin.t) / _UNIT])
    way = torch.cat([p, origin.tilted.variance.sqrt() * b, t])
    return bool(way @ step > _STRAIGHT * way.norm() * step.norm())


def _carried(origin: Point, point: Point, vector: Tensor) -> Tensor:
    """Return a vector of (log r, b, t) in the units of another point."""
    p, q = vector[:-1].chunk(2, -1)
    turn = origin.tilted.mean * origin.precision - point.tilted.mean * point.precision
    q = point.tilted.variance.sqrt() * (q / origin.tilted.variance.sqrt() + turn * p)
    return torch.cat([p, q, vector[-1:]])


def _seen_from(origin: Point, point: Point, normal: Tensor) -> Tensor:
    """Return what takes vectors in the units of `point` to their products with `normal` in those of `origin`."""
    p, q = normal[:-1].chunk(2, -1)
    s = origin.tilted.variance.sqrt()
    turn = point.tilted.mean * point.precision - origin.tilted.mean * origin.precision
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
    g, k, w = tilted.third / (v * s), tilted.fourth / v.square(), point.precision * v
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
    cavity = GaussianSites(point.shift, point.precision)
    (ahead, after), (behind, before) = (_sites(*path(point.t + h), cavity) for h in (_DIFFERENCE, -_DIFFERENCE))
    m, v, s = point.posterior.mean, point.tilted.variance, point.tilted.variance.sqrt()
    dtau, dnu = after.precision - before.precision, after.shift - before.shift
    width, mean = (ahead.variance - behind.variance) / v, (ahead.mean - behind.mean) / s
    covariance = point.posterior.covariance
    by_width = -times(covariance.square(), dtau) / point.posterior.variance - width
    by_mean = times(covariance, dnu - m * dtau) / s - mean - 0.5 * (m - point.tilted.mean) / s * width
    return torch.cat([by_width, by_mean]) / (2 * _DIFFERENCE)
