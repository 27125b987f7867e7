"""Covariances of the kernels that have closed-form derivatives here, without gpytorch's lazy tensors."""

from __future__ import annotations

import math

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpext.kernels.by_differences import KernelByDifferences, accurate, has_digits
from gpext.kernels.matern52 import matern52_of
from gpext.kernels.squared_exponential import scale_inputs, squared_exponential_of


def direct_covariance(kernel: Kernel, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the covariance (..., N1, N2) and the variances at x2 (..., N2), of a kernel that this module supports.

    That is gpytorch's RBFKernel or its MaternKernel of 5/2, alone or in a ScaleKernel of the same batch shape or
    none, with outputscales whose logarithm is finite. None of any other. Where lengthscales are so short that the
    arithmetic is not accurate, :class:`KernelByDifferences` takes its place.

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
    batch = lengthscale.shape[:-2]
    if scale.shape not in ((), batch) or x1.dtype != lengthscale.dtype:
        return None
    covariance = matern52_of if is_matern else squared_exponential_of
    lengthscales, heights = lengthscale.reshape(-1, *lengthscale.shape[-2:]), scale.expand(batch).flatten()
    members = []
    for own, height in zip(lengthscales, heights, strict=True):
        if not height > torch.finfo(height.dtype).tiny ** 0.5:
            return None
        scaled = scale_inputs(x1, x2, own / math.sqrt(5) if is_matern else own)
        if not has_digits(-scaled.depth):
            together = KernelByDifferences(kernel).forward(x1, x2)
            return together, scale.expand(batch).unsqueeze(-1).expand(*batch, len(x2))
        members.append(covariance(x1, x2, own, height, scaled))
    if not batch:
        return members[0], scale.expand(len(x2))
    together = torch.stack([member.mT for member in members]).mT  # as each is laid out
    return together.unflatten(0, batch), scale.expand(batch).unsqueeze(-1).expand(*batch, len(x2))


def direct_blocks(covariance: LazyEvaluatedKernelTensor, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return :func:`direct_covariance` of the kernel of a square matrix, for any inputs, if that gives its entries."""
    if covariance.x1 is not covariance.x2 or covariance.params or covariance.last_dim_is_batch:
        return None
    return direct_covariance(covariance.kernel, x1, x2)


def dense_covariance(covariance: LinearOperator) -> Tensor:
    """Return the whole matrix.

    Example:
        >>> import gpytorch, torch
        >>> dense_covariance(gpytorch.kernels.RBFKernel()(torch.zeros(2, 1))).shape
        torch.Size([2, 2])
    """
    if isinstance(covariance, LazyEvaluatedKernelTensor):
        known = direct_blocks(covariance, covariance.x1, covariance.x2)
        if known is not None:
            return known[0].mT  # symmetric, and row-major like this
        covariance = accurate(covariance).evaluate_kernel()
    return covariance.to_dense()
