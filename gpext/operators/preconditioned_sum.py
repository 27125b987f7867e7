"""K + D with accurate solves, for the predictions of a model whose covariance K is never stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from linear_operator.operators import DiagLinearOperator, LinearOperator, SumLinearOperator
from torch import Tensor

from gpext.callers import warn_caller
from gpext.operators.kernel_preconditioner import Preconditioner, kernel_preconditioner
from gpext.operators.matrix_parts import parts_of
from gpext.operators.unbiased_solver import UnbiasedSolver
from gpext.solvers import SolveStatus, conjugate_gradients

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}  # of residuals, relative to right-hand sides
_BLOCK = 2**23  # entries of right-hand sides that are solved for together


class UnfinishedSolveWarning(UserWarning):
    """Conjugate gradients ended before their tolerance: a prediction is less accurate than it should be.

    Example:
        >>> issubclass(UnfinishedSolveWarning, UserWarning)
        True
    """


class KeptOnce:
    """The preconditioner of one K + D, computed at its first use.

    Example:
        >>> KeptOnce() is not KeptOnce()  # each keeps the preconditioner of one matrix
        True
    """

    def __init__(self) -> None:
        self._made: Preconditioner | None = None

    def of(self, K: LinearOperator, noise: Tensor, tolerance: float) -> Preconditioner | None:
        """Return the preconditioner, or None if a noise is zero; its random choices are the same each time.

        Args:
            K: (n, n), the same at every call.
            noise: the diagonal of D (n,).
            tolerance: of the solves it is used for.
        """
        if self._made is None and bool((noise > 0).all()):
            generator = torch.Generator().manual_seed(0)
            solver = UnbiasedSolver(tolerance=tolerance, generator=generator)
            self._made = kernel_preconditioner(parts_of(K), noise, solver)
        return self._made


class PreconditionedSum(SumLinearOperator):
    """K + D, not a batch, solved to a residual of 1e-8 of the right-hand side, in float32 of 1e-4.

    linear_operator's own solves end at 1e-2 in predictions (`gpytorch.settings.eval_cg_tolerance`), which leaves a
    small variance without a correct digit. Warns where rounding allows no such residual.

    Args:
        *linear_ops: K and a diagonal D.
        kept: holds the preconditioner, as linear_operator creates a new operator for each solve.

    Example:
        >>> import torch
        >>> from linear_operator.operators import DiagLinearOperator, to_linear_operator
        >>> from gpext.operators import KeptOnce
        >>> K, D = to_linear_operator(torch.ones(3, 3).double()), DiagLinearOperator(torch.ones(3).double())
        >>> A = PreconditionedSum(K, D, kept=KeptOnce())
        >>> (A @ A.solve(torch.ones(3, 1).double())).mT.round(decimals=4)
        tensor([[1., 1., 1.]], dtype=torch.float64)
    """

    def __init__(self, *linear_ops: LinearOperator, kept: KeptOnce) -> None:
        super().__init__(*linear_ops, kept=kept)
        self._kept = kept

    def _solve_preconditioner(self) -> Callable[[Tensor], Tensor] | None:
        return None  # not linear_operator's, which would not be used

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int = 0) -> Tensor:
        if num_tridiag:  # for a log determinant, which no prediction needs
            return super()._solve(rhs, preconditioner, num_tridiag)
        K, D = self.linear_ops
        assert isinstance(D, DiagLinearOperator)
        tolerance = _TOLERANCE[rhs.dtype]
        P = self._kept.of(K, D.diagonal(), tolerance)
        columns = rhs.movedim(-2, 0).flatten(1)  # (n, batch of R)
        parts = []
        for part in columns.split(max(_BLOCK // len(columns), 1), -1):
            found = conjugate_gradients(self._matmul, part, precondition=P, tolerance=tolerance)
            if found.status is not SolveStatus.CONVERGED:
                warn_caller(
                    f"a solve of size {len(columns)} for a prediction ended at a residual of "
                    f"{float(found.residual_norm.max()):.1e} in place of {tolerance:.0e}: {found.status.value}.",
                    UnfinishedSolveWarning,
                )
            parts.append(found.solution)
        return torch.cat(parts, -1).view(rhs.size(-2), *rhs.shape[:-2], rhs.size(-1)).movedim(0, -2)
