"""Fingerprints of models and data, by which two processes or two runs are compared without sending them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from torch import Tensor

_STRETCH = 2**16


def fingerprint(tensors: Sequence[Tensor]) -> float:
    """Return a number that differs where tensors do, or stand in another order, beyond rounding; inf for NaN or inf.

    It is log S + s / S, with S the sum of magnitudes and s that of the numbers with weights that depend on their place:
    their scale, their signs and their order.

    Example:
        >>> import torch
        >>> fingerprint([torch.ones(2)]) == fingerprint([torch.ones(2)])
        True
        >>> fingerprint([torch.ones(2)]) == fingerprint([torch.zeros(2)])
        False
    """
    stretches = [part for t in tensors for part in t.detach().flatten().split(_STRETCH) if len(part)]
    if not stretches:
        return 0.0
    weights = torch.arange(max(map(len, stretches)), dtype=torch.float64, device=stretches[0].device).cos()
    signed = torch.stack([part.double() @ weights[: len(part)] for part in stretches])
    places = torch.arange(1, len(stretches) + 1, dtype=torch.float64, device=signed.device).cos()
    size = torch.stack([part.abs().sum(dtype=torch.float64) for part in stretches]).sum()
    found = float(size.log() + signed @ places / size)
    return found if math.isfinite(found) else 0.0 if float(size) == 0 else math.inf


def described(module: torch.nn.Module) -> list[str]:
    """Return what a module is without the values of its parameters: classes, tensors, and settings such as a nu.

    Example:
        >>> import torch
        >>> described(torch.nn.Linear(2, 1)) == described(torch.nn.Linear(2, 1))  # whatever their weights
        True
    """
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
    """Return its parameters and buffers, but for some, float64, bounds at infinity as zeros.

    Example:
        >>> import torch
        >>> [tuple(each.shape) for each in tensors_of(torch.nn.Linear(2, 1))]
        [(1, 2), (1,)]
    """
    left_out = {id(t) for t in but}
    kept = [t.detach().double() for t in (*module.parameters(), *module.buffers()) if id(t) not in left_out]
    return [torch.where(t.isinf(), 0.0, t) for t in kept]
