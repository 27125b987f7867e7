r"""A covariance whose solves are unbiased estimates, so that the log marginal likelihood has unbiased gradients.

    d(y' A^-1 y) = -s1' dA s2,     E s1 = E s2 = A^-1 y, truncated independently           [FE15 Eq. 9]
    d log|A|     = mean_i u_i' dA z_i,     z_i of random signs, E u_i = A^-1 z_i

One solve in both places, as linear_operator's `inv_quad` has it, is biased: E[s s'] is not E[s] E[s]'.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from linear_operator.operators import AddedDiagLinearOperator, LinearOperator
from torch import Tensor

from gpext.solvers import LowRankPreconditioner, SolveStatus, Survival, partial_cholesky, unbiased_cg


class UnbiasedSolveWarning(UserWarning):
    """A run of conjugate gradients ended before its random end: the estimate is not unbiased."""


@dataclass(frozen=True)
class UnbiasedSolver:
    """How to solve.

    Args:
        num_probes: vectors of random signs for log|A|.
        tolerance: relative size of the residual from which on the end is random.
        survival: its law; by default geometric, as fast as the residual falls (see :mod:`gpext.solvers.survival`).
        rank: of the preconditioner of K + D, chosen by what it saves if None; 0 for none.
        max_steps: most products with A in one solve; 10 n by default.
        generator: for probes and truncations, on the CPU.
    """

    num_probes: int = 4
    tolerance: float = 0.1
    survival: Survival | None = None
    rank: int | None = None
    max_steps: int | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.num_probes < 1:
            raise ValueError(f"num_probes must be at least 1; got {self.num_probes}.")


class UnbiasedSolveOperator(LinearOperator):
    """Any positive definite operator, with `solve`, `inv_quad` and `inv_quad_logdet` by unbiased estimates.

    Wrap outermost: sums and multiples of this one are linear_operator's own again.

    Args:
        base: A (n, n); where it is K + D, as a likelihood's `marginal` makes it, it is preconditioned.
        solver: how.

    Raises:
        ValueError: a batch of operators.
    """

    def __init__(self, base: LinearOperator, *, solver: UnbiasedSolver | None = None) -> None:
        solver = UnbiasedSolver() if solver is None else solver
        super().__init__(base, solver=solver)
        self.base, self.solver = base, solver

    def _check_args(self, base: LinearOperator, *, solver: UnbiasedSolver) -> str | None:
        return None if not base.batch_shape else f"expected one operator; got a batch {tuple(base.batch_shape)}."

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.base._matmul(rhs)

    def _size(self) -> torch.Size:
        return self.base.size()

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

    def _diagonal(self) -> Tensor:
        return self.base._diagonal()

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return self.base._getitem(row_index, col_index, *batch_indices)

    def _get_indices(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Tensor:
        return self.base._get_indices(row_index, col_index, *batch_indices)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        return self.base._bilinear_derivative(left_vecs, right_vecs)

    def to_dense(self) -> Tensor:
        """Return the matrix (n, n)."""
        return self.base.to_dense()

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        """Return an unbiased estimate of A^-1 right (n, R), or left A^-1 right, with unbiased derivatives.

        Args:
            right_tensor: (n,) or (n, R).
            left_tensor: (O, n).
        """
        columns = right_tensor.unsqueeze(-1) if right_tensor.dim() == 1 else right_tensor
        left = torch.eye(self.size(-1), dtype=columns.dtype, device=columns.device)
        left = left if left_tensor is None else left_tensor
        (right_solve,) = self._estimates(columns, 1)
        value = left @ right_solve
        if value.requires_grad or columns.requires_grad or left.requires_grad or self.base.requires_grad:
            (left_solve,) = self._estimates(left.mT, 1)
            by_operator = -left_solve.mT @ self.base.matmul(right_solve)
            moved = by_operator + left_solve.mT @ columns + left @ right_solve
            value = value + moved - moved.detach()
        return value.squeeze(-1) if right_tensor.dim() == 1 else value

    def inv_quad(self, inv_quad_rhs: Tensor, reduce_inv_quad: bool = True) -> Tensor:
        """Return an unbiased estimate of b' A^-1 b, with unbiased derivatives."""
        return self.inv_quad_logdet(inv_quad_rhs, reduce_inv_quad=reduce_inv_quad)[0]

    def inv_quad_logdet(
        self, inv_quad_rhs: Tensor | None = None, logdet: bool = False, reduce_inv_quad: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return estimates of b' A^-1 b and of log|A| with unbiased derivatives.

        The value of the first is unbiased, too. That of the second is no estimate: log|P| of the preconditioner, below
        log|A|; without one the logarithms of the diagonal, whose sum is above.

        Args:
            inv_quad_rhs: b (n,) or (n, R), or None.
            logdet: whether the second is asked for; else it is zero.
            reduce_inv_quad: whether to sum over columns.
        """
        b = torch.zeros(self.size(-1), 0, dtype=self.dtype, device=self.device)
        if inv_quad_rhs is not None:
            b = inv_quad_rhs.unsqueeze(-1) if inv_quad_rhs.dim() == 1 else inv_quad_rhs
        probes = self._probes() if logdet else b[:, :0]
        first, second = self._estimates(torch.cat([b.detach(), probes], -1), 2)
        size = b.size(-1)
        s1, s2, u = first[:, :size], second[:, :size], first[:, size:]
        surrogate = (torch.cat([-s1, u], -1) * self.base.matmul(torch.cat([s2, probes], -1))).sum(-2)
        quadratic = surrogate[:size] + (2 * s1 * b).sum(-2)
        quadratic = (s1 * b).sum(-2).detach() + quadratic - quadratic.detach()
        log_det = self._rough_log_det() if logdet else b.new_zeros(())
        if logdet:
            trace = surrogate[size:].mean()
            log_det = log_det + trace - trace.detach()
        return quadratic.sum(-1) if reduce_inv_quad or inv_quad_rhs is None else quadratic, log_det

    @torch.no_grad()
    def _estimates(self, b: Tensor, number: int) -> Tensor:
        """Return independent estimates of A^-1 b (E, n, R)."""
        solver = self.solver
        found = unbiased_cg(
            self.base._matmul,
            b,
            num_estimates=number,
            precondition=self._preconditioner,
            tolerance=solver.tolerance,
            survival=solver.survival,
            max_steps=solver.max_steps,
            generator=solver.generator,
        )
        if found.status is not SolveStatus.CONVERGED:
            warnings.warn(
                f"a solve of size {len(b)} ended after {found.num_steps} steps: {found.status.value}. Its estimate is "
                "not unbiased: raise max_steps or the noise, or lower the condition number.",
                UnbiasedSolveWarning,
                stacklevel=4,
            )
        return found.estimates

    def _probes(self) -> Tensor:
        signs = torch.randint(2, (self.size(-1), self.solver.num_probes), generator=self.solver.generator)
        return (2 * signs - 1).to(self.dtype).to(self.device)

    @cached_property
    @torch.no_grad()
    def _preconditioner(self) -> LowRankPreconditioner | None:
        """P near A = K + D, if A says that it is such a sum."""
        if not isinstance(self.base, AddedDiagLinearOperator) or self.solver.rank == 0:
            return None
        K, noise = self.base._linear_op.evaluate_kernel(), self.base._diag_tensor._diagonal()
        root = partial_cholesky(
            lambda index: K[:, index].to_dense(),
            K.diagonal(),
            rank=self.solver.rank,
            noise=float(noise.mean()),
            generator=self.solver.generator,
        )
        return LowRankPreconditioner.of(root, noise)

    @torch.no_grad()
    def _rough_log_det(self) -> Tensor:
        if self._preconditioner is not None:
            return self._preconditioner.log_det
        return self.diagonal().log().sum()
