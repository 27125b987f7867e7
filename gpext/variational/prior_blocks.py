"""The prior at the inducing points and at data, block by block, from the model's `forward`.

gpytorch evaluates a slice of a lazy kernel matrix by way of an index computation that costs more than the kernel itself
at minibatch size. Where the covariance is one kernel at one set of inputs, the blocks are asked of the kernel directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.variational._variational_distribution import _VariationalDistribution
from linear_operator import to_dense
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpext.augmentations import Augmentation
from gpext.kernels import accurate
from gpext.kernels.direct import direct_blocks
from gpext.likelihoods import LatentLikelihood
from gpext.posteriors import forward_solve, squared_norms

Key = Sequence[Tensor | float]
Made = TypeVar("Made")


@dataclass(frozen=True)
class CrossBlocks:
    """The prior at N inputs and its covariance with M inducing values, in the autograd graph."""

    covariance: Tensor  # K_zx (..., M, N)
    variance: Tensor  # k_ii + jitter (..., N)
    mean: Tensor  # mu_i (..., N)


@dataclass(frozen=True)
class Whitened:
    """The prior at N inputs given the inducing values, at the current hyperparameters, outside the graph."""

    matrix: Tensor  # A = L^-1 K_zx (..., M, N)
    mean: Tensor  # mu_i (..., N)
    conditional_variance: Tensor  # k_ii - q_ii (..., N): what they leave of the prior variance

    def split(self, size: int) -> list[Whitened]:
        """Return the same for `size` inputs after another."""
        parts = (part.split(size, -1) for part in (self.matrix, self.mean, self.conditional_variance))
        return [Whitened(*each) for each in zip(*parts, strict=True)]


@dataclass(frozen=True)
class Prepared:
    """Batch quantities that do not depend on q(u); valid until the hyperparameters change.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import PoissonLikelihood
        >>> from gpext.variational.prior_blocks import Whitened
        >>> whitened = Whitened(torch.zeros(2, 5), torch.zeros(5), torch.ones(5))
        >>> [len(part.targets) for part in Prepared(whitened, torch.arange(5.0), None).split(3, PoissonLikelihood())]
        [3, 2]
    """

    whitened: Whitened
    targets: Tensor  # (..., N), or what the likelihood takes
    augmentation: Augmentation | None  # of these targets, if its sites are asked for

    def split(self, size: int, likelihood: LatentLikelihood) -> list[Prepared]:
        """Return the same for `size` data after another."""
        whitened = self.whitened.split(size)
        targets = self.targets.split(size, -1 - likelihood.target_dims(self.targets))
        if self.augmentation is None:
            return [Prepared(*each, None) for each in zip(whitened, targets, strict=True)]
        augmentations = self.augmentation.split(size, self.whitened.mean.size(-1))
        return [Prepared(*each) for each in zip(whitened, targets, augmentations, strict=True)]


@torch.no_grad()
def whiten(chol: Tensor, cross: CrossBlocks) -> Whitened:
    """Return A = L^-1 K_zx and what goes with it, L (..., M, M) of K_zz."""
    matrix = forward_solve(chol.to(cross.covariance.dtype), cross.covariance)
    return Whitened(matrix, cross.mean.detach(), cross.variance - squared_norms(matrix))


def known_rows(covariance: LinearOperator, size: int) -> tuple[Tensor, Tensor] | None:
    """Return the first `size` rows and the diagonal, if they can be asked of the kernel at once."""
    if not isinstance(covariance, LazyEvaluatedKernelTensor):
        return None
    return direct_blocks(covariance, covariance.x1[..., :size, :], covariance.x1)


def split_covariance(covariance: LinearOperator, size: int) -> tuple[Tensor, Tensor]:
    """Return the block of the first `size` rows and the remaining columns, and the rest of the diagonal."""
    if isinstance(covariance, LazyEvaluatedKernelTensor) and covariance.x1 is covariance.x2:
        first, rest = covariance.x1[..., :size, :], covariance.x1[..., size:, :]
        known = direct_blocks(covariance, first, rest)
        if known is not None:
            return known
        options = {"last_dim_is_batch": True} if covariance.last_dim_is_batch else {}
        covariance = accurate(covariance)
        cross = covariance.kernel.forward(first, rest, **options, **covariance.params)
        diagonal = covariance.kernel.forward(rest, rest, diag=True, **options, **covariance.params)
        if diagonal.shape[-1] == rest.size(-2) and diagonal.shape[:-1] == cross.shape[:-2]:
            return to_dense(cross), to_dense(diagonal)
    cross = covariance[..., :size, size:].to_dense()
    return cross, covariance[..., size:, size:].diagonal(dim1=-1, dim2=-2)


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


def hyperparameters(module: torch.nn.Module) -> list[Tensor]:
    """Return all parameters but those of a q(u): gpytorch's method of the same name, in a tenth of its time."""
    found: list[Tensor | None] = []
    parts: list[torch.nn.Module | None] = [module]
    while parts:
        part = parts.pop()
        if part is not None and not isinstance(part, _VariationalDistribution):
            found += part._parameters.values()
            parts += part._modules.values()
    return [parameter for parameter in found if parameter is not None]


class FactorCache(Generic[Made]):
    """Keeps a factor, or what else was made of tensors and numbers, as long as these stay the same.

    Keyed by value: parameters are also changed through `.data`, which leaves no trace in their version counters.

    Example:
        >>> import torch
        >>> cache, L = FactorCache(), torch.eye(2)
        >>> cache.put([L], L @ L)
        >>> cache.get([L]) is None
        False
    """

    def __init__(self) -> None:
        self._key: Key | None = None
        self._factor: Made | None = None

    def get(self, key: Key) -> Made | None:
        """Return what was made of tensors and numbers equal to these, or None."""
        if self._key is None or len(key) != len(self._key):
            return None
        same = all(_identical(a, b) for a, b in zip(key, self._key, strict=True))
        return self._factor if same else None

    def forget(self) -> None:
        """Keep nothing."""
        self._key = self._factor = None

    def put(self, key: Key, factor: Made) -> None:
        """Keep what was made of them."""
        self._key = [each.detach().clone() if isinstance(each, Tensor) else each for each in key]
        self._factor = factor


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Make tensors that autograd may use later, as what is kept must be; gradients are on or off as before."""
    wanted = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(wanted):
        yield


def _identical(a: Tensor | float, b: Tensor | float) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
