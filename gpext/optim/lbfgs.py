"""SciPy's L-BFGS over the parameters of torch modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
import scipy.optimize
import torch
from torch import Tensor


class Outcome(Enum):
    """How a minimisation ended."""

    CONVERGED = "converged"
    MAX_STEPS = "stopped at max_steps"
    STALLED = "the line search found no better point"
    STOPPED = "stopped by the callback"


def minimize_lbfgs(
    objective: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    max_steps: int,
    tolerance: float,
    callback: Callable[[float], bool | None] | None = None,
    memory: int = 20,
) -> Outcome:
    """Minimise a differentiable objective in place; the parameters end at the best point seen.

    Args:
        objective: takes no argument, returns a scalar and leaves its derivatives in the parameters' `.grad`, which are
            zeroed before. `torch.linalg.LinAlgError` marks a point the line search must step back from.
        parameters: what is optimised.
        max_steps: most iterations.
        tolerance: converged when three successive iterations improve the objective by less than this each.
        callback: called after each iteration with the value there; returns True to stop.
        memory: number of curvature pairs kept.

    Raises:
        torch.linalg.LinAlgError: the objective cannot be evaluated at the starting point.
    """
    best_value, best_point = np.inf, _flatten(parameters)
    values: list[float] = []
    outcome: Outcome | None = None

    def evaluate(point: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal best_value, best_point
        _unflatten(point, parameters)
        for parameter in parameters:
            parameter.grad = None
        try:
            value = float(objective())
        except torch.linalg.LinAlgError:
            if not np.isfinite(best_value):
                raise
            value = np.nan
        if not np.isfinite(value):
            # far above anything seen and flat: the line search interpolates back towards the last good point
            return best_value + 1e3 * (1 + abs(best_value)), np.zeros_like(point)
        if value < best_value:
            best_value, best_point = value, point.copy()
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        return value, _flatten(gradient)

    def after_iteration(intermediate_result: scipy.optimize.OptimizeResult) -> None:
        nonlocal outcome
        values.append(float(intermediate_result.fun))
        if callback is not None and callback(values[-1]):
            outcome = Outcome.STOPPED
            raise StopIteration
        if len(values) > 3 and max(-np.diff(values[-4:])) < tolerance:
            outcome = Outcome.CONVERGED
            raise StopIteration

    try:
        result = scipy.optimize.minimize(
            evaluate,
            best_point,
            jac=True,
            method="L-BFGS-B",
            callback=after_iteration,
            options={"maxiter": max_steps, "maxcor": memory, "ftol": 0.0, "gtol": 1e-9, "maxls": 20},
        )
    finally:  # an interrupt, too, leaves the best point behind
        _unflatten(best_point, parameters)
    if outcome is not None:
        return outcome
    if result.nit >= max_steps:
        return Outcome.MAX_STEPS
    return Outcome.CONVERGED if result.success else Outcome.STALLED


def _flatten(tensors: Sequence[Tensor]) -> np.ndarray:
    return np.concatenate([t.detach().double().cpu().numpy().ravel() for t in tensors])


@torch.no_grad()
def _unflatten(point: np.ndarray, parameters: Sequence[Tensor]) -> None:
    start = 0
    for parameter in parameters:
        chunk = point[start : start + parameter.numel()]
        parameter.copy_(torch.from_numpy(chunk.copy()).view(parameter.shape))
        start += parameter.numel()
