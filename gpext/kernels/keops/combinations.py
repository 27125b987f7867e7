"""gpytorch's sums, multiples and products of kernels, whose products are exact and, where possible, lazy.

gpytorch's own ProductKernel stores matrices whose rows and columns have different inputs, and multiplies sums of
matrices that are not stored by way of roots of a limited rank, an approximation. Here

    (A + B) * C = A * C + B * C

elementwise, and a product of kernel operators is a kernel operator, computed tile by tile; other products are stored.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import gpytorch
from linear_operator import to_linear_operator
from linear_operator.operators import ConstantMulLinearOperator, LinearOperator, SumLinearOperator
from torch import Tensor

from gpext.kernels.keops.prediction import LazyPrediction
from gpext.operators import KernelOperator


class Combined(gpytorch.kernels.Kernel):
    """A kernel whose sums and products are those of this file, and whose predictions have accurate solves."""

    def prediction_strategy(self, *args: Any, **kwargs: Any) -> LazyPrediction:
        """Return the prediction strategy of an ExactGP; called by gpytorch."""
        return LazyPrediction(*args, **kwargs)

    def __add__(self, other: gpytorch.kernels.Kernel) -> gpytorch.kernels.Kernel:
        return AdditiveKernel(*_parts(gpytorch.kernels.AdditiveKernel, self, other))

    def __mul__(self, other: gpytorch.kernels.Kernel) -> gpytorch.kernels.Kernel:
        return ProductKernel(*_parts(gpytorch.kernels.ProductKernel, self, other))


class ScaleKernel(Combined, gpytorch.kernels.ScaleKernel):
    """gpytorch's ScaleKernel, which can be a factor of a lazy product.

    Example:
        >>> import torch
        >>> from gpext.kernels.keops import RBFKernel
        >>> kernel = ScaleKernel(RBFKernel())
        >>> kernel.outputscale = 2.0
        >>> (kernel(torch.zeros(3, 2)) @ torch.ones(3, 1)).detach()
        tensor([[6.],
                [6.],
                [6.]])
    """


class AdditiveKernel(Combined, gpytorch.kernels.AdditiveKernel):
    """gpytorch's AdditiveKernel, which can be a factor of a lazy product.

    Example:
        >>> import torch
        >>> from gpext.kernels.keops import MaternKernel, RBFKernel
        >>> (AdditiveKernel(RBFKernel(), MaternKernel())(torch.zeros(3, 2)) @ torch.ones(3, 1)).detach()
        tensor([[6.],
                [6.],
                [6.]])
    """


class ProductKernel(Combined, gpytorch.kernels.ProductKernel):
    """gpytorch's ProductKernel, whose factors are multiplied tile by tile where all of them are lazy.

    Example:
        >>> import torch
        >>> from gpext.kernels.keops import MaternKernel, RBFKernel
        >>> kernel = ProductKernel(RBFKernel(active_dims=(0,)), MaternKernel(active_dims=(1,)))
        >>> (kernel(torch.zeros(3, 2)) @ torch.ones(3, 1)).detach()
        tensor([[3.],
                [3.],
                [3.]])
    """

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor | LinearOperator:
        """Return the covariance of x1 (..., n, d) and x2 (..., m, d)."""
        if diag:
            return super().forward(x1, x2, diag=True, **params)
        factors = [to_linear_operator(kernel(x1, x2, **params)).evaluate_kernel() for kernel in self.kernels]
        return functools.reduce(_elementwise, factors)


def _parts(kind: type[gpytorch.kernels.Kernel], *kernels: gpytorch.kernels.Kernel) -> list[gpytorch.kernels.Kernel]:
    """Return the kernels, with sums or products of this kind among them split into their parts."""
    return [part for k in kernels for part in (k.kernels if isinstance(k, kind) else [k])]


def _elementwise(left: LinearOperator, right: LinearOperator) -> LinearOperator:
    """Return the product of two matrices (..., n, m) entry by entry."""
    for one, other in ((left, right), (right, left)):
        if isinstance(one, SumLinearOperator):
            return functools.reduce(operator.add, [_elementwise(term, other) for term in one.linear_ops])
        if isinstance(one, ConstantMulLinearOperator):
            return _elementwise(one.base_linear_op, other).mul(one.expanded_constant)
    if isinstance(left, KernelOperator) and isinstance(right, KernelOperator):
        return left * right
    return to_linear_operator(left.to_dense() * right.to_dense())
