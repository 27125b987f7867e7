"""EP as it was published, to compare with: site by site, and by a double loop."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.ep_double_loop import loop_doubly
from benchmarks.ep_one_by_one import sweep_one_by_one
from gpext.inference import EP
from gpext.inference.ep_internals.moment_matching import Match
from gpext.inference.ep_internals.stages import Search, Start
from gpext.likelihoods.tilted_moments import tilt

_PATIENCE = 16  # sweeps
_FINEST = 1e-6  # of the tolerance, for the double loop's steps


@dataclass(frozen=True)
class SequentialEP(EP):
    """EP site by site with its damping and nothing else; of one posterior, not a batch."""

    def _find(self, search: Search, start: Start) -> Match:
        problem, power = search.problem, self.power
        problem.require_data_apart()
        at, targets = search.at(power), problem.targets
        current, trace = sweep_one_by_one(
            at,
            at(search.begin(start)),
            [tilt(problem.likelihood, targets[i : i + 1], power) for i in range(len(targets))],
            damping=self.damping,
            max_sweeps=self.max_steps,
            patience=_PATIENCE,
            tolerance=self.tolerance,
        )
        search.note("sequential sweeps", power, trace)
        return current


@dataclass(frozen=True)
class DoubleLoopEP(EP):
    """EP by a double loop, which never lowers its objective, until the moments match; it may stand still before."""

    def _find(self, search: Search, start: Start) -> Match:
        problem, at, tolerance = search.problem, search.at(self.power), self.tolerance
        current = at(search.begin(start))
        moments = tilt(problem.likelihood, problem.targets, self.power)
        while not search.has_converged(current) and search.left() > 0 and tolerance > _FINEST * self.tolerance:
            sites, trace = loop_doubly(
                problem, moments, self.power, current.sites, max_evaluations=search.left(), tolerance=tolerance
            )
            search.note("steps of a double loop", self.power, trace)
            before, current, tolerance = current, at(sites), tolerance / 10
            if not bool(trace) or bool((current.sites.shift == before.sites.shift).all()):
                break
        return current
