"""Kernels evaluated faster than by gpytorch's lazy tensors, `keops` kernels never stored, and partial derivatives."""

from gpext.kernels import keops
from gpext.kernels.by_differences import accurate
from gpext.kernels.categorical import CategoricalKernel
from gpext.kernels.direct import dense_covariance, direct_covariance
from gpext.kernels.matern52 import matern52
from gpext.kernels.partial_derivatives import PartialDerivativeKernel
from gpext.kernels.sphere import sphere_points
from gpext.kernels.squared_exponential import squared_exponential

__all__ = [
    "CategoricalKernel",
    "PartialDerivativeKernel",
    "accurate",
    "dense_covariance",
    "direct_covariance",
    "keops",
    "matern52",
    "sphere_points",
    "squared_exponential",
]
