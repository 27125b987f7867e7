"""Kernels with gpytorch's names whose matrices are never stored: O(n) memory, exact products and derivatives.

Sums and multiples of them may be gpytorch's. For products of sums or of other kernels take ScaleKernel, AdditiveKernel
and ProductKernel from here, too.
"""

from gpext.kernels.keops.combinations import AdditiveKernel, ProductKernel, ScaleKernel
from gpext.kernels.keops.kernels import (
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    RQKernel,
    share_products,
    sharing_ranks,
)

__all__ = [
    "AdditiveKernel",
    "MaternKernel",
    "PeriodicKernel",
    "ProductKernel",
    "RBFKernel",
    "RQKernel",
    "ScaleKernel",
    "share_products",
    "sharing_ranks",
]
