r"""Draws of generalised inverse Gaussians: by a mixture for half-integer orders, by rejection for all others.

GIG(1/2, a, b) = IG + Gamma(1/2), and weighting a law by w raises its order by one. Weighting a sum of independent
terms by itself is weighting one of its terms, chosen with probability in proportion to its mean, and IG weighted by w
is IG + Gamma(1/2) again. Hence, with w = sqrt(a b), all Gammas at rate a / 2,

    GIG(3/2, a, b) = IG(sqrt(b / a), b) + Gamma(K),    K = 1 with probability w / (1 + w), 3/2 otherwise,

and so on: weight v(K) moves to K + 1/2 with a factor w and to K + 1 with a factor 2 K. Negative orders are reciprocals:
1 / GIG(p, a, b) = GIG(-p, b, a).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.distributions.mixing.inverse_gaussian import inverse_gaussian_draws


def half_integer_draws(
    order: float,  # +-1/2, +-3/2, ...
    a: Tensor,  # (*shape) float64
    b: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One exact draw for each element, without rejection."""
    if order < 0:
        return half_integer_draws(-order, b, a, generator).reciprocal()
    # IG of mean 0 at b = 0 is 0.
    first = torch.where(b > 0, inverse_gaussian_draws((a / b).sqrt(), b, generator), 0.0)
    omega = (a * b).sqrt()
    weights = {1: torch.ones_like(omega)}  # of 2 K
    for _ in range(int(order)):
        raised: dict[int, Tensor] = {}
        for twice, weight in weights.items():
            raised[twice + 1] = raised.get(twice + 1, 0) + omega * weight
            raised[twice + 2] = raised.get(twice + 2, 0) + twice * weight
        total = sum(raised.values())
        weights = {twice: weight / total for twice, weight in raised.items()}
    level = torch.empty_like(a).uniform_(generator=generator)
    shape = torch.full_like(a, 0.5 * min(weights))
    passed = torch.zeros_like(a)
    for twice in sorted(weights)[:-1]:
        passed = passed + weights[twice]
        shape = torch.where(level >= passed, 0.5 * (twice + 1), shape)
    return first + 2 * torch._standard_gamma(shape, generator=generator) / a


def rejection_draws(order: Tensor, a: Tensor, b: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One exact draw for each element, all arguments (*shape) float64 [Devroye 2014].

    With p >= 0 (reciprocals otherwise) x = log(w / mode) has the log-concave density e^g. Its hat is 1 in the middle
    and the tangents' exponentials from points t and -s on, wherever these points are.
    """
    flipped = order < 0
    p, upper, lower = order.abs(), torch.where(flipped, b, a), torch.where(flipped, a, b)
    steepness = (p.square() + upper * lower).sqrt()
    mode = (p + steepness) / upper
    draws = torch.empty_like(mode).flatten()
    waiting = torch.arange(draws.numel(), device=draws.device)
    p, steepness = p.flatten(), steepness.flatten()
    hat = _hat(p, steepness)
    while waiting.numel():
        x, accepted = _propose(p, steepness, hat, generator)
        draws[waiting[accepted]] = x[accepted]
        waiting, p, steepness, hat = (t[..., ~accepted] for t in (waiting, p, steepness, hat))
    draws = draws.view(mode.shape).exp() * mode
    return torch.where(flipped, draws.reciprocal(), draws)


def _g(x: Tensor, p: Tensor, steepness: Tensor) -> tuple[Tensor, Tensor]:
    """The log density of x = log(w / mode) and its slope."""
    value = -2 * steepness * torch.sinh(0.5 * x).square() - p * (torch.sinh(x) - x)
    return value, -steepness * torch.sinh(x) - p * (torch.cosh(x) - 1)


def _hat(p: Tensor, steepness: Tensor) -> Tensor:  # (4, n)
    """The ends of the flat part of the hat, and the slopes of the exponentials beyond."""
    # The tangents touch where g is near -1: one step of regula falsi in the square root of -g is near enough.
    t, s = torch.ones_like(p), torch.ones_like(p)
    for _ in range(8):
        t = t / (-_g(t, p, steepness)[0]).sqrt().clamp(0.25, 4)
        s = s / (-_g(-s, p, steepness)[0]).sqrt().clamp(0.25, 4)
    (at_t, slope_t), (at_s, slope_s) = _g(t, p, steepness), _g(-s, p, steepness)
    return torch.stack([-s - at_s / slope_s, t - at_t / slope_t, slope_s, -slope_t])


def _propose(p: Tensor, steepness: Tensor, hat: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Proposals from the hat, and which of them are accepted."""
    left, right, rise, fall = hat
    part, along, level = torch.empty((3, *p.shape), dtype=p.dtype, device=p.device).uniform_(generator=generator)
    middle = right - left
    part = part * (middle + 1 / rise + 1 / fall)
    tail = -torch.log1p(-along)
    above, below = part >= middle + 1 / rise, part < 1 / rise
    x = torch.where(above, right + tail / fall, torch.where(below, left - tail / rise, left + along * middle))
    log_hat = torch.where(above | below, -tail, 0.0)
    return x, level.log() + log_hat <= _g(x, p, steepness)[0]
