r"""Nodes that lie close together where one of several functions changes, whatever their widths are.

A trapezoidal sum wants steps that the narrowest of the functions can bear, over the range of the widest. In the
coordinate

    t(u) = sum_k asinh((u - c_k) / w_k)

equal steps h are steps h / t'(u) in u: about h w_k beside the centre c_k of a function that changes over w_k, and in
proportion to the distance from it elsewhere. So a sum takes about 2 h^-1 log(range / w_k) nodes for each function.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_STEPS = 100  # of Newton's method in a bracket; ten or so are taken
_ROUNDING = 1e-14


def coordinate(u: Tensor, center: Tensor, width: Tensor) -> Tensor:
    """Return t (B, U) at u (B, U), from centers and widths (B, K)."""
    return torch.asinh(_scaled(u, center, width)).sum(1)


def place(t: Tensor, center: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Return u and du/dt (B, U) at t (B, U).

    At the root one of the terms is at most t / K and one at least, so that it lies between the places where the first
    and the last of them would be just that.
    """
    ends = center + width * torch.sinh(t.mT.unsqueeze(-1) / center.size(-1))  # (U, B, K)
    low, high = ends.amin(-1).mT, ends.amax(-1).mT
    u = 0.5 * (low + high)
    for _ in range(_MOST_STEPS):
        scaled = _scaled(u, center, width)
        slope = ((1 + scaled.square()).rsqrt() / width.unsqueeze(-1)).sum(1)
        excess = torch.asinh(scaled).sum(1) - t
        low, high = torch.where(excess < 0, u, low), torch.where(excess > 0, u, high)
        newton = u - excess / slope
        u, last = torch.where((newton > low) & (newton < high), newton, 0.5 * (low + high)), u
        if bool(((u - last).abs() <= _ROUNDING * (1 / slope + u.abs())).all()):
            break
    return u, 1 / slope


def _scaled(u: Tensor, center: Tensor, width: Tensor) -> Tensor:  # (B, K, U)
    return (u.unsqueeze(1) - center.unsqueeze(-1)) / width.unsqueeze(-1)
