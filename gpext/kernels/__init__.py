"""Kernels evaluated faster than by way of gpytorch's lazy tensors."""

from gpext.kernels.squared_exponential import direct_covariance, squared_exponential

__all__ = ["direct_covariance", "squared_exponential"]
