"""Matrices that are never stored, as LinearOperators."""

from gpext.operators.kernel_operator import KernelOperator

__all__ = ["KernelOperator"]
