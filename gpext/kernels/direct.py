"""Covariances of the kernels that have closed-form derivatives here, without gpytorch's lazy tensors."""

from __future__ import annotations

import math

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpext.kernels.matern52 import matern52_of
from gpext.kernels.squared_exponential import Scaled, scale_inputs, squared_exponential_of


def direct_covariance(kernel: Kernel, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the covariance (N1, N2) and the variances at x2 (N2,), if the kernel is one that this module supports.

    That is gpytorch's RBFKernel or its MaternKernel of 5/2, alone or in a ScaleKernel, without batch shape, and with a
    lengthscale and an outputscale for which the arithmetic is accurate.

    Args:
        kernel: of gpytorch.
        x1: inputs (N1, d) as the kernel's `forward` takes them, of its active dimensions alone.
        x2: inputs (N2, d), likewise.

    Example:
        >>> import gpytorch, torch
        >>> x = torch.zeros(2, 1)
        >>> covariance, variances = direct_covariance(gpytorch.kernels.RBFKernel(), x, x)
        >>> covariance.shape, variances.shape
        (torch.Size([2, 2]), torch.Size([2]))
    """
    base, scale = kernel, None
    if type(kernel) is ScaleKernel:
        base, scale = kernel.base_kernel, kernel.outputscale
    is_matern = type(base) is MaternKernel and base.nu == 2.5
    if not (is_matern or type(base) is RBFKernel) or x1.dim() != 2 or x2.dim() != 2:
        return None
    scale = torch.ones((), dtype=x1.dtype, device=x1.device) if scale is None else scale
    lengthscale = base.lengthscale
    if scale.dim() or lengthscale.dim() != 2 or x1.dtype != lengthscale.dtype:
        return None
    scaled = scale_inputs(x1, x2, lengthscale / math.sqrt(5) if is_matern else lengthscale)
    if not _is_accurate(scaled, scale):
        return None
    covariance = matern52_of if is_matern else squared_exponential_of
    return covariance(x1, x2, lengthscale, scale, scaled), scale.expand(len(x2))


@torch.no_grad()
def _is_accurate(scaled: Scaled, outputscale: Tensor) -> bool:
    """Return whether distances computed from squares keep enough digits, and log s is finite."""
    limits = torch.finfo(outputscale.dtype)
    return bool((scaled.depth.amin() * limits.eps > -5e-5) & (outputscale > limits.tiny**0.5))


def dense_covariance(covariance: LinearOperator) -> Tensor:
    """Return the whole matrix.

    Example:
        >>> import gpytorch, torch
        >>> dense_covariance(gpytorch.kernels.RBFKernel()(torch.zeros(2, 1))).shape
        torch.Size([2, 2])
    """
    if isinstance(covariance, LazyEvaluatedKernelTensor):
        if covariance.x1 is covariance.x2 and not covariance.params:
            known = direct_covariance(covariance.kernel, covariance.x1, covariance.x2)
            if known is not None:
                return known[0].mT  # symmetric, and row-major like this
        covariance = covariance.evaluate_kernel()
    return covariance.to_dense()
