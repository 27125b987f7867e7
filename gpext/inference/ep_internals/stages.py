"""The stages of EP: ways to a fixed point, each tried if the one before has not converged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gpext.inference.cavi import CAVI
from gpext.inference.drivers.fixed_point import Norm
from gpext.inference.ep_internals.arclength import follow_arc
from gpext.inference.ep_internals.cavities import Path
from gpext.inference.ep_internals.continuation import follow, proper_near
from gpext.inference.ep_internals.damped_sweeps import sweep_damped
from gpext.inference.ep_internals.joint_matching import JointMatch
from gpext.inference.ep_internals.levenberg_marquardt import levenberg_marquardt
from gpext.inference.ep_internals.moment_matching import At, Match, match
from gpext.inference.ep_internals.newton import cavities_of, newton
from gpext.inference.kl import KL
from gpext.inference.problem import Problem
from gpext.inference.result import InferenceResult, Status
from gpext.likelihoods import AugmentedLikelihood
from gpext.likelihoods.tilted_moments import Tilt, tilt, widest_needed
from gpext.posteriors import DensePrior
from gpext.sites import GaussianSites, JointSites

_PATIENCE = 5  # evaluations without progress in sweeps: those that converge rarely have more
_PATIENCE_HELD = 15  # while precisions are held positive, so that every step is proper
_STEPS_OF_MIXTURE = 5  # of CAVI: more steps do not help sweeps from there to converge
_HALVING_STEPS = 12  # second-order steps in which the sum of squares has to halve
_CALMER = 0.7  # of the power asked for: tilted distributions are closer to Gaussian there
_NEAR_KL = 0.002  # of it: there a fixed point is next to every optimum of KL
_BOUND_STEPS = 400
_MOST_SECOND_ORDER = 2000  # most data under a low-rank prior for which steps in O(N^3) pay
_SHORTEST_STEP = 0.02  # of a path
_STEPS_ALONG, _HALVING_ALONG, _MOST_IN_SITES = 30, 6, 120  # second-order steps at one point of a path, and in all
_MOST_NARROWING, _MOST_RAISING = 96, 126  # evaluations; branches that converge rarely have more
_SMALL_STEPS = 0.3  # scale of steps along a branch in the power: with the usual length one branch in seven is lost
_BELOW = -0.1  # t at which a narrowing likelihood counts as wide again
_FAINTEST = 0.0005  # of the power asked for, at which a branch in the power counts as turned back
_MOST_BESIDE = 14  # evaluations from an earlier result


Start = GaussianSites | JointSites | InferenceResult | None


@dataclass
class Stages:
    """The record of a search for a fixed point.

    Args:
        problem: prior, likelihood and targets.
        power: eta, asked for.
        damping: delta of the sweeps.
        max_steps: maximum number of site evaluations.
        tolerance: of the norm of the residuals.
        norm: of sweeps and second-order steps; branches go by the largest residual.
    """

    problem: Problem
    power: float
    damping: float
    max_steps: int
    tolerance: float
    trace: list[Tensor] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    norm: Norm = "max"

    def note(self, stage: str, power: float, trace: list[Tensor]) -> None:
        """Record a stage with log Z after each of its evaluations."""
        if not trace:
            return
        self.trace.extend(trace)
        stage = f"{len(trace)} {stage}"
        self.stages.append(stage if power == self.power else f"{stage} at power {power:.3g}")

    def left(self) -> int:
        """Return how many evaluations of sites are left."""
        return self.max_steps - len(self.trace)

    def has_converged(self, found: Match | JointMatch) -> bool:
        """Return whether the moments match to the tolerance."""
        return bool((found.size < self.tolerance).all())

    def name(self, found: Match | JointMatch) -> str:
        """Return the rule, its power to the last digit, which solutions with wide cavities need, and its stages."""
        power = repr(float(found.power)).removesuffix(".0")
        return f"EP(power={power}), {', '.join(self.stages) or 'no step needed'}"

    def status(self, found: Match | JointMatch) -> Status:
        """Return how it ended."""
        if not bool(found.value.isfinite().all()):
            return Status.NOT_FINITE if bool(found.posterior.positive_definite.all()) else Status.NOT_POSITIVE_DEFINITE
        if self.has_converged(found):
            return Status.CONVERGED if found.power == self.power else Status.REDUCED_POWER
        return Status.MAX_STEPS if self.left() <= 0 else Status.STALLED


class Search(Stages):
    """One search for a fixed point of sites of one latent, through as many stages as necessary."""

    def run(self, start: Start) -> Match:
        """Try the stages until one converges, and return the best match."""
        power = self.power
        at = self.at(power)
        if start is not None:
            found = self._beside(at, start)
            if found is not None and self.has_converged(found):
                return found
        found = self._solve(at, power)
        for stage in (partial(self._from_mixture, at), partial(self._narrowed, power), self._from_lower):
            if (self.has_converged(found) and found.power == power) or self.left() <= 0:
                return found
            found = self._better(found, stage())
        return found if self.has_converged(found) else self._finish(at, found, power)

    def _beside(self, at: At, start: GaussianSites | JointSites | InferenceResult) -> Match | None:
        """Return the match by Newton steps from the cavities of an earlier result, if any; from sites by sweeps."""
        if not isinstance(start, InferenceResult) or self._is_batch or not self._is_small:
            return self._finish(at, self._sweep(at, at(self.begin(start)), self.power, hold=False), self.power)
        cavity = cavities_of(start.conditioned, self.power)
        if cavity is None:
            return None
        path, most = partial(self._between, 0.0), min(_MOST_BESIDE, self.max_steps)
        end, trace, taken = newton(self.problem, path, cavity, max_evaluations=most, tolerance=self.tolerance)
        self.note(f"steps from an earlier result ({taken} derivatives)", self.power, trace)
        return None if end is None else self._finish(at, at(end.sites), self.power)

    def _from_mixture(self, at: At) -> Match | None:
        """Sweep from the sites of CAVI, all positive, if the likelihood has an augmentation."""
        if not isinstance(self.problem.likelihood, AugmentedLikelihood):
            return None
        begin = self._by_rule(CAVI(max_steps=_STEPS_OF_MIXTURE, tolerance=1e-3), "steps of CAVI")
        return self._settled(at, proper_near(at, begin), self.power)

    def _narrowed(self, power: float) -> Match | None:
        """Follow a branch of solutions from a likelihood so wide that no datum is far out."""
        problem = self.problem
        widest = widest_needed(problem.likelihood, problem.targets, problem.mean, problem.prior.variance)
        wide = self.at(power, widest)
        found = self._solve(wide, power) if self._is_batch else wide(problem.no_sites())

        def path(t: float) -> tuple[Tilt, float]:
            return self._tilt(power, widest ** (1 - t)), power

        most, name = _MOST_NARROWING, "from wider"
        return self._follow(path, found, most, 1.0, lowest=_BELOW, step=1 / 6, name=name, partway=False)

    def _from_lower(self) -> Match | None:
        """Follow a branch of solutions from a lower power towards the one asked for, and return its last solution.

        A branch ends below the power asked for if it turns back, or if a cavity would become improper without the part
        of its datum that a fractional site leaves in it.
        """
        goal = self.power
        for start, share in self._ways():
            low = share * goal
            found = start(low)
            if found is not None and self.has_converged(found):
                path, lowest = partial(self._between, low), (_FAINTEST - share) / (1 - share)
                name = f"up from power {low:.3g}"
                most, step_scale = _MOST_RAISING, _SMALL_STEPS
                there = self._follow(path, found, most, step_scale, lowest=lowest, step=0.2, name=name, partway=True)
                return there or found
        return None

    def _ways(self) -> tuple[tuple[Callable[[float], Match | None], float], ...]:
        """Return ways to a solution at a lower power, and its share of the one asked for."""
        return (
            (self._narrowed, _CALMER),
            (self._swept, _CALMER),
            (self._by_bound, _NEAR_KL),
        )

    def _between(self, low: float, t: float) -> tuple[Tilt, float]:
        power = self.power if t == 1 else low + t * (self.power - low)
        return self._tilt(power), power

    def _swept(self, power: float) -> Match:
        return self._solve(self.at(power), power)

    def _by_bound(self, power: float) -> Match:
        """Return the match next to the optimum of KL, which is the limit of EP as its power goes to zero."""
        at = self.at(power)
        optimum = self._by_rule(KL(max_steps=_BOUND_STEPS, tolerance=1e-3), "steps of KL")
        return self._finish(at, proper_near(at, optimum), power)

    @torch.no_grad()
    def _by_rule(self, rule: CAVI | KL, stage: str) -> GaussianSites:
        problem = self.problem
        found = rule.infer(problem.prior.distribution, problem.likelihood, problem.targets)
        self.note(stage, self.power, list(found.trace))
        assert isinstance(found.sites, GaussianSites)  # of one latent
        return found.sites

    def _follow(
        self,
        path: Path,
        found: Match,
        most: int,
        step_scale: float,
        *,
        lowest: float,
        step: float,
        name: str,
        partway: bool,
    ) -> Match | None:
        """Return the solution at the end of a path, if it could be followed; for a batch by steps in its sites.

        Args:
            path: the problem at t in [0, 1].
            found: at 0, the solution; of one posterior, near it.
            most: maximum number of site evaluations.
            step_scale: for one posterior, see :func:`follow_arc`.
            lowest: t down to which the branch of one posterior may turn back.
            step: the first step of t in a batch.
            name: of the stage.
            partway: whether to return the last solution before 1 if there is none at 1.
        """
        budget = min(most, self.left())
        if not self._is_small or budget <= 0:
            return None
        if self._is_batch:
            if not self.has_converged(found):
                return None
            t, there = self._follow_in_sites(path, found, step, name)
            return there if t == 1 or partway else None
        begin = GaussianSites(found.cavity_mean / found.cavity_variance, 1 / found.cavity_variance)
        branch = follow_arc(
            self.problem,
            path,
            begin,
            0.0,
            lowest=lowest,
            max_evaluations=budget,
            tolerance=self.tolerance,
            step_scale=step_scale,
            partway=partway,
        )
        self.note(f"steps along a branch {name}", path(1.0)[1], branch.trace)
        point = branch.farthest if branch.end is None else branch.end
        if point is None:
            return None
        evaluate = partial(match, self.problem, *path(point.t))
        there = self._finish(evaluate, evaluate(point.sites), point.power)
        return there if self.has_converged(there) else None

    def _follow_in_sites(self, path: Path, found: Match, step: float, name: str) -> tuple[float, Match]:
        traces: list[Tensor] = []
        budget = min(_MOST_IN_SITES, self.left())

        def solve(evaluate: At, near: Match) -> Match | None:
            if len(traces) >= budget or not bool(near.size.isfinite().all()):
                return None
            there, trace = levenberg_marquardt(
                evaluate,
                near,
                max_steps=min(_STEPS_ALONG, budget - len(traces)),
                patience=_HALVING_ALONG,
                tolerance=self.tolerance,
            )
            traces.extend(trace)
            return there if self.has_converged(there) else None

        at = lambda t: partial(match, self.problem, *path(t))  # noqa: E731
        end = follow(at, found, solve, step=step, shortest=_SHORTEST_STEP)
        self.note(f"second-order steps {name}", path(1.0)[1], traces)
        return end

    def _solve(self, at: At, power: float) -> Match:
        """Sweep from the prior, the negative precisions held and then free."""
        current = at(self.problem.no_sites())
        return self._settled(at, self._sweep(at, current, power, hold=True), power)

    def _settled(self, at: At, current: Match, power: float) -> Match:
        """Continue sweeps with all sites free; a batch, for which there are no branches, adds second-order steps."""
        current = self._sweep(at, current, power, hold=False)
        return self._finish(at, current, power) if self._is_batch else current

    def _sweep(self, at: At, current: Match, power: float, *, hold: bool) -> Match:
        if not bool(current.size.isfinite().all()):
            return current
        current, trace = sweep_damped(
            self.problem,
            at,
            current,
            hold=hold,
            damping=self.damping,
            max_sweeps=self.left(),
            patience=_PATIENCE_HELD if hold else _PATIENCE,
            tolerance=self.tolerance,
        )
        self.note("sweeps of positive sites" if hold else "sweeps", power, trace)
        return current

    @property
    def _is_batch(self) -> bool:
        return self.problem.mean.dim() > 1

    @property
    def _is_small(self) -> bool:
        """Whether steps in O(N^3) are worth it."""
        return isinstance(self.problem.prior, DensePrior) or self.problem.mean.size(-1) <= _MOST_SECOND_ORDER

    def begin(self, start: Start) -> GaussianSites:
        """Return the sites to start from."""
        sites = start.sites if isinstance(start, InferenceResult) else start
        if sites is None:
            return self.problem.no_sites()
        if not isinstance(sites, GaussianSites):
            raise TypeError("start must be of a likelihood of one latent function per datum; got sites of several.")
        return sites.to(torch.float64)

    def _finish(self, at: At, current: Match, power: float) -> Match:
        may_improve = not self.has_converged(current) and bool(current.size.isfinite().all())
        if self._is_small and may_improve and self.left() > 0:
            current, trace = levenberg_marquardt(
                at, current, max_steps=self.left(), patience=_HALVING_STEPS, tolerance=self.tolerance
            )
            self.note("second-order steps", power, trace)
        return current

    def _tilt(self, power: float, widening: float = 1.0) -> Tilt:
        return tilt(self.problem.likelihood, self.problem.targets, power, widening=widening)

    def at(self, power: float, widening: float = 1.0) -> At:
        """Return the function that evaluates sites at a power, of a likelihood that is widened."""
        return partial(match, self.problem, self._tilt(power, widening), power, norm=self.norm)

    def _better(self, one: Match, other: Match | None) -> Match:
        """Return the match that has converged, preferring a larger power, or else has the smaller residuals."""

        def rank(found: Match) -> tuple[bool, float, float]:
            converged = self.has_converged(found)
            return converged, found.power if converged else 0.0, -float(found.size.max())

        return one if other is None else max(one, other, key=rank)
