"""The preconditioner of a kernel matrix with noise, K + D, as a solver has it made."""

from __future__ import annotations

from functools import partial

import torch
from linear_operator.operators import LinearOperator, SumLinearOperator
from torch import Tensor

from gpext.operators.kernel_operator import KernelOperator
from gpext.operators.unbiased_solver import UnbiasedSolver
from gpext.solvers import (
    LowRankPreconditioner,
    NeighbourPreconditioner,
    SinglePrecisionPreconditioner,
    automatic_preconditioner,
    partial_cholesky,
)

Preconditioner = LowRankPreconditioner | NeighbourPreconditioner | SinglePrecisionPreconditioner


def kernel_preconditioner(K: LinearOperator, noise: Tensor, solver: UnbiasedSolver) -> Preconditioner:
    """Return P near K + D.

    It is more than L L' + D only where the choice is free, as a given rank, a kept root and the trace of P^-1 dA want L
    alone, and where K says between which inputs it is. A factor in single precision saves little where products are in
    it, too.

    Args:
        K: (n, n).
        noise: the diagonal of D (n,).
        solver: its rank, what it keeps, what it is for, and its generator.
    """
    columns = partial(_columns, K)
    # The random part goes about that much further.
    accuracy = 1e-8 if solver.controlled else max(0.1 * solver.tolerance, 1e-8)
    points = _points(K)
    if solver.rank is None and solver.keep is None and not solver.controlled and points is not None:
        return automatic_preconditioner(
            columns,
            lambda rows, columns: K._get_indices(rows, columns),
            K.diagonal(),
            noise,
            points,
            block=partial(_block, K) if K.dtype == torch.float64 else None,
            tolerance=accuracy,
            generator=solver.generator,
        )

    def root() -> Tensor:
        return partial_cholesky(
            columns,
            K.diagonal(),
            rank=solver.rank,
            noise=float(noise.mean()),
            tolerance=accuracy,
            generator=solver.generator,
        )

    return LowRankPreconditioner.of(root() if solver.keep is None else solver.keep.root(noise, root), noise)


def _points(K: LinearOperator) -> Tensor | None:
    """Return inputs (n, d) whose distances K depends on, in units of its length scales; None if K does not say."""
    if isinstance(K, KernelOperator):
        return torch.cat([factor.x for factor in K.factors], -1)
    if not isinstance(K, SumLinearOperator):
        return None
    each = [_points(term) for term in K.linear_ops]
    known = [points for points in each if points is not None]
    return torch.cat(known, -1) if len(known) == len(each) else None


def _columns(K: LinearOperator, index: Tensor) -> Tensor:
    """Return columns (n, B) of K."""
    if isinstance(K, SumLinearOperator):
        return torch.stack([_columns(term, index) for term in K.linear_ops]).sum(0)
    return K.columns(index) if isinstance(K, KernelOperator) else K[:, index].to_dense()


def _block(K: LinearOperator, rows: slice, columns: slice, scale: Tensor) -> Tensor:
    """Return those entries of S K S, S = diag(scale), of a K that says between which inputs it is."""
    if isinstance(K, SumLinearOperator):
        return torch.stack([_block(term, rows, columns, scale) for term in K.linear_ops]).sum(0)
    assert isinstance(K, KernelOperator)
    return K.block(rows, columns, scale)
