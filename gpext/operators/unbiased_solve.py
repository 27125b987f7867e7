r"""A covariance whose solves are unbiased estimates, so that the log marginal likelihood has unbiased gradients.

    d(y' A^-1 y) = -s1' dA s2,     E s1 = E s2 = A^-1 y, truncated independently           [FE15 Eq. 9]
    d log|A|     = mean_i u_i' dA z_i,     z_i of random signs, E u_i = A^-1 z_i

With a preconditioner P = L L' + D near A, of rank k, k more columns in one product give most of the second:

    d log|A| = tr(P^-1 dA) + mean_i (u_i - P^-1 z_i)' dA z_i,     P^-1 = D^-1 - W W'          [cf. Wenger et al. 2022]

One solve in both places, as in linear_operator's `inv_quad`, is biased: E[s s'] is not E[s] E[s]'.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from linear_operator import to_linear_operator
from linear_operator.operators import LinearOperator
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpext.callers import warn_caller
from gpext.linalg.added_diagonal import split_diagonal
from gpext.operators.kernel_preconditioner import Preconditioner, kernel_preconditioner
from gpext.operators.matrix_parts import parts_of
from gpext.operators.unbiased_solver import UnbiasedSolver
from gpext.solvers import (
    LinearSolve,
    LowRankPreconditioner,
    SolveStatus,
    conjugate_gradients,
    lanczos_log_det,
    trace_probes,
    unbiased_cg,
)


class UnbiasedSolveWarning(UserWarning):
    """A run of conjugate gradients ended before its random end: the estimate is not unbiased.

    Example:
        >>> issubclass(UnbiasedSolveWarning, UserWarning)
        True
    """


class UnbiasedSolveOperator(LinearOperator):
    """Any positive definite operator, with `solve`, `inv_quad` and `inv_quad_logdet` by unbiased estimates.

    Apply this wrapper last: sums and multiples of it are linear_operator's own operators again.

    Args:
        base: A (..., n, n), an operator or a tensor; a sum K + D, as a likelihood's `marginal` returns it, is
            preconditioned unless it is a batch.
        solver: options of the solves.

    Raises:
        ValueError: the operator is not square.

    Example:
        >>> import torch
        >>> from gpext.operators import UnbiasedSolver
        >>> A = torch.diag(torch.tensor([1.0, 2.0, 4.0]).double())
        >>> operator = UnbiasedSolveOperator(A, solver=UnbiasedSolver(generator=torch.Generator().manual_seed(0)))
        >>> operator.solve(torch.ones(3, 1).double()).shape
        torch.Size([3, 1])
    """

    def __init__(self, base: LinearOperator | Tensor, *, solver: UnbiasedSolver | None = None) -> None:
        solver = UnbiasedSolver() if solver is None else solver
        base = to_linear_operator(base)
        if base.dim() < 2 or base.size(-2) != base.size(-1):
            raise ValueError(f"expected a square operator (..., n, n); got {tuple(base.shape)}.")
        super().__init__(base, solver=solver)
        self.base, self.solver = base, solver

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.base._matmul(rhs)

    def _size(self) -> torch.Size:
        return self.base.size()

    def _transpose_nonbatch(self) -> LinearOperator:
        return UnbiasedSolveOperator(self.base.mT, solver=self.solver)

    def _diagonal(self) -> Tensor:
        return self.base._diagonal()

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return self.base._getitem(row_index, col_index, *batch_indices)

    def _get_indices(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Tensor:
        return self.base._get_indices(row_index, col_index, *batch_indices)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        return self.base._bilinear_derivative(left_vecs, right_vecs)

    def to_dense(self) -> Tensor:
        """Return the matrix (..., n, n)."""
        return self.base.to_dense()

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        return UnbiasedSolveOperator(self.base.expand(*batch_shape, *self.matrix_shape), solver=self.solver)

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        """Return an unbiased estimate of A^-1 right (..., n, R), or left A^-1 right, with unbiased derivatives.

        Args:
            right_tensor: (n,) or (..., n, R).
            left_tensor: (..., O, n).
        """
        columns = right_tensor.unsqueeze(-1) if right_tensor.dim() == 1 else right_tensor
        value = _Solve.apply(self, columns, *self.representation())
        value = value if left_tensor is None else left_tensor @ value
        return value.squeeze(-1) if right_tensor.dim() == 1 else value

    def inv_quad(self, inv_quad_rhs: Tensor, reduce_inv_quad: bool = True) -> Tensor:
        """Return an unbiased estimate of b' A^-1 b, with unbiased derivatives."""
        return self.inv_quad_logdet(inv_quad_rhs, reduce_inv_quad=reduce_inv_quad)[0]

    def inv_quad_logdet(
        self, inv_quad_rhs: Tensor | None = None, logdet: bool = False, reduce_inv_quad: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return estimates of b' A^-1 b and of log|A| with unbiased derivatives.

        The value of the first is unbiased, too. That of the second depends on the solver's `log_det`.

        Args:
            inv_quad_rhs: b (n,) or (..., n, R), or None.
            logdet: whether the second is computed; otherwise it is zero.
            reduce_inv_quad: whether to sum over columns.
        """
        b = torch.zeros(*self.shape[:-1], 0, dtype=self.dtype, device=self.device)
        if inv_quad_rhs is not None:
            b = inv_quad_rhs.unsqueeze(-1) if inv_quad_rhs.dim() == 1 else inv_quad_rhs
        has_derivatives = torch.is_grad_enabled() and any(t.requires_grad for t in self.representation())
        probes = self._probes() if logdet and has_derivatives else b.new_empty(self.size(-1), 0)
        probes = probes.expand(*b.shape[:-1], -1)
        first, second = self._estimates(torch.cat([b.detach(), probes], -1), 2, share_columns=True)
        size = b.size(-1)
        s1, s2, u = first[..., :size], second[..., :size], first[..., size:]
        W = b[..., :0].detach()
        P = self._control if logdet and has_derivatives else None
        if P is not None:
            u, W = u - P(probes), P.inverse_root  # u_i - P^-1 z_i, and W of P^-1 = D^-1 - W W'
        quadratic = (2 * s1 * b).sum(-2)
        log_det = self._log_det() if logdet else b.new_zeros(self.batch_shape)
        if has_derivatives:
            left, right = torch.cat([-s1, u, W], -1), torch.cat([s2, probes, W], -1)
            slopes = _Slopes.apply(self.base, left, right, *self.base.representation())
            surrogate, by_probe, by_root = slopes.split([size, probes.size(-1), W.size(-1)], -1)
            quadratic = quadratic + surrogate
            if logdet:
                trace = by_probe.mean(-1)
                if P is not None:
                    trace = trace + (self.base._diagonal() / P.noise).sum() - by_root.sum(-1)
                log_det = log_det + trace - trace.detach()
        quadratic = (s1 * b).sum(-2).detach() + quadratic - quadratic.detach()
        return quadratic.sum(-1) if reduce_inv_quad or inv_quad_rhs is None else quadratic, log_det

    @torch.no_grad()
    def solve_to(self, b: Tensor, tolerance: float) -> LinearSolve:
        """Return A^-1 b by conjugate gradients, to residuals of this size relative to b (n,) or (n, R)."""
        return conjugate_gradients(
            self.base._matmul,
            b,
            precondition=self.preconditioner,
            tolerance=tolerance,
            max_steps=self.solver.max_steps,
        )

    @torch.no_grad()
    def lanczos_log_det(self) -> tuple[Tensor, Tensor]:
        """Return an estimate of log|A| (...) by stochastic Lanczos quadrature, and its standard error over probes.

        In units of that, its error has Student's law: see :func:`gpext.solvers.lanczos_log_det`.
        """
        P, solver = self.preconditioner, self.solver
        estimate, error = lanczos_log_det(
            self.base._matmul if P is None else P.whitened(self.base._matmul),
            self.size(-1),
            num_probes=solver.lanczos_probes,
            num_steps=solver.lanczos_steps,
            like=self._like,
            batch_shape=self.batch_shape,
            generator=solver.generator,
        )
        return (estimate if P is None else estimate + P.log_det), error

    @torch.no_grad()
    def _estimates(self, b: Tensor, number: int, *, share_columns: bool) -> Tensor:
        """Return independent estimates of A^-1 b (E, ..., n, R)."""
        solver = self.solver
        b = b.expand(*torch.broadcast_shapes(self.batch_shape, b.shape[:-2]), *b.shape[-2:])
        found = unbiased_cg(
            self.base._matmul,
            b,
            num_estimates=number,
            precondition=self.preconditioner,
            tolerance=solver.tolerance,
            survival=solver.survival,
            share_columns=share_columns,
            max_steps=solver.max_steps,
            generator=solver.generator,
        )
        if solver.keep is not None:
            solver.keep.note(found.first_steps)
        if found.status is not SolveStatus.CONVERGED:
            warn_caller(
                f"a solve of size {b.size(-2)} ended after {found.num_steps} steps, and its estimate is not unbiased: "
                f"{found.status.value}.",
                UnbiasedSolveWarning,
            )
        return found.estimates

    def _probes(self) -> Tensor:
        solver = self.solver
        return trace_probes(self.size(-1), solver.num_probes, like=self._like, generator=solver.generator)

    @property
    def _like(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device)

    @property
    def _control(self) -> LowRankPreconditioner | None:
        """P, if it is to reduce the noise of the derivatives of log|A|."""
        if not self.solver.controlled:
            return None
        P = self.preconditioner
        if not isinstance(P, LowRankPreconditioner):
            raise ValueError(
                "controlled derivatives of log|A| need a preconditioner: expected a covariance with noise added to it, "
                "not a batch of them, and a rank other than 0. Or set controlled=False."
            )
        return P

    @cached_property
    @torch.no_grad()
    def preconditioner(self) -> Preconditioner | None:
        """P near A = K + D, if A is kept as such a sum and is not a batch."""
        both = split_diagonal(self.base)
        if both is None or self.batch_shape or self.solver.rank == 0:
            return None
        K, D = both
        return kernel_preconditioner(parts_of(K.evaluate_kernel()), D.diagonal(), self.solver)

    @torch.no_grad()
    def _log_det(self) -> Tensor:
        if self.solver.log_det == "lanczos":
            return self.lanczos_log_det()[0]
        if self.preconditioner is not None:
            return self.preconditioner.log_det
        return self._diagonal().log().sum(-1)


class _Slopes(torch.autograd.Function):
    """Zero for each pair of columns, with the derivatives of u' A v, whose value costs a product and is not needed."""

    @staticmethod
    def forward(ctx: Any, base: LinearOperator, left: Tensor, right: Tensor, *tensors: Tensor) -> Tensor:
        """Return zeros (..., R) for u and v (..., n, R); the tensors are those of A."""
        ctx.base = base
        ctx.save_for_backward(left, right)
        return left.new_zeros(*left.shape[:-2], left.size(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """Return nothing for the operator and the vectors, g u' dA v for each tensor."""
        left, right = ctx.saved_tensors
        return None, None, None, *ctx.base._bilinear_derivative(left * cotangent.unsqueeze(-2), right)


class _Solve(torch.autograd.Function):
    """An estimate of A^-1 b whose derivatives are unbiased: dA enters between two independent estimates."""

    @staticmethod
    def forward(ctx: Any, operator: UnbiasedSolveOperator, b: Tensor, *tensors: Tensor) -> Tensor:
        """Return the estimate (..., n, R); the tensors are those of A."""
        (solution,) = operator._estimates(b, 1, share_columns=False)
        ctx.operator, ctx.shape = operator, b.shape
        ctx.save_for_backward(solution)
        return solution

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """Return nothing for the operator, A^-1 g for b, and -(A^-1 g)' dA (A^-1 b), dA symmetric, for each tensor."""
        (solution,) = ctx.saved_tensors
        (left,) = ctx.operator._estimates(cotangent, 1, share_columns=False)
        by_b = left.sum_to_size(ctx.shape)
        if not any(ctx.needs_input_grad[2:]):
            return None, by_b, *(None for _ in ctx.needs_input_grad[2:])
        both = torch.cat([left, solution], -1), torch.cat([solution, left], -1)
        return None, by_b, *ctx.operator._bilinear_derivative(-0.5 * both[0], both[1])
