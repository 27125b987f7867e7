r"""Cumulants of w under the tilted mixing density of phi(r) = 1 / cosh(sqrt r), whose b-th power multiplies them by b.

With y = (log phi)' = -tanh(c) / (2c) and s = sech(c)^2, c = sqrt r, all derivatives in r follow from

    s' = 2 y s,    4 r y' = -s - 2 y    so    4 r y^(k+1) = -s^(k) - (4k + 2) y^(k),

which loses digits near r = 0. There log phi = sum_n (-r)^n sigma_n / n, sigma_n = sum_j ((j - 1/2) pi)^-2n.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SMALL = 0.25  # r below it; the series has the radius pi^2 / 4
_TERMS = 18  # of the series: 10^-17 is left
# sigma_n = (2 / pi)^2n sum_j (2j - 1)^-2n; the sum to the last bit, its tail by the midpoint rule for n = 1 and 2
_SIGMA = [1 / 2, 1 / 6] + [
    (2 / math.pi) ** (2 * n) * math.fsum((2 * j - 1.0) ** (-2 * n) for j in range(1, 2000)) for n in range(3, 30)
]


def sech_cumulants(r: Tensor, num: int) -> list[Tensor]:
    """The first `num` <= 6 cumulants at r >= 0, float64, each of the shape of r."""
    small = r < _SMALL
    if not bool(small.any()):
        return _by_recurrence(r, num)
    series = _by_series(torch.where(small, r, 0.0), num)
    if bool(small.all()):
        return series
    recurrence = _by_recurrence(torch.where(small, 1.0, r), num)
    return [torch.where(small, a, b) for a, b in zip(series, recurrence, strict=True)]


def log_sech_series(r: Tensor) -> Tensor:
    """Return log phi(r), real or complex, by the series; accurate to rounding for abs r < 0.25."""
    total = torch.zeros_like(r)
    for n in range(_TERMS, 0, -1):
        total = _SIGMA[n - 1] / n - r * total
    return -r * total


def _by_series(r: Tensor, num: int) -> list[Tensor]:
    cumulants = []
    for k in range(1, num + 1):
        total = torch.zeros_like(r)
        for n in range(k + _TERMS, k - 1, -1):
            total = math.factorial(n - 1) / math.factorial(n - k) * _SIGMA[n - 1] - r * total
        cumulants.append(total)
    return cumulants


def _by_recurrence(r: Tensor, num: int) -> list[Tensor]:
    c = r.sqrt()
    y, s = [-0.5 * torch.tanh(c) / c], [torch.cosh(c).square().reciprocal()]
    for k in range(num - 1):
        y.append(-(s[k] + (4 * k + 2) * y[k]) / (4 * r))
        terms = [2 * math.comb(k, j) * y[j] * s[k - j] for j in range(k + 1)]
        s.append(torch.stack(terms).sum(0))
    return [(-1) ** (k + 1) * y[k] for k in range(num)]
