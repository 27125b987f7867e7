"""One number by which tensors can be told from others, without sending them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_STRETCH = 2**16


def mark(tensors: Sequence[Tensor]) -> float:
    """Return a number that differs where tensors do, or stand in another order, beyond rounding; inf for NaN or inf.

    It is log S + s / S, with S the sum of magnitudes and s that of the numbers with weights that depend on their place:
    their scale, their signs and their order.
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
