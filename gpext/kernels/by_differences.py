r"""Stationary kernels from differences of inputs, for lengthscales far shorter than the inputs' range.

    t^2 = sum_k ((x_ik - x_jk) / l_k)^2

gpytorch, and :mod:`gpext.kernels.squared_exponential` by one matrix product, take t^2 = |z_i|^2 + |x_j|^2 - 2 z_i'x_j,
z = x / l, which errs by eps |z|^2: where an evidence drives the lengthscale of a column of many equal values to zero,
data that agree in it, t = 0, get any distance, and the matrix is far from positive semidefinite. Differences err by
eps t |z|, and by nothing where t = 0, in d times the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, MaternKernel, ProductKernel, RBFKernel, ScaleKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import to_dense
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpext.operators.profiles import smooth_value

_DIGITS = 0.6  # of those of the dtype, that squared distances keep where they come from squares


class KernelByDifferences(Kernel):
    """The same covariance as a gpytorch kernel's, differentiable once.

    Args:
        kernel: of gpytorch. Any `RBFKernel` and `MaternKernel` in it, scaled, added and multiplied, takes differences;
            other terms are evaluated as they are. Its inputs are of its active dimensions alone.

    Example:
        >>> import gpytorch, torch
        >>> kernel = gpytorch.kernels.RBFKernel()
        >>> x = torch.tensor([[0.0], [1.0]])
        >>> torch.allclose(KernelByDifferences(kernel)(x).to_dense(), kernel(x).to_dense())
        True
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    @property
    def batch_shape(self) -> torch.Size:
        """That of the kernel."""
        return self.kernel.batch_shape

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """Return the covariances (..., N1, N2), or those of pairs (..., N)."""
        if diag:
            return to_dense(self.kernel.forward(x1, x2, diag=True, **params))  # by differences as it is
        return _evaluate(self.kernel, x1, x2)


def has_digits(depth: Tensor) -> bool:
    """Return whether t^2 from squares has digits enough, for half the squared lengths |z|^2 of scaled inputs."""
    return bool((depth < torch.finfo(depth.dtype).eps ** (_DIGITS - 1)).all())


def accurate(covariance: LinearOperator) -> LinearOperator:
    """Return a covariance as it is, or by differences where its distances have too few digits as they are.

    It is lazy, and of any shape. Only kernels that :class:`KernelByDifferences` knows are looked at.

    Example:
        >>> import gpytorch, torch
        >>> kernel = gpytorch.kernels.RBFKernel().double()
        >>> kernel.lengthscale = 1e-9
        >>> x = torch.tensor([[1.0], [1.0], [0.0]], dtype=torch.float64)
        >>> accurate(kernel(x)).to_dense()
        tensor([[1., 1., 0.],
                [1., 1., 0.],
                [0., 0., 1.]], dtype=torch.float64, grad_fn=<ExpBackward0>)
    """
    if not isinstance(covariance, LazyEvaluatedKernelTensor) or covariance.params or covariance.last_dim_is_batch:
        return covariance
    kernel, x1, x2 = covariance.kernel, covariance.x1, covariance.x2
    if all(_keeps_digits(*stationary) for stationary in _stationary(kernel, x1, x2)):
        return covariance
    return LazyEvaluatedKernelTensor(x1, x2, kernel=KernelByDifferences(kernel))


def _stationary(kernel: Kernel, x1: Tensor, x2: Tensor) -> Iterator[tuple[Kernel, Tensor, Tensor]]:
    """Yield the kernels of distances in a kernel, with the inputs of each."""
    if type(kernel) in (RBFKernel, MaternKernel):
        yield kernel, x1, x2
    elif type(kernel) is ScaleKernel:
        yield from _stationary(kernel.base_kernel, x1, x2)
    elif type(kernel) in (AdditiveKernel, ProductKernel):
        for term in kernel.kernels:
            yield from _stationary(term, *(_columns(term, x) for x in (x1, x2)))


@torch.no_grad()
def _keeps_digits(kernel: Kernel, x1: Tensor, x2: Tensor) -> bool:
    half = kernel.nu if isinstance(kernel, MaternKernel) else 0.5  # t^2 / 2 at a distance of one lengthscale
    return all(has_digits(half * each.square().sum(-1)) for each in _scaled(kernel, x1, x2))


def _evaluate(kernel: Kernel, x1: Tensor, x2: Tensor) -> Tensor:
    """Return the covariances (..., N1, N2) at inputs of the active dimensions."""
    if type(kernel) is ScaleKernel:
        return kernel.outputscale[..., None, None] * _evaluate(kernel.base_kernel, x1, x2)
    if type(kernel) in (AdditiveKernel, ProductKernel):
        terms = (_evaluate(term, *(_columns(term, x) for x in (x1, x2))) for term in kernel.kernels)
        return reduce(torch.add if type(kernel) is AdditiveKernel else torch.mul, terms)
    if type(kernel) not in (RBFKernel, MaternKernel):
        return to_dense(kernel.forward(x1, x2))
    near, far = _scaled(kernel, x1, x2)
    distance = torch.cdist(near, far, compute_mode="donot_use_mm_for_euclid_dist")
    profile = "rbf" if type(kernel) is RBFKernel else f"matern{round(2 * kernel.nu)}2"
    return smooth_value(profile, distance.square(), None)


def _scaled(kernel: Kernel, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    """Return both inputs in units of the lengthscale, from a centre by which derivatives in it have digits."""
    centre = x1.detach().mean(-2, keepdim=True)
    return (x1 - centre) / kernel.lengthscale, (x2 - centre) / kernel.lengthscale


def _columns(kernel: Kernel, x: Tensor) -> Tensor:
    """Return the active dimensions (..., N, d) of a term."""
    return x if kernel.active_dims is None else x.index_select(-1, kernel.active_dims)
