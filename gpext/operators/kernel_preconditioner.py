"""The preconditioner of a kernel matrix with noise, K + D, as a solver has it made."""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.operators.matrix_parts import MatrixParts
from gpext.operators.unbiased_solver import UnbiasedSolver
from gpext.solvers import (
    LowRankPreconditioner,
    NeighbourPreconditioner,
    SinglePrecisionPreconditioner,
    automatic_preconditioner,
    partial_cholesky,
)

Preconditioner = LowRankPreconditioner | NeighbourPreconditioner | SinglePrecisionPreconditioner


def kernel_preconditioner(K: MatrixParts, noise: Tensor, solver: UnbiasedSolver) -> Preconditioner:
    """Return P near K + D.

    It is more than L L' + D only where the choice is free, as a given rank, a kept root and the trace of P^-1 dA want L
    alone, and the inputs of K are known. A factor in single precision saves little where products are in
    it, too.

    Args:
        K: the parts of K (n, n).
        noise: the diagonal of D (n,).
        solver: its rank, what it keeps, what it is for, and its generator.
    """
    # The random part goes about that much further.
    accuracy = 1e-8 if solver.controlled else max(0.1 * solver.tolerance, 1e-8)
    points = K.points
    if solver.rank is None and solver.keep is None and not solver.controlled and points is not None:
        return automatic_preconditioner(
            K.columns,
            K.entries,
            K.diagonal(),
            noise,
            points,
            block=K.block if K.dtype == torch.float64 else None,
            tolerance=accuracy,
            generator=solver.generator,
        )

    def root() -> Tensor:
        return partial_cholesky(
            K.columns,
            K.diagonal(),
            rank=solver.rank,
            noise=float(noise.mean()),
            tolerance=accuracy,
            generator=solver.generator,
        )

    return LowRankPreconditioner.of(root() if solver.keep is None else solver.keep.root(noise, root), noise)
