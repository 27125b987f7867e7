"""Kernels evaluated faster than by way of gpytorch's lazy tensors, and in `keops` kernels that are never stored."""

from gpext.kernels import keops
from gpext.kernels.squared_exponential import direct_covariance, squared_exponential

__all__ = ["direct_covariance", "keops", "squared_exponential"]
