"""gpytorch's stationary kernels as operators that store only the inputs; small matrices stay dense."""

from __future__ import annotations

import math
from typing import Any, get_args

import gpytorch
import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpext.checks import check_finite
from gpext.kernels.keops.combinations import Combined
from gpext.operators import KernelOperator
from gpext.operators.kernel_operator import Backend
from gpext.parallel import Ranks, check_ranks


class LazyKernel(Combined):
    """The base of kernels that are radial in features of their inputs, which a subclass defines.

    Args:
        backend: "auto" for gpytorch's own matrices up to `gpytorch.settings.max_cholesky_size`, and operators that
            choose beyond that; "tiles" or "keops", see :class:`gpext.operators.KernelOperator`, and "dense", gpytorch's
            matrices, whatever their size.
        *args, **kwargs: gpytorch's.

    Raises:
        ValueError: an unknown backend.
    """

    def __init__(self, *args: Any, backend: Backend = "auto", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if backend not in get_args(Backend):
            raise ValueError(f"expected a backend among {get_args(Backend)}; got {backend!r}.")
        self.backend = backend
        self.ranks = Ranks.alone()  # see `share_products`

    def _features(self, x: Tensor) -> Tensor:
        """Return the features that are compared, in units of the length scales (..., n, d)."""
        return x / self.lengthscale

    def _profile(self) -> tuple[str, tuple[Tensor, ...]]:
        """Return the profile's name and its own parameters (..., 1, 1)."""
        raise NotImplementedError

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor | LinearOperator:
        """Return the covariance of x1 (..., n, d) and x2 (..., m, d): lazily, unless the backend or `diag` excludes it.

        Raises:
            ValueError: lazy, and an input is not finite, on any of the ranks that share products.
        """
        small = max(x1.size(-2), x2.size(-2)) <= gpytorch.settings.max_cholesky_size.value()
        stored = self.backend == "dense" or (small and self.backend == "auto")
        if diag or stored or params.get("last_dim_is_batch", False):
            return super().forward(x1, x2, diag=diag, **params)
        profile, own = self._profile()
        square = _is_same(x1, x2)
        given = (x1,) if square else (x1, x2)

        def check() -> None:
            for x in given:
                check_finite("inputs", x)

        self.ranks.together(check)
        inputs = [self._features(x) for x in given]
        one = inputs[0].new_ones(1, 1)
        return KernelOperator(
            one, *inputs, *own, profiles=(profile,), square=square, backend=self.backend, ranks=self.ranks
        )


class RBFKernel(LazyKernel, gpytorch.kernels.RBFKernel):
    """gpytorch's RBFKernel, lazily.

    Example:
        >>> import torch
        >>> x = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0))
        >>> (RBFKernel()(x) @ torch.ones(2000, 1)).shape  # the matrix is never stored
        torch.Size([2000, 1])
    """

    def _profile(self) -> tuple[str, tuple[Tensor, ...]]:
        return "rbf", ()


class MaternKernel(LazyKernel, gpytorch.kernels.MaternKernel):
    """gpytorch's MaternKernel (nu 1/2, 3/2 or 5/2), lazily.

    Example:
        >>> import torch
        >>> x = torch.zeros(3, 2)
        >>> (MaternKernel(nu=1.5)(x) @ torch.ones(3, 1)).detach()
        tensor([[3.],
                [3.],
                [3.]])
    """

    def _profile(self) -> tuple[str, tuple[Tensor, ...]]:
        return f"matern{round(2 * self.nu)}2", ()


class RQKernel(LazyKernel, gpytorch.kernels.RQKernel):
    """gpytorch's RQKernel, lazily.

    Example:
        >>> import torch
        >>> (RQKernel()(torch.zeros(3, 2)) @ torch.ones(3, 1)).detach()
        tensor([[3.],
                [3.],
                [3.]])
    """

    def _profile(self) -> tuple[str, tuple[Tensor, ...]]:
        return "rq", (self.alpha.unsqueeze(-1),)


class PeriodicKernel(LazyKernel, gpytorch.kernels.PeriodicKernel):
    r"""gpytorch's PeriodicKernel, lazily: an RBF of points on circles.

    exp(-2 sum_k sin(pi D_k / p_k)^2 / l_k) = exp(-|u - v|^2 / 2),  u_k = (cos, sin)(2 pi x_k / p_k) / sqrt l_k

    Example:
        >>> import torch
        >>> kernel = PeriodicKernel()
        >>> kernel.period_length = 2.0
        >>> kernel(torch.zeros(1, 1), torch.tensor([[2.0]])).to_dense().detach()
        tensor([[1.]])
    """

    def _features(self, x: Tensor) -> Tensor:
        angle, size = 2 * math.pi * x / self.period_length, self.lengthscale.rsqrt()
        return torch.cat([angle.cos() * size, angle.sin() * size], -1)

    def _profile(self) -> tuple[str, tuple[Tensor, ...]]:
        return "rbf", ()


def share_products(module: torch.nn.Module, ranks: Ranks | None = None) -> None:
    """Let processes compute the products of all lazy kernels of a module together, a part of the tiles each.

    The module, its data and whatever is drawn at random have to be the same on all of them, and all call it at once:
    then solves, gradients, samplers and predictions run as they do in one process, and give the same on each. The
    first rank writes samplers' checkpoints for all.

    Args:
        module: with kernels of this package somewhere inside.
        ranks: the processes; by default torch.distributed's default group, if there is one.

    Raises:
        TypeError: `ranks` is not a `Ranks`.
        ValueError: there is no such kernel, or ranks have other kernels or backends.

    Example:
        >>> from gpext.kernels.keops import RBFKernel
        >>> from gpext.parallel import Ranks
        >>> share_products(RBFKernel(), Ranks())  # every rank of torch.distributed calls it
    """
    check_ranks(ranks)
    ranks = Ranks() if ranks is None else ranks
    kernels = {name: m for name, m in module.named_modules() if isinstance(m, LazyKernel)}

    def check() -> None:
        if not kernels:
            raise ValueError(f"expected kernels of gpext.kernels.keops in {type(module).__qualname__}; found none.")

    ranks.together(check)
    ranks.require_same("kernels", *(f"{name} ({type(k).__name__}, {k.backend})" for name, k in kernels.items()))
    for kernel in kernels.values():
        kernel.ranks = ranks


def sharing_ranks(module: torch.nn.Module) -> Ranks:
    """Return the ranks that share the products of a module's lazy kernels; a single rank if they are not shared.

    Example:
        >>> from gpext.kernels.keops import RBFKernel
        >>> sharing_ranks(RBFKernel()).size
        1
    """
    shared = (m.ranks for m in module.modules() if isinstance(m, LazyKernel) and m.ranks.size > 1)
    return next(shared, Ranks.alone())


def _is_same(x1: Tensor, x2: Tensor) -> bool:
    """Return whether two inputs are the same, and their derivatives may be taken together."""
    if x1 is x2:
        return True
    return not (x1.requires_grad or x2.requires_grad) and x1.shape == x2.shape and torch.equal(x1, x2)
