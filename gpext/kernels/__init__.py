"""Kernels evaluated faster than by gpytorch's lazy tensors, `keops` kernels never stored, and partial derivatives."""

from gpext.kernels import keops
from gpext.kernels.categorical import CategoricalKernel
from gpext.kernels.partial_derivatives import PartialDerivativeKernel
from gpext.kernels.squared_exponential import direct_covariance, squared_exponential

__all__ = ["CategoricalKernel", "PartialDerivativeKernel", "direct_covariance", "keops", "squared_exponential"]
