r"""Tilted moments in closed form: a probit, and every power of Gaussian and Laplace noise [R&W Sec. 3.9; JVV11 Eq. 15].

The probit and Laplace noise rest on a standard normal variable t that is known to exceed a. With x = t - a and Mills'
ratio

    M(a) = int_0^inf exp(-a x - x^2 / 2) dx = sqrt(pi / 2) erfcx(a / sqrt 2)

the raw moments of t follow from the hazard h(a) = 1 / M(a), and lose their digits far out; those of x are products of

    r_k = E[x^k] / E[x^{k-1}] = k / (a + r_{k+1}),

Laplace's continued fraction, all of whose terms are positive there.

Probit: p^ of N(f | m, v) Phi(f) is f = m + (v t + sqrt(v) e) / sqrt(1 + v) with e ~ N(0, 1), a = -m / sqrt(1 + v).

Laplace: let z be the distance of f from y in units of sqrt(v), d = |y - m| / sqrt(v) and c = eta sqrt(v) / b. Then
N(f | m, v) exp(-eta |y - f| / b) is exp(-d^2 / 2 - (c +- d) z - z^2 / 2): beyond y, and on the side of m, a truncated
normal each, with weights M(c + d) and M(c - d).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpext.quadrature.tilted import TiltedMoments
from gpext.special import hazard, log_mills_ratio

_FAR = 3.0  # a from which on the continued fraction is used; before it the hazard has digits enough
_DEPTH = 48  # of the continued fraction, for rounding at _FAR
_NEAR = -40.0  # a below which the truncation is beyond rounding


def probit_tilted_moments(sign: Tensor, mean: Tensor, variance: Tensor) -> TiltedMoments:
    """Return the moments of N(f | mean, variance) Phi(sign f), to about 1e-11 of their scale.

    Args:
        sign: 1 or -1 (...).
        mean: m (...).
        variance: v (...), positive.

    Example:
        >>> import torch
        >>> moments = probit_tilted_moments(torch.ones(1).double(), torch.zeros(1).double(), torch.ones(1).double())
        >>> moments.log_normalizer.exp()  # P(f + e > 0)
        tensor([0.5000], dtype=torch.float64)
    """
    total = 1 + variance
    slope, width = variance / total.sqrt(), variance / total  # f = m + sign slope t + sqrt(width) e
    threshold = -sign * mean / total.sqrt()
    log_z = torch.special.log_ndtr(-threshold)
    with torch.no_grad():
        excess, second, third, fourth = _beyond(threshold)
        spread = slope.square() * second
        return TiltedMoments(
            log_z,
            sign * (variance * excess - threshold) / total.sqrt(),
            width + spread,
            sign * slope**3 * third,
            slope**4 * fourth + 6 * spread * width + 3 * width.square(),
        )


def gaussian_tilted_moments(offset: Tensor, variance: Tensor, noise: Tensor, power: float) -> TiltedMoments:
    """Return the moments of N(x | 0, v) N(d | x, noise)^power: those of f - m.

    Args:
        offset: d = y - m (...).
        variance: v (...), not negative.
        noise: its variance, broadcastable; it may underflow to zero or overflow.
        power: eta, in (0, 1].

    Example:
        >>> import torch
        >>> one = torch.ones(1).double()
        >>> gaussian_tilted_moments(one, one, one, 1.0).variance
        tensor([0.5000], dtype=torch.float64)
    """
    total = noise + power * variance
    log_z = -0.5 * (power * offset.square() / total + total.log() + power * math.log(2 * math.pi))
    log_z = log_z + 0.5 * torch.xlogy(1 - power, noise)
    left = 1 / (1 + power * variance / noise)
    v = variance * left
    return TiltedMoments(log_z, (1 - left) * offset, v, torch.zeros_like(v), 3 * v.square())


def laplace_tilted_moments(offset: Tensor, variance: Tensor, noise: Tensor, power: float) -> TiltedMoments:
    """Return the moments of N(x | 0, v) Laplace(d - x | b)^power: those of f - m, to about 1e-11 of their scale.

    First derivatives of the log normaliser in `offset`, `variance` and `noise`.

    Args:
        offset: d = y - m (...).
        variance: v (...), positive.
        noise: b^2, the squared scale, broadcastable.
        power: eta, in (0, 1].

    Example:
        >>> import torch
        >>> one = torch.ones(1).double()
        >>> laplace_tilted_moments(0 * one, one, one, 1.0).mean.abs() < 1e-10
        tensor([True])
    """
    offset, variance, noise = torch.broadcast_tensors(offset, variance, noise)
    with torch.no_grad():
        found, distance = _laplace(offset, variance, noise, power)
        by_offset = -found.mean / variance
        by_variance = 0.5 * ((found.variance + found.mean.square()) / variance - 1) / variance
        by_noise = 0.5 * power * (distance / noise.sqrt() - 1) / noise
    log_z = found.log_normalizer  # differentiated by hand: torch's derivative of erfcx cancels far out
    for argument, slope in ((offset, by_offset), (variance, by_variance), (noise, by_noise)):
        log_z = log_z + slope * (argument - argument.detach())
    return TiltedMoments(log_z, found.mean, found.variance, found.third, found.fourth)


def laplace_sides(d: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log weight of the side of m, exp(-d^2 / 2) M(c - d) / sqrt(2 pi), and that of the other beside it.

    Args:
        d: |y - m| / sqrt(v) (...).
        rate: c = eta sqrt(v) / b (...).
    """
    a, b = rate + d, rate - d
    odds = log_mills_ratio(a) - log_mills_ratio(b)  # not positive
    log_near = torch.where(
        b < 0, rate * (0.5 * rate - d) + torch.special.log_ndtr(-b), log_mills_ratio(b.clamp(min=0)) - 0.5 * d.square()
    )
    return log_near, odds


def _laplace(offset: Tensor, variance: Tensor, noise: Tensor, power: float) -> tuple[TiltedMoments, Tensor]:
    """Return the moments of x, and E|x - d|."""
    scale, rate = variance.sqrt(), power * (variance / noise).sqrt()
    side = torch.where(offset < 0, -1.0, 1.0).to(offset)  # of y, seen from m
    d = offset.abs() / scale
    a, b = rate + d, rate - d  # beyond y, and on the side of m
    log_near, odds = laplace_sides(d, rate)
    log_z = log_near + odds.exp().log1p() - power * (math.log(2) + 0.5 * noise.log())
    beyond, near = odds.sigmoid(), (-odds).sigmoid()
    moments = _beyond(torch.stack([a, b]))
    (x, x_near), (second, second_near), (third, third_near), (fourth, fourth_near) = moments
    gap = x + x_near  # between the means of the two, at d + x and d - x_near
    up, down = near * gap, beyond * gap  # from the mean of both
    mean = torch.where(b < 0, rate - hazard(b.clamp(max=0)), d - x_near) + down
    v = beyond * second + near * second_near + beyond * near * gap.square()
    skew = beyond * (third + up * (3 * second + up.square()))
    skew = skew - near * (third_near + down * (3 * second_near + down.square()))
    tails = beyond * (fourth + up * (4 * third + up * (6 * second + up.square())))
    tails = tails + near * (fourth_near + down * (4 * third_near + down * (6 * second_near + down.square())))
    third, fourth = side * scale * variance * skew, variance.square() * tails
    return TiltedMoments(log_z, side * scale * mean, variance * v, third, fourth), scale * (beyond * x + near * x_near)


def _beyond(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return E[t - a], and the second to fourth central moments, of a standard normal t > a."""
    far = a >= _FAR
    near_moments, far_moments = _by_hazard(a.clamp(max=_FAR)), _by_fraction(a.clamp(min=_FAR))
    first, second, third, fourth = (
        torch.where(far, there, here) for here, there in zip(near_moments, far_moments, strict=True)
    )
    return first, second, third, fourth


def _by_hazard(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = hazard(a)
    excess = h - a
    a = a.clamp(min=_NEAR)  # beyond it h is nothing
    second = 1 - h * (h - a)
    third = h * (a.square() - 1 + h * (2 * h - 3 * a))
    fourth = 3 + h * (a * (a.square() + 3) - h * (4 * a.square() + 2 - h * (6 * a - 3 * h)))
    return excess, second, third, fourth


def _by_fraction(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ratio = 2 * _DEPTH / (a + (a.square() + 4 * _DEPTH).sqrt())  # r = n / (a + r)
    ratios = []
    for k in range(_DEPTH - 1, 0, -1):
        ratio = k / (a + ratio)
        ratios.append(ratio)
    r4, r3, r2, r1 = ratios[-4:]
    second = r1 * (r2 - r1)
    third = r1 * (r2 * (r3 - 3 * r1) + 2 * r1.square())
    fourth = r1 * (r2 * (r3 * (r4 - 4 * r1) + 6 * r1.square()) - 3 * r1**3)
    return r1, second, third, fourth
