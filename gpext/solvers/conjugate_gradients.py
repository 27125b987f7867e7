r"""Solve A x = b for a symmetric positive definite A given by its products.

The residual of the recursion drifts away from b - A x by rounding. So convergence is accepted only if the true residual
confirms it; otherwise the iteration restarts from there, and ends when that no longer helps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.solvers.steps import Product, SolveStatus, cg_steps

_PATIENCE = 5  # restarts without halving the true residual


@dataclass(frozen=True)
class LinearSolve:
    """The result of a solve.

    Example:
        >>> import torch
        >>> from gpext.solvers import conjugate_gradients
        >>> solve = conjugate_gradients(lambda v: 2 * v, torch.ones(3, 1).double())
        >>> solve.num_steps, bool(solve.residual_norm.max() < 1e-8)
        (1, True)
    """

    solution: Tensor  # (..., n, R) or (n,)
    num_steps: int  # products with A, apart from those that check the residual
    residual_norm: Tensor  # |b - A x| / |b| (..., R), the true one
    status: SolveStatus


@torch.no_grad()
def conjugate_gradients(
    matvec: Product,
    b: Tensor,
    *,
    start: Tensor | None = None,
    precondition: Product | None = None,
    tolerance: float = 1e-8,
    max_steps: int | None = None,
    cheap_matvec: Product | None = None,
) -> LinearSolve:
    """Return x with A x = b.

    Args:
        matvec: v -> A v for (..., n, R); A symmetric positive definite.
        b: (n,) or (..., n, R).
        start: x0, of the shape of b; zero by default.
        precondition: r -> P^-1 r, P symmetric positive definite and near A.
        tolerance: converged where |b - A x| <= tolerance |b|, in every column.
        max_steps: maximum number of products; 10 n by default.
        cheap_matvec: less accurate products in place of `matvec` except where the residual is checked, for example in
            float32: each start then solves to a few digits, and the true residual corrects it (iterative refinement).

    Raises:
        TypeError: b is not of a floating type, or matvec is no function.
        ValueError: b or the start is not finite, their shapes do not match, or the tolerance or max_steps is
            negative.

    Example:
        >>> import torch
        >>> A = torch.tensor([[4.0, 1.0], [1.0, 3.0]]).double()
        >>> solve = conjugate_gradients(lambda v: A @ v, torch.tensor([[1.0], [2.0]]).double())
        >>> solve.status.name, solve.num_steps, (A @ solve.solution).squeeze()
        ('CONVERGED', 2, tensor([1., 2.], dtype=torch.float64))
    """
    if b.dim() == 1:
        column = None if start is None else start.unsqueeze(-1)
        found = conjugate_gradients(
            matvec,
            b.unsqueeze(-1),
            start=column,
            precondition=precondition,
            tolerance=tolerance,
            max_steps=max_steps,
            cheap_matvec=cheap_matvec,
        )
        return LinearSolve(found.solution.squeeze(-1), found.num_steps, found.residual_norm.squeeze(-1), found.status)
    x = torch.zeros_like(b) if start is None else start.clone()
    check_system(matvec, b, x, tolerance, max_steps)
    most = 10 * b.size(-2) if max_steps is None else max_steps
    size = b.norm(dim=-2)
    size = torch.where(size > 0, size, 1.0)
    r = b - matvec(x) if start is not None else b
    norm = r.norm(dim=-2) / size
    if not bool(norm.isfinite().all()):
        return LinearSolve(x, 0, norm, SolveStatus.NOT_FINITE)
    digits = torch.finfo(b.dtype).eps if cheap_matvec is None else torch.finfo(torch.float32).eps
    least_gain = max(10 * digits, 1e-6) if cheap_matvec is not None else 0.0  # of one start
    steps, without_gain = 0, 0
    while True:
        if bool((norm <= tolerance).all()):
            return LinearSolve(x, steps, norm, SolveStatus.CONVERGED)
        if steps >= most:
            return LinearSolve(x, steps, norm, SolveStatus.MAX_STEPS)
        if without_gain >= _PATIENCE:
            return LinearSolve(x, steps, norm, SolveStatus.STALLED)
        goal = torch.maximum(torch.full_like(norm, 0.9 * tolerance), least_gain * norm) * size
        moved, best, best_norm = x, x, norm
        for step in cg_steps(cheap_matvec or matvec, r, precondition):
            moved = moved + step.increment
            steps += 1
            left = step.residual.norm(dim=-2)
            if bool(((left <= goal) | step.is_broken | ~left.isfinite()).all()) or steps >= most:
                break
        true = b - matvec(moved)
        new = true.norm(dim=-2) / size
        better = new < norm
        best = torch.where(better.unsqueeze(-2), moved, best)
        r, best_norm = torch.where(better.unsqueeze(-2), true, r), torch.where(better, new, norm)
        if not bool(new.isfinite().all()):
            return LinearSolve(best, steps, best_norm, SolveStatus.NOT_FINITE)
        if bool((step.is_broken & ~(best_norm <= tolerance)).any()):
            return LinearSolve(best, steps, best_norm, SolveStatus.NOT_POSITIVE_DEFINITE)
        waiting = norm > tolerance
        without_gain = without_gain + 1 if not bool((best_norm[waiting] < 0.5 * norm[waiting]).any()) else 0
        x, norm = best, best_norm


def check_system(matvec: Product, b: Tensor, start: Tensor, tolerance: float, max_steps: int | None) -> None:
    """Raise unless right-hand sides and starts are floating, finite and of one shape, and options are valid."""
    if not callable(matvec):
        raise TypeError(
            f"matvec must be a function v -> A v; got {type(matvec).__name__}. That of a matrix is A.matmul."
        )
    if max_steps is not None and max_steps < 0:
        raise ValueError(f"max_steps must not be negative; got {max_steps}.")
    if not b.is_floating_point():
        raise TypeError(f"b must be of a floating type; got {b.dtype}.")
    if b.dim() < 2:
        raise ValueError(f"expected b of shape (..., n, R); got {tuple(b.shape)}. One column is b.unsqueeze(-1).")
    if start.shape != b.shape:
        raise ValueError(f"expected a start of the shape of b, {tuple(b.shape)}; got {tuple(start.shape)}.")
    if not tolerance >= 0:
        raise ValueError(f"tolerance must not be negative; got {tolerance}.")
    for name, values in (("b", b), ("the start", start)):
        if not bool(values.isfinite().all()):
            index = tuple((~values.isfinite()).nonzero()[0].tolist())
            raise ValueError(
                f"{name} must be finite; got {values[index].item()} at index {index}. Remove or correct such data."
            )
