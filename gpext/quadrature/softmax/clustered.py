r"""Nodes that lie close together where one of several functions changes, whatever their widths are.

A trapezoidal sum needs steps short enough for the narrowest function over the range of the widest. In the
coordinate

    t(u) = sum_k asinh((u - c_k) / w_k)

equal steps h are steps h / t'(u) in u: about h w_k beside the centre c_k of a function that changes over w_k, and in
proportion to the distance from it elsewhere. So a sum takes about 2 h^-1 log(range / w_k) nodes for each function.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MOST_STEPS = 10  # of Newton's method; three or four are taken
_NEAR = 1e-7  # from the root in t, where the last step leaves what is rounding
_ROUNDING = 1e-14


def coordinate(u: Tensor, center: Tensor, width: Tensor) -> Tensor:
    """Return t (B, U) at u (B, U), from centers and widths (B, K)."""
    return torch.asinh(_scaled(u, center, width)).sum(1)


def place(t: Tensor, center: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Return u and du/dt (B, U) at t (B, U).

    Between two neighbours in a table of the places where any of the terms is a whole number, none changes by more than
    one: Newton's method starts there, and ends after a few steps.
    """
    most = math.ceil(float(t.abs().max()) / center.size(-1)) + 1 if t.numel() else 1  # of one of the terms, at the root
    terms = torch.arange(-most, most + 1, dtype=t.dtype, device=t.device)
    knots = (center.unsqueeze(-1) + width.unsqueeze(-1) * torch.sinh(terms)).flatten(1).sort(-1).values
    there = coordinate(knots, center, width)
    index = torch.searchsorted(there, t.contiguous()).clamp(1, knots.size(-1) - 1)
    low, high = knots.gather(-1, index - 1), knots.gather(-1, index)
    t_low, t_high = there.gather(-1, index - 1), there.gather(-1, index)
    u = low + (high - low) * ((t - t_low) / (t_high - t_low).clamp_min(_ROUNDING)).clamp(0, 1)
    for _ in range(_MOST_STEPS):
        total, slope = _with_slope(u, center, width)
        excess = total - t
        u = torch.minimum(torch.maximum(u - excess / slope, low), high)
        if bool((excess.abs() <= _NEAR).all()):
            break
    return u, 1 / _with_slope(u, center, width)[1]


def _with_slope(u: Tensor, center: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Return t and dt/du (B, U)."""
    scaled = _scaled(u, center, width)
    root = (1 + scaled.square()).sqrt()
    total = torch.log(scaled.abs() + root).copysign(scaled)  # asinh, whose digits near zero do not count here
    return total.sum(1), (1 / (root * width.unsqueeze(-1))).sum(1)


def _scaled(u: Tensor, center: Tensor, width: Tensor) -> Tensor:  # (B, K, U)
    return (u.unsqueeze(1) - center.unsqueeze(-1)) / width.unsqueeze(-1)
