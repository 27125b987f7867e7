"""SciPy's L-BFGS over the parameters of torch modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gpext.callers import held_warnings, warn_caller
from gpext.optim.coordinates import Array, flatten, from_coordinates, stretch, to_coordinates, unflatten, usual_step
from gpext.threads import one_thread_of_numpy

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

_STEPS_PER_PARAMETER = 2  # that tell the curvature
_TYPICAL = 0.4  # second derivative along its gradient of a log evidence a datum, in the coordinates of a run
_APART = 0.05  # points whose gradients are compared, in those coordinates
_FLATTEST = 1e-3  # least eigenvalue of a Hessian there that gradients at few points tell
_FRUITLESS = 8  # evaluations
_NO_GAIN = 0.1  # times the tolerance


class Outcome(Enum):
    """The outcome of a minimisation.

    Example:
        >>> Outcome.CONVERGED.name
        'CONVERGED'
    """

    CONVERGED = "converged"
    MAX_STEPS = "stopped at max_steps"
    STALLED = "the line search found no better point"
    STOPPED = "stopped by the callback"


class _FruitlessError(Exception):
    """Many evaluations in a row are as good as the best, and none is better: what they show is rounding."""


class Curvature:
    """The approximate inverse Hessian that minimisations of similar objectives hand on.

    It is a root R, R R' ~ H^-1, by the BFGS update [Nocedal & Wright 6.1]. In coordinates x = x0 + R z a step along the
    gradient is Newton's. Fewer than 2 P steps of P parameters tell too little; the last of them, and the change of the
    gradient by it, tell how long the first step of the next run may be.

    Example:
        >>> Curvature().root is None  # before the first run
        True
    """

    def __init__(self) -> None:
        self.root: Array | None = None  # R (P, P)
        self.last_step: tuple[Array, Array] | None = None  # s, y (P,)
        self._pairs: list[tuple[Array, Array]] = []  # likewise, while they are too few

    @one_thread_of_numpy()
    def measure(
        self,
        objective: Callable[[], Tensor | float],
        parameters: Sequence[Tensor],
        on_best: Callable[[], None] | None = None,
    ) -> None:
        """Learn from the changes of the gradient along each parameter: P + 1 evaluations of an objective.

        Where the function is not convex, a step along an eigenvector of its Hessian is as long as if it were. Nothing
        is learned where an evaluation fails; the parameters end where they were. Arguments are those of
        :func:`minimize_lbfgs`.

        Raises:
            torch.linalg.LinAlgError, FloatingPointError: the objective cannot be evaluated at the parameters given.
        """
        run = _Run(objective, parameters, 0.0, None, on_best)
        given = flatten(parameters)
        start, scale = to_coordinates(given), usual_step(given)
        try:
            _, gradient = run.evaluate(start)
            moved = [run.evaluate(start + each)[1] for each in np.diag(_APART * scale)]
        finally:
            unflatten(given, parameters)
        if run.has_broken_down:
            return
        hessian = scale * (np.array(moved) - gradient) / _APART
        values, vectors = np.linalg.eigh(0.5 * (hessian + hessian.T))
        self.root = scale[:, None] * (vectors / np.sqrt(np.maximum(np.abs(values), _FLATTEST)))

    def learn(self, points: Sequence[Array], gradients: Sequence[Array], *, gained: bool, foretold: bool) -> None:
        """Follow a run.

        Args:
            points: where it was in turn, (P,) each.
            gradients: the gradients there.
            gained: whether its steps were long enough to tell the inverse Hessian.
            foretold: whether it gained what the inverse Hessian known so far had foretold; otherwise that is forgotten.
        """
        if len(points) > 1:
            self.last_step = points[-1] - points[-2], gradients[-1] - gradients[-2]
        if not gained:
            return
        if not foretold:
            self.root = None  # what follows is learned from this run on
        pairs = [(s, y) for s, y in zip(np.diff(points, axis=0), np.diff(gradients, axis=0), strict=True) if s @ y > 0]
        if not pairs:
            return
        s, y = pairs[-1]
        if self.root is None:
            self._pairs.extend(pairs)
            if len(self._pairs) < _STEPS_PER_PARAMETER * len(s):
                return
            pairs, self._pairs = self._pairs, []
        unit = np.eye(len(s))
        inverse = unit * (s @ y) / (y @ y) if self.root is None else self.root @ self.root.T
        for s, y in pairs:
            turned = unit - np.outer(s, y) / (s @ y)
            inverse = turned @ inverse @ turned.T + np.outer(s, s) / (s @ y)
        values, vectors = np.linalg.eigh(inverse)
        self.root = vectors * np.sqrt(values) if values[0] > 0 else None  # lost to rounding


@one_thread_of_numpy()
def minimize_lbfgs(
    objective: Callable[[], Tensor | float],
    parameters: Sequence[Tensor],
    *,
    max_steps: int,
    tolerance: float,
    callback: Callable[[float], bool | None] | None = None,
    on_best: Callable[[], None] | None = None,
    max_restarts: int = 0,
    memory: int = 20,
    curvature: Curvature | None = None,
) -> Outcome:
    """Minimise a differentiable objective in place; the parameters end at the best point evaluated.

    It works in coordinates that are nearly logarithms of large parameters, x up to one and 4 x^(1/4) - 3 beyond, and
    every run in units in which a step of length one moves a large value in proportion to itself. In a long flat valley
    a run may end because its model of the curvature is stale; a restart discards it, but for the length of the first
    step. The length of the very first step suits a log evidence a datum, and is at most one. An iteration evaluates the
    objective at most a dozen times.

    Args:
        objective: takes no argument, returns a scalar and leaves its derivatives in the parameters' `.grad`, which are
            dropped before. `torch.linalg.LinAlgError` marks a point the line search must step back from. It may improve
            from one call to the next (inner variables that are kept), but must not get worse. gpext's warnings are
            passed on from points where it is finite.
        parameters: what is optimised.
        max_steps: maximum number of iterations, of all runs together.
        tolerance: a run has converged when three successive iterations improve the objective by less than this each,
            the last by no more than the first (a run that begins with tiny steps gains more with each), or eight
            successive evaluations differ by less than a tenth of this, and the minimisation when a whole run improves
            the objective by less than three times this, unless its line search ended before a cliff. In a known
            curvature a run has converged when a quadratic function has less than this to gain along the last iteration,
            by its slopes at both ends, and by a Newton step after it, and either the run has gained no more than twice
            what such a function of that curvature would, or has made two iterations a parameter, or the last three are
            as above.
        callback: called after each iteration with the value there; the parameters are those of the iterate, and the
            objective's last call was there. Returns True to stop.
        on_best: called after each evaluation that is better than all before it, at the parameters there, so
            that other state of the best point can be kept.
        max_restarts: how often to start again from where a run has ended.
        memory: number of curvature pairs kept.
        curvature: of earlier minimisations; if it is known, its coordinates take the place of those above in the first
            run, which is the last if it converges. It follows every run.

    Raises:
        torch.linalg.LinAlgError, FloatingPointError: the objective cannot be evaluated at the starting point.

    Example:
        >>> import torch
        >>> x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        >>> def objective():
        ...     value = (x - torch.tensor([1.0, 2.0])).square().sum()
        ...     value.backward()
        ...     return value.item()
        >>> outcome = minimize_lbfgs(objective, [x], max_steps=50, tolerance=1e-10)
        >>> outcome.name, x.detach().round(decimals=4)
        ('CONVERGED', tensor([1., 2.], dtype=torch.float64))
    """
    if not sum(p.numel() for p in parameters):
        return Outcome.CONVERGED
    run = _Run(objective, parameters, tolerance, callback, on_best)
    curvature = Curvature() if curvature is None else curvature
    for restart in range(max_restarts + 1):
        if run.num_steps >= max_steps:
            return Outcome.MAX_STEPS
        root = None if restart else curvature.root
        outcome = run.minimise(max_steps - run.num_steps, memory, root, curvature.last_step)
        gained, foretold = run.gain >= 3 * tolerance, run.gain < 2 * run.foretold
        curvature.learn(run.points, run.gradients, gained=gained, foretold=foretold)
        if outcome in (Outcome.STOPPED, Outcome.MAX_STEPS):
            break
        if outcome is Outcome.CONVERGED and root is not None:
            break
        if not gained and root is None:
            # A run that starts where another has ended is ended by rounding, whatever its outcome, unless a breakdown
            # prevented it from continuing, or its last line search ended before points that are far worse: at a cliff.
            if not restart:
                return outcome
            at_cliff = outcome is Outcome.STALLED and run.last_rise > tolerance
            return Outcome.STALLED if run.has_broken_down or at_cliff else Outcome.CONVERGED
    return outcome


class _Run:
    """The objective as a function of a NumPy vector, and the best point evaluated so far."""

    def __init__(
        self,
        objective: Callable[[], Tensor | float],
        parameters: Sequence[Tensor],
        tolerance: float,
        callback: Callable[[float], bool | None] | None,
        on_best: Callable[[], None] | None,
    ) -> None:
        self.objective, self.parameters, self.tolerance, self.callback = objective, parameters, tolerance, callback
        self.on_best = on_best
        self.num_steps = 0
        self.gain = 0.0  # of this run
        self.last_rise = 0.0  # from the best point to the last that was evaluated
        self.foretold = 0.0  # the gain of a quadratic function of the known curvature
        self.points: list[Array] = []  # of the iterates of this run
        self.gradients: list[Array] = []
        self.has_broken_down = False  # anywhere in this run
        self._best_value, self._best = np.inf, flatten(parameters)
        self._best_point = to_coordinates(self._best)
        self._last_point, self._last_gradient = self._best_point, np.zeros_like(self._best_point)

    def minimise(
        self, max_steps: int, memory: int, curvature: Array | None, last_step: tuple[Array, Array] | None
    ) -> Outcome:
        """Run L-BFGS from the best point so far, in the coordinates of a root of the inverse Hessian if it is known.

        If it is not, a step before this run tells how long the first one may be.
        """
        from scipy.optimize import minimize

        start = self._best_point
        values: list[float] = []  # of the iterates
        evaluated: list[float] = []
        outcome: Outcome | None = None
        self.has_broken_down = False
        at_start = self.evaluate(start)
        root, self.foretold = usual_step(self._best), 0.0
        # The first step of L-BFGS-B has length one.
        if curvature is not None:  # Newton's has that of the gradient; it is at most one in the coordinates above
            downhill = curvature.T @ at_start[1]
            length = float(np.linalg.norm(downhill))
            excess = max(1.0, float(np.linalg.norm(curvature @ downhill / root)))
            root, self.foretold = curvature * (length / excess or 1.0), 0.5 * length**2
        else:
            root = root * _first_length(root, at_start[1], last_step)
        self.points, self.gradients = [start], [at_start[1]]

        def place(z: Array) -> Array:
            return start + (root * z if root.ndim == 1 else root @ z)

        def evaluate(z: Array) -> tuple[float, Array]:
            value, gradient = self.evaluate(place(z)) if z.any() else at_start
            evaluated.append(value)
            recent = evaluated[-_FRUITLESS:]
            if len(recent) == _FRUITLESS and max(recent) - min(recent) < _NO_GAIN * self.tolerance:
                raise _FruitlessError
            return value, root * gradient if root.ndim == 1 else root.T @ gradient

        def after_iteration(intermediate_result: OptimizeResult) -> None:
            nonlocal outcome
            if not np.array_equal(place(intermediate_result.x), self._last_point):
                self.evaluate(place(intermediate_result.x))
            self.num_steps += 1
            values.append(float(intermediate_result.fun))
            self.points.append(self._last_point)
            self.gradients.append(self._last_gradient)
            if self.callback is not None and self.callback(values[-1]):
                outcome = Outcome.STOPPED
                raise StopIteration
            gains = -np.diff(values[-4:])
            has_settled = len(gains) == 3 and max(gains) < self.tolerance and gains[-1] <= gains[0]
            if curvature is not None:
                is_told = at_start[0] - values[-1] < 2 * self.foretold or self.tells_curvature
                has_settled = (is_told or has_settled) and self._to_gain(curvature) < self.tolerance
            if has_settled:
                outcome = Outcome.CONVERGED
                raise StopIteration

        try:
            result = minimize(
                evaluate,
                np.zeros_like(start),
                jac=True,
                method="L-BFGS-B",
                callback=after_iteration,
                options={"maxiter": max_steps, "maxcor": memory, "ftol": 0.0, "gtol": 1e-9, "maxls": 10},
            )
        except _FruitlessError:
            outcome = Outcome.CONVERGED
        finally:  # also after an interrupt
            unflatten(self._best, self.parameters)
        self.gain = at_start[0] - self._best_value
        self.last_rise = evaluated[-1] - self._best_value
        if outcome is not None:
            return outcome
        if result.nit >= max_steps:
            return Outcome.MAX_STEPS
        # A gradient that vanishes in the coordinates of a curvature, which may be wrong, need not vanish in others.
        return Outcome.CONVERGED if result.success and curvature is None else Outcome.STALLED

    @property
    def tells_curvature(self) -> bool:
        """Whether the steps of this run are enough to tell the curvature along every parameter."""
        return len(self.points) > _STEPS_PER_PARAMETER * len(self._best_point)

    def _to_gain(self, curvature: Array) -> float:
        """Return what there is to gain by the last step, or by a Newton step from here.

        A quadratic function of the slopes m and m' at the two ends of a step has m^2 / (2 (m - m')) to gain along it.
        The gain itself would tell less: where it is small, what an inexact inference has left is as large.
        """
        step = self.points[-2] - self.points[-1]
        before, after = self.gradients[-2] @ step, self.gradients[-1] @ step
        along = before**2 / (2 * (before - after)) if after < before else np.inf
        return max(along, 0.5 * float(np.square(curvature.T @ self.gradients[-1]).sum()))

    def evaluate(self, point: np.ndarray) -> tuple[float, np.ndarray]:
        self._last_point = point
        # Parameters come back to where they were to the last bit.
        x = self._best if np.array_equal(point, self._best_point) else from_coordinates(point)
        unflatten(x, self.parameters)
        for parameter in self.parameters:
            parameter.grad = None
        with held_warnings() as held:
            try:
                value = float(self.objective())
            except torch.linalg.LinAlgError:
                if not np.isfinite(self._best_value):
                    raise
                value = np.nan
        if np.isfinite(value):  # otherwise the line search leaves this point, and its warnings are irrelevant
            for message, category in held:
                warn_caller(message, category)
        slopes = flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        gradient = stretch(x) * slopes
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            if not np.isfinite(self._best_value):
                what = "its gradient is not finite" if np.isfinite(value) else f"the objective is {value}"
                raise FloatingPointError(f"{what} at the starting point; check parameters and data.")
            self.has_broken_down = True
            # far above any value so far and flat: the line search interpolates back towards the last good point
            return self._best_value + 1e3 * (1 + abs(self._best_value)), np.zeros_like(point)
        self._last_gradient = gradient
        if value < self._best_value:
            self._best_value, self._best_point, self._best = value, point.copy(), x
            if self.on_best is not None:
                self.on_best()
        return value, gradient


def _first_length(scale: Array, gradient: Array, last_step: tuple[Array, Array] | None) -> float:
    """Return the length of the first step along a gradient, by the last step before and what it did; at most one."""
    steepness = float(np.linalg.norm(scale * gradient))
    unknown = min(1.0, steepness / _TYPICAL)
    if last_step is None:
        return unknown
    s, y = last_step[0] / scale, last_step[1] * scale
    length = steepness * (s @ y) / max(y @ y, np.finfo(float).tiny)
    return length if 0 < length < 1 else unknown
