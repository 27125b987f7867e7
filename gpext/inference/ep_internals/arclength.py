r"""Follow a solution of EP around the turns of its branch, by pseudo-arclength in its cavities [Keller 1977].

Solutions of F(x, t) = 0 (:mod:`gpext.inference.ep_internals.cavities`), where t is a power or how far a likelihood has
narrowed, are curves that may turn back in t. From one solution to the next a step of some length goes along the tangent
of (x, t); Newton steps at right angles to it return to the curve. One factorisation of F's derivatives gives both the
Newton step and the tangent where it starts; if the step is short its end counts as on the curve without another
evaluation, so that most steps along the curve cost one evaluation and one factorisation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpext.inference.ep_internals.cavities import Path, Point, differentiate, evaluate, seen_from
from gpext.inference.problem import Problem
from gpext.sites import GaussianSites

_UNIT = 0.05  # of t, which counts as much as a standard deviation or a factor of e
_FIRST, _LONGEST, _SHORTEST = 4.0, 8.0, 1e-2  # steps
_USUAL = 0.5  # length of the first Newton step after a step of the right length
_OFF, _OBLIQUE = 1.0, 0.8  # the most of it, and over that of the step: further off it may be another branch
_CONTRACTION = 0.5  # of Newton steps
_NEAR, _NEARER = 0.8, 0.1  # the last of them; and that where the next step has failed
_MOST_NEWTON = 6
_FEW, _SLOWEST = 10, 2.5  # evaluations, and of a place, until a branch is lost: those that converge have fewer
_BACK = (0, 2, 4, 8)  # places before the farthest, where the branch is steep enough to settle
_AT_END = 1e-3  # of the tolerance: what is small here is larger in the sites by 1 / (r v^)
_STEADY = 1e-4  # r v^ of a solution before the end: with less, the last digits of its power decide
_WIDEST = 1e-12  # r v^, below which the cavity counts as infinite: there the branch has ended


@dataclass(frozen=True)
class Place:
    """Cavities near the branch: where a Newton step leads from the last point that was evaluated, or that point."""

    t: float
    cavity: GaussianSites
    point: Point
    tangent: Tensor  # of the branch (2N + 1,), in the units of the point; of a solution, the last place's
    missed: float  # length of the first Newton step

    @property
    def to_end(self) -> float:
        """Length of the step along the tangent to t = 1."""
        return (1 - self.t) / (_UNIT * float(self.tangent[-1])) if self.tangent[-1] > 0 else torch.inf


@dataclass(frozen=True)
class Branch:
    """The part of a branch that was followed.

    Attributes:
        end: the solution at t = 1, or None.
        farthest: without one, a solution of about the largest t that was reached, if it is of use; None if none is at
            larger t than the first.
        places: near solutions, in their order.
        trace: log Z after each evaluation.
        reason: "converged"; "turned back", to the lowest t; "cavity", where one became infinite; "lost", where no step,
            however short, returns to the curve; "budget", with no evaluation left.
    """

    end: Point | None
    farthest: Point | None
    places: list[Place]
    trace: list[Tensor]
    reason: str


@torch.no_grad()
def follow_arc(
    problem: Problem,
    path: Path,
    cavity: GaussianSites,
    start: float,
    *,
    lowest: float,
    max_evaluations: int,
    tolerance: float,
    step_scale: float = 1.0,
    partway: bool = True,
) -> Branch:
    """Follow a solution from t = `start`, upwards first, until it comes to t = 1.

    Args:
        problem: prior, likelihood and targets of one posterior.
        path: the tilted distributions at t, also a little above 1.
        cavity: b and r (N,) near the solution at `start`.
        start: less than 1.
        lowest: t at which the branch counts as one that has turned back.
        max_evaluations: most factorisations.
        tolerance: of the residuals at t = 1.
        step_scale: how long steps are and how near the branch is followed, in units of the usual.
        partway: whether the farthest solution is of use.
    """
    walk = _Walk(problem, path, lowest, _AT_END * tolerance, max_evaluations, step_scale, partway)
    here = walk.correct(start, cavity, None, most=torch.inf, near=step_scale * _NEAR)
    places, reason = ([], "lost") if here is None else walk.along(here)
    if reason == "converged":
        return Branch(places[-1].point, None, places, walk.trace, reason)
    if not partway:
        return Branch(None, None, places, walk.trace, reason)
    steady = [k for k, place in enumerate(places) if place.point.least_share > _STEADY]
    top = max(steady, key=lambda k: places[k].t, default=0)
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
    max_evaluations: int
    step_scale: float
    partway: bool
    trace: list[Tensor] = field(default_factory=list)

    @property
    def may_go_on(self) -> bool:
        """Whether evaluations are left for another step, to come nearer where it fails, and to settle."""
        return len(self.trace) + (2 + len(_BACK) * self.partway) * _MOST_NEWTON <= self.max_evaluations

    def along(self, here: Place) -> tuple[list[Place], str]:
        """Return the places of a branch from the first one on, and how it ends."""
        places, step_scale = [here], self.step_scale
        length, fresh = step_scale * _FIRST, False
        while self.may_go_on:
            length = min(length, here.to_end)
            if here.point.least_share < _WIDEST:
                return places, "cavity"
            if len(self.trace) > _FEW + _SLOWEST * len(places):
                return places, "lost"
            if here.t + _UNIT * length * float(here.tangent[-1]) < self.lowest:
                return places, "turned back"
            ahead = self.advance(here, length)
            if ahead is not None:
                growth = min(max((step_scale * _USUAL / max(ahead.missed, self.goal)) ** 0.5, 0.5), 2.0)
                here, length, fresh = ahead, min(growth * length, _LONGEST), True
                places.append(here)
                if here.t == 1:
                    return places, "converged"
            elif length < step_scale * _SHORTEST:
                return places, "lost"
            else:
                length = length / 2
                if fresh:  # it may be too far from the branch
                    nearer = self.correct(here.t, here.cavity, here, most=step_scale * _NEAR, near=step_scale * _NEARER)
                    last = places.pop()
                    places += [nearer] if nearer is not None else [] if places else [last]
                    here, fresh = places[-1], False
        return places, "budget"

    def advance(self, here: Place, length: float) -> Place | None:
        """Return the place after a step of some length, which may be that to the end."""
        step = length * here.tangent
        cavity = here.point.moved(here.cavity, step[:-1])
        if length == here.to_end:
            return self.correct(1.0, cavity, None, most=2 * length, goal=self.goal)
        t = here.t + _UNIT * float(step[-1])
        return self.correct(
            t, cavity, here, most=min(self.step_scale * _OFF, _OBLIQUE * length), near=self.step_scale * _NEAR
        )

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
            goal: residuals of a point that need no step, and no derivatives.
        """
        missed = None
        for _ in range(_MOST_NEWTON):
            point = evaluate(self.problem, self.path, t, cavity)
            self.trace.append(point.value)
            if point.size == torch.inf:
                break
            row = _unit_of_t(point) if origin is None else seen_from(origin.point, point, origin.tangent)
            if point.size < goal:
                return Place(t, cavity, point, row, missed or 0.0)
            newton, tangent = self.newton(point, row)
            size = float(newton.norm())
            missed = size if missed is None else missed
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
        unit = _unit_of_t(point)
        right = torch.stack([torch.cat([-point.residual, torch.zeros_like(unit[:1])]), unit])
        step, tangent = differentiate(point, self.path, _UNIT).across(row)(right)
        return step, tangent / tangent.norm()


def _unit_of_t(point: Point) -> Tensor:
    unit = torch.zeros(len(point.residual) + 1, dtype=point.residual.dtype, device=point.residual.device)
    unit[-1] = 1
    return unit
