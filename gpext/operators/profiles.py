r"""Stationary kernels as functions of a squared distance: their values and slopes, tile by tile.

    K = p(t),   t = c q,   q = |x - y|^2 in units of the length scales

    rbf        c = -1/2         p = e^t
    matern12   c = 1            p = e^{-r},                       r = sqrt t
    matern32   c = 3            p = (1 + r) e^{-r}
    matern52   c = 5            p = (1 + r + r^2 / 3) e^{-r}
    rq         c = 1            p = (1 + t / (2 alpha))^{-alpha}

The factor c belongs to the profile so that one product of matrices gives t. `slope` is dp/dt: finite wherever it
multiplies a difference of inputs that is not zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

FACTORS = {"rbf": -0.5, "matern12": 1.0, "matern32": 3.0, "matern52": 5.0, "rq": 1.0}


def value(profile: str, t: Tensor, alpha: Tensor | None, spare: Tensor) -> Tensor:
    """Return p(t), overwriting t, which rounding may have moved past zero.

    Args:
        profile: a key of `FACTORS`.
        t: any shape.
        alpha: of rq, one number.
        spare: a buffer of the same shape.
    """
    if profile == "rbf":
        return t.exp_()
    if alpha is not None:
        return t.clamp_min_(0).div_(2 * alpha).log1p_().mul_(-alpha).exp_()
    r = t.clamp_min_(0).sqrt_()
    if profile == "matern12":
        return r.neg_().exp_()
    fall = torch.neg(r, out=spare).exp_()
    if profile == "matern32":
        return torch.addcmul(fall, r, fall, out=r)
    return torch.addcmul(r, r, r, value=1 / 3, out=r).add_(1).mul_(fall)


def value_and_slopes(profile: str, t: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return p, dp/dt and, for rq, dp/dalpha; t, as for `value`, is overwritten."""
    if profile == "rbf":
        p = t.exp_()
        return p, p, None
    if alpha is not None:
        ratio = t.clamp_min_(0).div_(2 * alpha)
        log = ratio.log1p()
        p = torch.exp(-alpha * log)
        share = 1 / (1 + ratio)
        return p, -0.5 * p * share, p * (ratio * share - log)
    r = t.clamp_min_(0).sqrt_()
    fall = torch.exp(-r)
    if profile == "matern12":  # its slope is infinite at r = 0, where it multiplies a difference of zero
        return fall, torch.where(r > 0, -0.5 * fall / r, 0.0), None
    if profile == "matern32":
        return torch.addcmul(fall, r, fall), fall.mul_(-0.5), None
    slope = torch.addcmul(fall, r, fall)
    return torch.addcmul(slope, r.square_(), fall, value=1 / 3), slope.div_(-6), None


def smooth_value(profile: str, q: Tensor, alpha: Tensor | None) -> Tensor:
    """Return p of the squared distance q, without overwriting it; differentiable by autograd also at q = 0."""
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
