"""Kernels with gpytorch's names whose matrices are never stored: O(n) memory, exact products and derivatives."""

from gpext.kernels.keops.kernels import (
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    share_products,
    sharing_ranks,
)

__all__ = [
    "MaternKernel",
    "PeriodicKernel",
    "ProductKernel",
    "RBFKernel",
    "RQKernel",
    "share_products",
    "sharing_ranks",
]
