"""What a model is, in words, without the values of its parameters: to tell whether two processes have the same."""

from __future__ import annotations

from collections.abc import Collection

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from torch import Tensor


def described(module: torch.nn.Module) -> list[str]:
    """Return its classes, what its tensors are, and what kernels and likelihoods were told beside, such as a nu."""
    classes = sorted({type(part).__qualname__ for part in module.modules()})
    tensors = [
        f"{name} {tuple(t.shape)} {t.dtype}" + (" with gradients" if t.requires_grad else "")
        for name, t in (*module.named_parameters(), *module.named_buffers())
    ]
    settings = [
        f"{name}.{key} = {value}"
        for name, part in module.named_modules()
        if isinstance(part, Kernel | Likelihood)
        for key, value in vars(part).items()
        if isinstance(value, bool | int | float | str) and not key.startswith("_") and key != "training"
    ]
    return [*classes, *tensors, *settings]


def tensors_of(module: torch.nn.Module, but: Collection[Tensor] = ()) -> list[Tensor]:
    """Return its parameters and buffers, but for some, float64, bounds at infinity as zeros."""
    left_out = {id(t) for t in but}
    kept = [t.detach().double() for t in (*module.parameters(), *module.buffers()) if id(t) not in left_out]
    return [torch.where(t.isinf(), 0.0, t) for t in kept]
