"""The preconditioner of a kernel matrix with noise, K + D, by the options of a solver."""

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

    It is of another form than L L' + D only if the inputs of K are known and nothing requires L alone, as a given
    rank, a kept root and the trace of P^-1 dA do. A factor in single precision is not tried for K in float32, where it
    saves little.

    Args:
        K: the parts of K (n, n).
        noise: the diagonal of D (n,).
        solver: its rank, kept root, tolerance, `controlled` and generator.
    """
    # the random part continues to about a tenth of the tolerance
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
