r"""Expectation propagation that converges, for any likelihood of one latent [JVV11; Minka 2001].

Each factor p(y_i | f_i)^eta is replaced by a Gaussian site, so that posterior marginals and tilted distributions have
the same mean and variance (:mod:`gpext.inference.matching`). On likelihoods that are not log-concave the plain
iteration oscillates or leaves what is a distribution; so it goes in stages, each if the one before has not arrived:

    1. damped parallel sweeps, accelerated, with negative precisions held at zero and then without; a step that would
       leave a cavity improper is shortened
    2. Levenberg-Marquardt on the residuals in all sites at once, with their derivatives in closed form
    3. other ways in: from the sites of CAVI, all positive; and along the solutions of a likelihood that is wide at
       first, so that no datum is far out, and narrows (:mod:`gpext.inference.continuation`)
    4. at half the power, where the tilted distributions are calmer, or at a small one from the optimum of KL, to which
       EP tends with its power; and from there back up as far as a solution goes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpext.inference.cavi import CAVI
from gpext.inference.continuation import follow, proper_near
from gpext.inference.damped_sweeps import sweep_damped
from gpext.inference.double_loop import loop_doubly
from gpext.inference.kl import KL
from gpext.inference.levenberg_marquardt import levenberg_marquardt
from gpext.inference.matching import At, Match, match
from gpext.inference.problem import Problem
from gpext.inference.result import InferenceResult, Status
from gpext.inference.sequential_ep import sweep_one_by_one
from gpext.inference.tilting import tilt, widest_needed
from gpext.likelihoods import AugmentedLikelihood
from gpext.posteriors import DensePrior
from gpext.sites import GaussianSites

_PATIENCE = 8  # sweeps without progress
_PATIENCE_HELD = 15  # where every step is safe
_HALVING_STEPS = 12  # second-order steps in which the sum of squares has to halve
_HALF, _LOW, _LOWEST = 0.5, 0.1, 0.02  # of the power asked for
_BOUND_STEPS = 400
_MOST_SECOND_ORDER = 2000  # data under a low-rank prior, for which steps in O(N^3) are worth it
_SHORTEST_STEP = 0.02  # of a path
_STEPS_ALONG, _HALVING_ALONG = 30, 6  # of second-order steps at one place of it
_MOST_ALONG = 300
_FINEST = 1e-6  # of the tolerance, for the double loop's steps


@dataclass(frozen=True)
class EP:
    """Expectation propagation: marginals that match the moments of their tilted distributions.

    Args:
        power: eta in (0, 1]: 1 is EP, less is fractional (power) EP, towards 0 variational inference.
        damping: length of a step in the sites, in (0, 1].
        max_steps: most looks at sites, each one factorisation with variances.
        tolerance: converged when every marginal's mean matches to this many standard deviations, and its variance to
            this fraction.
        jitter: added to the diagonal of the prior covariance; none is needed.
        schedule: "parallel" goes through the stages above. "sequential" is EP as it was first published, site by site
            with this damping and nothing else, for comparison; of one posterior, not a batch. "double_loop" never
            lowers its objective (:mod:`gpext.inference.double_loop`), and is slow.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import StudentTLikelihood
        >>> prior = MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
        >>> result = EP().infer(prior, StudentTLikelihood().double(), torch.tensor([0.0, 9.0]).double())
        >>> result.status.name
        'CONVERGED'
    """

    power: float = 1.0
    damping: float = 0.8
    max_steps: int = 1000
    tolerance: float = 1e-6
    jitter: float = 0.0
    schedule: Literal["parallel", "sequential", "double_loop"] = "parallel"

    def __post_init__(self) -> None:
        for name in ("power", "damping"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1]; got {getattr(self, name)!r}.")
        if self.schedule not in ("parallel", "sequential", "double_loop"):
            raise ValueError(f"schedule must be 'parallel', 'sequential' or 'double_loop'; got {self.schedule!r}.")

    def infer(
        self,
        prior: MultivariateNormal,
        likelihood: Any,
        targets: Tensor,
        *,
        start: GaussianSites | None = None,
    ) -> InferenceResult:
        """Return the posterior, its sites and EP's approximation of the log evidence.

        Args:
            prior: p(f) at the training inputs, (..., N).
            likelihood: any likelihood of one latent, gpext's or gpytorch's.
            targets: (..., N).
            start: sites to start from, of an earlier result for these data; the prior by default.

        Raises:
            TypeError: several latents a datum, or half precision.
            ValueError: bad targets, shapes that do not fit, or a prior that is not finite.
        """
        problem = Problem.of(prior, likelihood, targets, self.jitter)
        if self.schedule == "sequential" and problem.mean.dim() > 1:
            raise ValueError(
                f"the sequential schedule serves one posterior; got means of shape {tuple(problem.mean.shape)}. Use "
                "schedule='parallel'."
            )
        search = _Search(self, problem)
        found = search.run(start)
        local = self._local(problem, found)
        evidence = problem.attach(found.value, local, found.posterior)
        return problem.result(search.name(found), found.posterior, evidence, search.status(found), search.trace)

    def _local(self, problem: Problem, found: Match) -> Tensor:
        """Return what has the derivatives of the evidence in the likelihood's parameters: log Z^ at fixed cavities."""
        moments = tilt(problem.likelihood, problem.targets, found.power)
        return moments(found.cavity_mean, found.cavity_variance).log_normalizer.sum(-1) / found.power


class _Search:
    """The stages, and what they have cost."""

    def __init__(self, rule: EP, problem: Problem) -> None:
        self.rule, self.problem = rule, problem
        self.trace: list[Tensor] = []
        self.stages: list[str] = []

    def run(self, start: GaussianSites | None) -> Match:
        """Go through the stages until one arrives, and return the best match."""
        power = self.rule.power
        at = self._at(power)
        begin = self.problem.no_sites() if start is None else start.to(torch.float64)
        if self.rule.schedule == "sequential":
            return self._sweep_one_by_one(at, at(begin))
        if self.rule.schedule == "double_loop":
            return self._loop_doubly(at, at(begin))
        if start is not None:
            found = self._finish(at, self._sweep(at, at(begin), power, hold=False), power)
            if self._arrived(found):
                return found
        found = self._solve(at, at(self.problem.no_sites()), power)
        for stage in (self._from_mixture, self._from_wider):
            if self._arrived(found) or self._left() <= 0:
                return found
            found = _better(found, stage(at))
        return found if self._arrived(found) else self._from_lower() or found

    def _from_mixture(self, at: At) -> Match | None:
        """Start from the sites of CAVI, all positive, where the likelihood has them."""
        if not isinstance(self.problem.likelihood, AugmentedLikelihood):
            return None
        begin = self._by_rule(CAVI(max_steps=_BOUND_STEPS, tolerance=1e-3), "steps of CAVI")
        return self._finish(at, proper_near(at, begin), self.rule.power)

    def _from_wider(self, at: At) -> Match | None:
        """Follow a solution from where the likelihood is so wide that no datum is far out."""
        power = self.rule.power
        widest = widest_needed(self.problem.likelihood, self.problem.targets - self.problem.mean)
        wide = self._at(power, widest)
        found = self._solve(wide, wide(self.problem.no_sites()), power)
        if not self._arrived(found):
            return None
        t, found = self._follow(lambda t: self._at(power, widest ** (1 - t)), found, step=1 / 6, name="from wider")
        return found if t == 1 else None

    def _from_lower(self) -> Match | None:
        """Follow a solution from a lower power towards the one asked for, and return the last of it.

        Where it ends, a datum's cavity is propped up by what fractional sites leave of the datum itself; or the branch
        turns back.
        """
        goal = self.rule.power
        for start, share in ((self._swept, _HALF), (self._by_bound, _LOW), (self._by_bound, _LOWEST)):
            low = share * goal
            found = start(low)
            if self._arrived(found):
                path = partial(self._between, low)
                return self._follow(path, found, step=0.2, name=f"up from power {low:.3g}")[1]
        return None

    def _between(self, low: float, t: float) -> At:
        goal = self.rule.power
        return self._at(goal if t == 1 else low + t * (goal - low))

    def _swept(self, power: float) -> Match:
        at = self._at(power)
        return self._solve(at, at(self.problem.no_sites()), power)

    def _by_bound(self, power: float) -> Match:
        """Return what is next to the optimum of KL, to which EP tends with its power."""
        at = self._at(power)
        return self._finish(at, proper_near(at, self._optimum), power)

    @cached_property
    def _optimum(self) -> GaussianSites:
        return self._by_rule(KL(max_steps=_BOUND_STEPS, tolerance=1e-3), "steps of KL")

    @torch.no_grad()
    def _by_rule(self, rule: CAVI | KL, stage: str) -> GaussianSites:
        problem = self.problem
        found = rule.infer(problem.prior.distribution, problem.likelihood, problem.targets)
        self._note(stage, self.rule.power, list(found.trace))
        return found.sites

    def _follow(self, at: Callable[[float], At], found: Match, *, step: float, name: str) -> tuple[float, Match]:
        traces: list[Tensor] = []
        budget = min(_MOST_ALONG, self._left())

        def solve(look: At, near: Match) -> Match | None:
            if len(traces) >= budget or not bool(near.size.isfinite().all()):
                return None
            there, trace = levenberg_marquardt(
                look,
                near,
                max_steps=min(_STEPS_ALONG, budget - len(traces)),
                patience=_HALVING_ALONG,
                tolerance=self.rule.tolerance,
            )
            traces.extend(trace)
            return there if self._arrived(there) else None

        end = follow(at, found, solve, step=step, shortest=_SHORTEST_STEP)
        self._note(f"second-order steps {name}", self.rule.power, traces)
        return end

    def _solve(self, at: At, current: Match, power: float) -> Match:
        """Sweep with the negative precisions held and then free, and finish by Levenberg-Marquardt."""
        for hold in (True, False):
            current = self._sweep(at, current, power, hold=hold)
        return self._finish(at, current, power)

    def _sweep(self, at: At, current: Match, power: float, *, hold: bool) -> Match:
        if not bool(current.size.isfinite().all()):
            return current
        current, trace = sweep_damped(
            self.problem,
            at,
            current,
            hold=hold,
            damping=self.rule.damping,
            max_sweeps=self._left(),
            patience=_PATIENCE_HELD if hold else _PATIENCE,
            tolerance=self.rule.tolerance,
        )
        self._note("sweeps of positive sites" if hold else "sweeps", power, trace)
        return current

    def _loop_doubly(self, at: At, current: Match) -> Match:
        """Run the double loop until the moments match; it may have stood still a little before."""
        rule, tolerance = self.rule, self.rule.tolerance
        moments = tilt(self.problem.likelihood, self.problem.targets, rule.power)
        while not self._arrived(current) and self._left() > 0 and tolerance > _FINEST * rule.tolerance:
            sites, trace = loop_doubly(
                self.problem, moments, rule.power, current.sites, max_looks=self._left(), tolerance=tolerance
            )
            self._note("steps of a double loop", rule.power, trace)
            before, current, tolerance = current, at(sites), tolerance / 10
            if not bool(trace) or bool((current.sites.shift == before.sites.shift).all()):
                break
        return current

    def _sweep_one_by_one(self, at: At, current: Match) -> Match:
        power, targets = self.rule.power, self.problem.targets
        current, trace = sweep_one_by_one(
            at,
            current,
            [tilt(self.problem.likelihood, targets[i : i + 1], power) for i in range(targets.size(-1))],
            damping=self.rule.damping,
            max_sweeps=self.rule.max_steps,
            patience=_PATIENCE,
            tolerance=self.rule.tolerance,
        )
        self._note("sequential sweeps", power, trace)
        return current

    def _finish(self, at: At, current: Match, power: float) -> Match:
        small = isinstance(self.problem.prior, DensePrior) or self.problem.mean.size(-1) <= _MOST_SECOND_ORDER
        if small and not self._arrived(current) and bool(current.size.isfinite().all()) and self._left() > 0:
            current, trace = levenberg_marquardt(
                at, current, max_steps=self._left(), patience=_HALVING_STEPS, tolerance=self.rule.tolerance
            )
            self._note("second-order steps", power, trace)
        return current

    def _at(self, power: float, widening: float = 1.0) -> At:
        moments = tilt(self.problem.likelihood, self.problem.targets, power, widening=widening)
        return partial(match, self.problem, moments, power)

    def _note(self, stage: str, power: float, trace: list[Tensor]) -> None:
        if not trace:
            return
        self.trace.extend(trace)
        stage = f"{len(trace)} {stage}"
        self.stages.append(stage if power == self.rule.power else f"{stage} at power {power:.3g}")

    def _left(self) -> int:
        return self.rule.max_steps - len(self.trace)

    def _arrived(self, found: Match) -> bool:
        return bool((found.size < self.rule.tolerance).all())

    def name(self, found: Match) -> str:
        """Return the rule, its power, and its stages."""
        return f"EP(power={found.power:.9g}), {', '.join(self.stages) or 'as it stood'}"

    def status(self, found: Match) -> Status:
        """Return how it ended."""
        if not bool(found.value.isfinite().all()):
            return Status.NOT_FINITE if bool(found.posterior.positive_definite.all()) else Status.NOT_POSITIVE_DEFINITE
        if self._arrived(found):
            return Status.CONVERGED if found.power == self.rule.power else Status.REDUCED_POWER
        return Status.MAX_STEPS if self._left() <= 0 else Status.STALLED


def _better(one: Match, other: Match | None) -> Match:
    """Return the match whose moments are nearer to matched."""
    return one if other is None or float(one.size.max()) <= float(other.size.max()) else other
