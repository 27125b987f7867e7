"""The prior at the inducing points and at data, block by block, as the model's `forward` says.

gpytorch evaluates a slice of a lazy kernel matrix by way of an index computation that costs more than the kernel itself
at minibatch size. Where the covariance is one kernel at one set of inputs, the blocks are asked of the kernel directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import to_dense
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpext.kernels import direct_covariance


@dataclass(frozen=True)
class CrossBlocks:
    """The prior at N inputs and its covariance with M inducing values, in the autograd graph."""

    covariance: Tensor  # K_zx (..., M, N)
    variance: Tensor  # k_ii + jitter (..., N)
    mean: Tensor  # mu_i (..., N)


def split_covariance(covariance: LinearOperator, size: int) -> tuple[Tensor, Tensor]:
    """Return the block of the first `size` rows and the remaining columns, and the rest of the diagonal."""
    if isinstance(covariance, LazyEvaluatedKernelTensor) and covariance.x1 is covariance.x2:
        first, rest = covariance.x1[..., :size, :], covariance.x1[..., size:, :]
        known = None if covariance.params else direct_covariance(covariance.kernel, first, rest)
        if known is not None:
            return known
        options = {"last_dim_is_batch": True} if covariance.last_dim_is_batch else {}
        cross = covariance.kernel.forward(first, rest, **options, **covariance.params)
        diagonal = covariance.kernel.forward(rest, rest, diag=True, **options, **covariance.params)
        if diagonal.shape[-1] == rest.size(-2) and diagonal.shape[:-1] == cross.shape[:-2]:
            return to_dense(cross), to_dense(diagonal)
    cross = covariance[..., :size, size:].to_dense()
    return cross, covariance[..., size:, size:].diagonal(dim1=-1, dim2=-2)


def dense_covariance(covariance: LinearOperator) -> Tensor:
    """Return the whole matrix."""
    if isinstance(covariance, LazyEvaluatedKernelTensor):
        if covariance.x1 is covariance.x2 and not covariance.params:
            known = direct_covariance(covariance.kernel, covariance.x1, covariance.x2)
            if known is not None:
                return known[0]
        covariance = covariance.evaluate_kernel()
    return covariance.to_dense()


def is_changed_together(prior: Callable[[Tensor], MultivariateNormal], first: Tensor, second: Tensor) -> bool:
    """Return whether the prior at either set of inputs (..., n, d) changes where the two come together."""
    together = prior(torch.cat([first, second], dim=-2))
    tolerance = math.sqrt(torch.finfo(second.dtype).eps)
    size = first.size(-2)
    for alone, offset in ((prior(first), 0), (prior(second), size)):
        few = min(size, alone.event_shape[-1])
        own, same = slice(few), slice(offset, offset + few)
        mean, covariance = alone.mean[..., own], alone.lazy_covariance_matrix[..., own, own].to_dense()
        by_mean = mean - together.mean[..., same]
        by_covariance = covariance - together.lazy_covariance_matrix[..., same, same].to_dense()
        for change, value in ((by_mean, mean), (by_covariance, covariance)):
            if bool((change.abs() > tolerance * (1 + value.abs().max())).any()):
                return True
    return False


class FactorCache:
    """Keeps a factor as long as the numbers it was made from stay the same.

    Keyed by value: parameters are also changed through `.data`, which leaves no trace in their version counters.
    """

    def __init__(self) -> None:
        self._key: list[Tensor] | None = None
        self._factor: Tensor | None = None

    def get(self, key: list[Tensor]) -> Tensor | None:
        """Return the factor made from tensors equal to these, or None."""
        if self._key is None or len(key) != len(self._key):
            return None
        same = all(_identical(a, b) for a, b in zip(key, self._key, strict=True))
        return self._factor if same else None

    def put(self, key: list[Tensor], factor: Tensor) -> None:
        """Keep a factor."""
        self._key, self._factor = [tensor.detach().clone() for tensor in key], factor


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Make tensors that autograd may use later, as what is kept must be; gradients are on or off as before."""
    wanted = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(wanted):
        yield


def _identical(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
