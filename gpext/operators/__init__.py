"""Matrices that are never stored, and solves that are unbiased estimates, as LinearOperators."""

from gpext.operators.keops_products import KeOpsUnavailableWarning
from gpext.operators.kept_preconditioner import KeptPreconditioner
from gpext.operators.kernel_operator import KernelOperator
from gpext.operators.preconditioned_sum import KeptOnce, PreconditionedSum, UnfinishedSolveWarning
from gpext.operators.unbiased_solve import UnbiasedSolveOperator, UnbiasedSolveWarning
from gpext.operators.unbiased_solver import UnbiasedSolver

__all__ = [
    "KeOpsUnavailableWarning",
    "KeptOnce",
    "KeptPreconditioner",
    "KernelOperator",
    "PreconditionedSum",
    "UnbiasedSolveOperator",
    "UnbiasedSolveWarning",
    "UnbiasedSolver",
    "UnfinishedSolveWarning",
]
