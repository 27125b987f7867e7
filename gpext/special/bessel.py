r"""log I0(sqrt(s)) and its derivatives, in s = kappa^2: the cumulant function of a direction in the plane.

    H_0 = log I0(kappa),   H_{n+1} = 2 dH_n/ds,   H_1 = I1 / (kappa I0) = c1,   H_2 = c2 / kappa^2   [Cha13 Sec. 4.2]

All H_n are entire on s >= 0, so that what is made of them is smooth in eta at eta = 0, s = |eta|^2. They satisfy

    s H_2 = 1 - 2 H_1 - s H_1^2                                             (Riccati, as I0 solves Bessel's equation)

and what follows by differentiating it. Below s = 1 they are power series, from kappa = 30 on asymptotic ones, each with
coefficients from that equation; between, H_1 is a ratio of exponentially scaled Bessel functions and the equation gives
the others, at a loss of at most three digits. The `slope` of the mean resultant length A = I1 / I0, on which c1 and c2
cancel, is P_0 = dA/dkappa = H_1 + s H_2, with P_{n+1} = 2 dP_n/ds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import comb
from typing import Any

import torch
from torch import Tensor

_NEAR, _FAR = 1.0, 900.0  # in s: where the power series end and the asymptotic ones begin
_TERMS = 26  # of either


def log_i0(squared: Tensor) -> Tensor:
    """Return log I0(sqrt(s)), differentiable in s at will, to rounding for every s >= 0."""
    return _Derivative.apply(squared, _cumulant, 0)


def log_i0e(squared: Tensor) -> Tensor:
    """Return log I0(sqrt(s)) - sqrt(s) for s > 0, where the two would cancel."""
    return _Derivative.apply(squared, _scaled, 0)


def log_i0_derivative(squared: Tensor, order: int) -> Tensor:
    """Return H_order(s), order at least 1."""
    return _Derivative.apply(squared, _cumulant, order)


def resultant_slope(squared: Tensor) -> Tensor:
    """Return dA/dkappa = 1 - A / kappa - A^2, A = I1 / I0, the variance of cos y: positive, about 1 / (2 kappa^2)."""
    return _Derivative.apply(squared, _slope, 0)


class _Derivative(torch.autograd.Function):
    """A function of a family whose derivative in s is half the next one; float64 inside."""

    @staticmethod
    def forward(ctx: Any, squared: Tensor, family: Callable[[Tensor, int], Tensor], order: int) -> Tensor:
        ctx.save_for_backward(squared)
        ctx.family, ctx.order = family, order
        return family(squared.double(), order).to(squared.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (squared,) = ctx.saved_tensors
        return 0.5 * grad * _Derivative.apply(squared, ctx.family, ctx.order + 1), None, None


def _cumulant(s: Tensor, order: int) -> Tensor:
    """Return H_order."""
    if order == 0:
        kappa = s.sqrt()
        return torch.special.i0e(kappa).log() + kappa
    return _piecewise(s, _power_series(order), lambda t: _by_riccati(t, order)[-1], _far_series("ratio", order - 1))


def _scaled(s: Tensor, order: int) -> Tensor:
    """Return H_order less the same of kappa."""
    kappa = s.sqrt()
    if order == 0:
        return torch.special.i0e(kappa).log()
    return _cumulant(s, order) - _powers_of_kappa(((1.0, 1),), order, kappa)


def _slope(s: Tensor, order: int) -> Tensor:
    """Return P_order."""
    near, after = _power_series(order + 1), _power_series(order + 2)
    series = tuple((2 * order + 1) * a + (after[j - 1] if j else 0.0) for j, a in enumerate(near))

    def between(t: Tensor) -> Tensor:
        *_, one, two = _by_riccati(t, order + 2)
        return (2 * order + 1) * one + t * two

    return _piecewise(s, series, between, _far_series("slope", order))


def _piecewise(
    s: Tensor, near: tuple[float, ...], between: Callable[[Tensor], Tensor], far: tuple[tuple[float, int], ...]
) -> Tensor:
    middle = between(s.clamp(_NEAR, _FAR))
    distant = _far_sum(far, s.clamp_min(_FAR).rsqrt())
    return torch.where(s < _NEAR, _power_sum(near, s.clamp_max(_NEAR)), torch.where(s < _FAR, middle, distant))


def _by_riccati(s: Tensor, order: int) -> list[Tensor]:
    """Return H_1, ..., H_order: s H_{n+2} = [n = 0] - 2 (n + 1) H_{n+1} - s Q_n - 2 n Q_{n-1}, Q_0 = H_1^2."""
    kappa = s.sqrt()
    found = [torch.special.i1e(kappa) / (kappa * torch.special.i0e(kappa))]
    previous = torch.zeros_like(s)
    for n in range(order - 1):
        square = sum((comb(n, j) * found[j] * found[n - j] for j in range(n + 1)), torch.zeros_like(s))
        following = (1.0 if n == 0 else 0.0) - 2 * (n + 1) * found[n] - 2 * n * previous
        found.append(following / s - square)
        previous = square
    return found


@lru_cache(maxsize=64)
def _power_series(order: int) -> tuple[float, ...]:
    """Return the coefficients of H_order in powers of s."""
    ratio: list[float] = [0.5]
    for j in range(1, _TERMS + order):
        ratio.append(-sum(ratio[i] * ratio[j - 1 - i] for i in range(j)) / (2 * j + 2))
    for _ in range(order - 1):
        ratio = [2 * j * a for j, a in enumerate(ratio)][1:]
    return tuple(ratio)


@lru_cache(maxsize=64)
def _far_series(kind: str, order: int) -> tuple[tuple[float, int], ...]:
    """Return coefficients and powers of 1 / kappa of H_{order+1} ("ratio") or of P_order ("slope")."""
    length = [1.0]  # of A
    for j in range(1, _TERMS):
        length.append(0.5 * ((j - 2) * length[j - 1] - sum(length[i] * length[j - i] for i in range(1, j))))
    terms = [(a if kind == "ratio" else -j * a, j + 1) for j, a in enumerate(length)]
    for _ in range(order):
        terms = [(-power * a, power + 2) for a, power in terms]
    return tuple(terms)


def _powers_of_kappa(terms: tuple[tuple[float, int], ...], order: int, kappa: Tensor) -> Tensor:
    """Return D^order of a sum of powers of kappa, D = 2 d/ds = (1 / kappa) d/dkappa."""
    for _ in range(order):
        terms = tuple((power * a, power - 2) for a, power in terms)
    return sum((a * kappa**power for a, power in terms), torch.zeros_like(kappa))


def _power_sum(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for a in reversed(coefficients):
        total = total * x + a
    return total


def _far_sum(terms: tuple[tuple[float, int], ...], x: Tensor) -> Tensor:
    return _power_sum(tuple(a for a, _ in terms), x) * x ** terms[0][1]
