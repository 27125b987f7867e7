"""Matrices that are never stored, and solves that are unbiased estimates, as LinearOperators."""

from gpext.operators.kernel_operator import KernelOperator
from gpext.operators.unbiased_solve import UnbiasedSolveOperator, UnbiasedSolver, UnbiasedSolveWarning

__all__ = ["KernelOperator", "UnbiasedSolveOperator", "UnbiasedSolveWarning", "UnbiasedSolver"]
