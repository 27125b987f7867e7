r"""log Gamma and its derivatives to full precision; torch's own trigamma, the second derivative, has nine digits.

psi_n(x) = d^{n+1} log Gamma(x) / dx^{n+1} = (-1)^{n+1} n! zeta(n + 1, x),   n >= 1
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_SERIES = 16.0  # from where Stirling's has full precision
_TAYLOR, _TERMS = 0.5, 15  # where and how far e^x is expanded


def log_gamma(x: Tensor) -> Tensor:
    """Return log Gamma(x) for x > 0, differentiable at will."""
    return _Polygamma.apply(x, -1)


def polygamma(order: int, x: Tensor) -> Tensor:
    """Return psi_order(x) for x > 0, differentiable at will; psi_0 is the digamma function."""
    return _Polygamma.apply(x, order)


class _Polygamma(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.order = order
        if order < 1:
            return x.lgamma() if order < 0 else x.digamma()
        zeta = torch.special.zeta(torch.full_like(x, order + 1), x)
        return (-1) ** (order + 1) * math.factorial(order) * zeta

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * _Polygamma.apply(x, ctx.order + 1), None


def stirling_remainder(z: Tensor) -> Tensor:
    """Return log Gamma(z + 1) - (z log z - z + log(2 pi z) / 2) for z > 0, from 16 on by its series."""
    is_small = z < _SERIES  # not by clamp, whose derivative at the bound itself is zero from torch 2.15 on
    large, small = torch.where(is_small, _SERIES, z), torch.where(is_small, z, _SERIES)
    square = large.square().reciprocal()
    series = (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680))) / large
    direct = torch.lgamma(small + 1) - (small * small.log() - small + 0.5 * (2 * math.pi * small).log())
    return torch.where(is_small, direct, series)


def stirling_remainder_slope(z: Tensor) -> Tensor:
    """Return the derivative of :func:`stirling_remainder`, psi(z + 1) - log z - 1 / (2 z), for z > 0."""
    is_small = z < _SERIES
    large, small = torch.where(is_small, _SERIES, z), torch.where(is_small, z, _SERIES)
    square = large.square().reciprocal()
    series = -square * (1 / 12 - square * (1 / 120 - square * (1 / 252 - square / 240)))
    return torch.where(is_small, polygamma(0, small + 1) - small.log() - 0.5 / small, series)


def log_poisson(y: Tensor, log_rate: Tensor) -> Tensor:
    """Return y f - e^f - log y! at f = log_rate for y >= 0, without differences of numbers as large as y [Loader 2000].

    With d = f - log y that is y (d - (e^d - 1)) - log(2 pi y) / 2 less the remainder of Stirling's formula for log y!.
    """
    positive = y > 0
    some = torch.where(positive, y, 1.0)
    d = log_rate - some.log()
    at_mode = -0.5 * (2 * math.pi * some).log() - stirling_remainder(some)
    return torch.where(positive, some * (d - torch.where(positive, d, 0.0).expm1()) + at_mode, -log_rate.exp())


def exp_remainder(x: Tensor) -> Tensor:
    """Return e^x - 1 - x, with all its digits for small x, differentiable twice."""
    near = x.abs() < _TAYLOR
    small, large = torch.where(near, x, 0.0), torch.where(near, 1.0, x)
    series = torch.ones_like(small)
    for k in range(_TERMS, 2, -1):
        series = 1 + small / k * series
    return torch.where(near, 0.5 * small.square() * series, large.expm1() - large)
