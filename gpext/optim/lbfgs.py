"""SciPy's L-BFGS over the parameters of torch modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

_LARGEST_METRIC = 300  # parameters up to which an inverse Hessian is handed on as a matrix


class Outcome(Enum):
    """How a minimisation ended."""

    CONVERGED = "converged"
    MAX_STEPS = "stopped at max_steps"
    STALLED = "the line search found no better point"
    STOPPED = "stopped by the callback"


@dataclass(frozen=True)
class Minimisation:
    """The outcome, and the approximate inverse Hessian at the end (p, p), None if unknown or too large."""

    outcome: Outcome
    inverse_hessian: np.ndarray | None


def minimize_lbfgs(
    objective: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    max_steps: int,
    tolerance: float,
    callback: Callable[[float], bool | None] | None = None,
    inverse_hessian: np.ndarray | None = None,
    memory: int = 20,
) -> Minimisation:
    """Minimise a differentiable objective in place; the parameters end at the best point seen.

    Args:
        objective: takes no argument, returns a scalar and leaves its derivatives in the parameters' `.grad`, which are
            dropped before. `torch.linalg.LinAlgError` marks a point the line search must step back from.
        parameters: what is optimised.
        max_steps: most iterations.
        tolerance: converged when three successive iterations improve the objective by less than this each.
        callback: called after each iteration with the value there; returns True to stop.
        inverse_hessian: (p, p), from a similar problem: its quasi-Newton step is the first one tried.
        memory: number of curvature pairs kept.

    Raises:
        torch.linalg.LinAlgError, FloatingPointError: the objective cannot be evaluated at the starting point.
    """
    start = _flatten(parameters)
    if not start.size:
        return Minimisation(Outcome.CONVERGED, None)
    best_value, best_point = np.inf, start
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
            if not np.isfinite(best_value):
                raise FloatingPointError(f"the objective is {value} at the starting point; check parameters and data.")
            # far above anything seen and flat: the line search interpolates back towards the last good point
            return best_value + 1e3 * (1 + abs(best_value)), np.zeros_like(point)
        if value < best_value:
            best_value, best_point = value, point.copy()
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        return value, _flatten(gradient)

    # In the coordinates z, point = start + root z, the inverse Hessian is a multiple of the identity, and SciPy's first
    # trial, a step of length one, is the quasi-Newton step.
    root = None
    if inverse_hessian is not None:
        root = np.linalg.cholesky(inverse_hessian)
        slope = np.linalg.norm(root.T @ evaluate(start)[1])
        root = root * slope if slope > 0 else None

    def in_metric(z: np.ndarray) -> tuple[float, np.ndarray]:
        assert root is not None
        value, gradient = evaluate(start + root @ z)
        return value, root.T @ gradient

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
            evaluate if root is None else in_metric,
            start if root is None else np.zeros_like(start),
            jac=True,
            method="L-BFGS-B",
            callback=after_iteration,
            options={"maxiter": max_steps, "maxcor": memory, "ftol": 0.0, "gtol": 1e-9, "maxls": 10},
        )
    finally:  # an interrupt, too, leaves the best point behind
        _unflatten(best_point, parameters)
    if outcome is None and result.nit >= max_steps:
        outcome = Outcome.MAX_STEPS
    elif outcome is None:
        outcome = Outcome.CONVERGED if result.success else Outcome.STALLED
    return Minimisation(outcome, _inverse_hessian(result, root))


def _inverse_hessian(result: scipy.optimize.OptimizeResult, root: np.ndarray | None) -> np.ndarray | None:
    """Return SciPy's estimate in the original coordinates, or None if it has none that is positive definite."""
    if result.x.size > _LARGEST_METRIC or result.hess_inv.n_corrs == 0:
        return None
    estimate = result.hess_inv.todense()
    estimate = estimate if root is None else root @ estimate @ root.T
    estimate = 0.5 * (estimate + estimate.T)
    return estimate if np.linalg.eigvalsh(estimate)[0] > 1e-12 * np.trace(estimate) else None


def _flatten(tensors: Sequence[Tensor]) -> np.ndarray:
    if not tensors:
        return np.empty(0)
    return np.concatenate([t.detach().double().cpu().numpy().ravel() for t in tensors])


@torch.no_grad()
def _unflatten(point: np.ndarray, parameters: Sequence[Tensor]) -> None:
    start = 0
    for parameter in parameters:
        chunk = point[start : start + parameter.numel()]
        parameter.copy_(torch.from_numpy(chunk.copy()).view(parameter.shape))
        start += parameter.numel()
