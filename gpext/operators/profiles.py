r"""Stationary kernels as functions of a squared distance: their values and slopes, tile by tile.

    K = p(t),   t = c q,   q = |x - y|^2 in units of the length scales

    rbf        c = -1/2         p = e^t
    matern12   c = 1            p = e^{-r},                       r = sqrt t
    matern32   c = 3            p = (1 + r) e^{-r}
    matern52   c = 5            p = (1 + r + r^2 / 3) e^{-r}
    rq         c = 1            p = (1 + t / (2 alpha))^{-alpha}

The factor c belongs to the profile so that one product of matrices gives t. `slope` is dp/dt: finite wherever it meets
a difference of inputs that is not zero. Some processors are slow at e^t or at roots; where a first measurement finds
another way much quicker, that is taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

FACTORS = {"rbf": -0.5, "matern12": 1.0, "matern32": 3.0, "matern52": 5.0, "rq": 1.0}
_LOG2E = 1 / math.log(2)


def scale(profile: str, like: Tensor) -> float:
    """Return c as `value` and `value_and_slopes` want their t: of rbf in units of log 2 where 2^t is quicker."""
    return FACTORS[profile] * (_LOG2E if profile == "rbf" and _by_exp2(like) else 1.0)


def value(profile: str, t: Tensor, alpha: Tensor | None, spare: Tensor) -> Tensor:
    """Return p(t), overwriting t, which rounding may have put beyond zero.

    Args:
        profile: a key of `FACTORS`.
        t: any shape, `scale` times a squared distance.
        alpha: of rq, one number.
        spare: of the same shape, for numbers on the way.
    """
    if profile == "rbf":
        return t.exp2_() if _by_exp2(t) else t.exp_()
    if alpha is not None:
        return _exp(t.clamp_min_(0).div_(2 * alpha).log1p_(), -alpha, out=t)
    r = _root_(t, spare)
    if profile == "matern12":
        return _exp(r, -1.0, out=r)
    fall = _exp(r, -1.0, out=spare)
    if profile == "matern32":
        return torch.addcmul(fall, r, fall, out=r)
    return torch.addcmul(r, r, r, value=1 / 3, out=r).add_(1).mul_(fall)


def value_and_slopes(profile: str, t: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return p, dp / d(c q) with the c of `FACTORS` and, for rq, dp/dalpha; t, as for `value`, is overwritten."""
    if profile == "rbf":
        p = t.exp2_() if _by_exp2(t) else t.exp_()
        return p, p, None
    if alpha is not None:
        ratio = t.clamp_min_(0).div_(2 * alpha)
        log = ratio.log1p()
        p = _exp(log, -alpha, out=torch.empty_like(log))
        share = 1 / (1 + ratio)
        return p, -0.5 * p * share, p * (ratio * share - log)
    if profile == "matern12":  # its slope is infinite at r = 0, where it meets a difference of zero
        r = t.clamp_min_(0).sqrt_()
        fall = _exp(r, -1.0, out=torch.empty_like(r))
        return fall, torch.where(r > 0, -0.5 * fall / r, 0.0), None
    fall = torch.empty_like(t)
    r = _root_(t, fall)
    fall = _exp(r, -1.0, out=fall)
    if profile == "matern32":
        return torch.addcmul(fall, r, fall), fall.mul_(-0.5), None
    slope = torch.addcmul(fall, r, fall)
    return torch.addcmul(slope, r.square_(), fall, value=1 / 3), slope.div_(-6), None


def _exp(t: Tensor, factor: float | Tensor, out: Tensor) -> Tensor:
    """Return e^(factor t), in `out`."""
    if _by_exp2(t):
        return torch.mul(t, _LOG2E * factor, out=out).exp2_()
    return torch.mul(t, factor, out=out).exp_()


def _root_(t: Tensor, spare: Tensor) -> Tensor:
    """Return sqrt t, overwriting t; of what is not positive a number next to zero."""
    if t.device.type == "cpu" and _is_quicker(torch.rsqrt, torch.sqrt, t.dtype):
        t.clamp_min_(torch.finfo(t.dtype).tiny)
        return t.mul_(torch.rsqrt(t, out=spare))
    return t.clamp_min_(0).sqrt_()


def _by_exp2(t: Tensor) -> bool:
    return t.device.type == "cpu" and _is_quicker(torch.exp2, torch.exp, t.dtype)


@cache
def _is_quicker(one: Callable[..., Tensor], other: Callable[..., Tensor], dtype: torch.dtype) -> bool:
    """Whether one function is much quicker than another: torch's exp and sqrt may be MKL's, slow on AMD's."""
    t = torch.linspace(1, 3, 2**14, dtype=dtype)
    out = torch.empty_like(t)

    def seconds(function: Callable[..., Tensor]) -> float:
        start = time.perf_counter()
        function(t, out=out)
        return time.perf_counter() - start

    return min(seconds(one) for _ in range(10)) < 0.7 * min(seconds(other) for _ in range(10))


def smooth_value(profile: str, q: Tensor, alpha: Tensor | None) -> Tensor:
    """Return p of the squared distance q, left alone, differentiable by autograd also at q = 0."""
    t = FACTORS[profile] * q
    if profile == "rbf":
        return t.exp()
    if alpha is not None:
        return torch.exp(-alpha * torch.log1p(t / (2 * alpha)))
    apart = t > 0
    r = torch.where(apart, t, 1.0).sqrt()
    value = torch.exp(-r)
    if profile != "matern12":
        value = value * (1 + r if profile == "matern32" else 1 + r + r * r / 3)
    return torch.where(apart, value, 1.0)
