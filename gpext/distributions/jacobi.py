r"""Exact draws of the Jacobi variables J(b, c) behind the Polya-Gamma ones, 0 < b <= 1 or b an integer.

    E e^{-s X} = (cosh c / cosh sqrt(c^2 + 2 s))^b,    PG(b, 2c) = J(b, c) / 4    [Polson, Scott & Windle 2013]

Expanding 1 / cosh^b in powers of exp(-2 sqrt .) gives the density as an alternating series of inverse Gaussian ones,

    p(x) = (1 + e^{-2c})^b IG(x | b / c, b^2) R(x),
    R(x) = sum_n (-1)^n C(n + b - 1, n) (1 + 2n / b) exp(-2 n (n + b) / x),    0 < R <= 1,

so a draw from IG(b / c, b^2) accepted with probability R is exact, and one in (1 + e^{-2c})^b <= 2^b is accepted. R
decreases, and R >= 1 - (first term).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.distributions.inverse_gaussian import inverse_gaussian_draws

_FAR = 40.0  # R is below 1e-17 from here on; 31 terms of its series suffice up to here
_MOST_TERMS = 31


def jacobi_draws(
    count: Tensor,  # (n,) in (0, 1]
    tilt: Tensor,  # (n,) >= 0, finite
    generator: torch.Generator | None = None,
) -> Tensor:
    """One draw of J(count, tilt) for each element, in float64."""
    draws = torch.empty_like(tilt)
    waiting = torch.arange(tilt.numel(), device=tilt.device)
    while waiting.numel():
        b, c = count[waiting], tilt[waiting]
        x = inverse_gaussian_draws(
            c / b, b.square(), torch.empty_like(c).normal_(generator=generator), _uniform(c, generator)
        )
        accepted = _accepted(x, b, _uniform(c, generator))
        draws[waiting[accepted]] = x[accepted]
        waiting = waiting[~accepted]
    return draws


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.empty_like(like).uniform_(generator=generator)


def _accepted(x: Tensor, count: Tensor, uniform: Tensor) -> Tensor:
    """Whether uniform < R(x): by the first term where that decides."""
    accepted = uniform < 1 - (2 + count) * torch.exp(-2 * (1 + count) / x)
    open_ = ((~accepted) & (x < _FAR)).nonzero().squeeze(-1)
    accepted[open_] = uniform[open_] < series_ratio(x[open_], count[open_])
    return accepted


def series_ratio(x: Tensor, count: Tensor) -> Tensor:
    """R(x) for 0 < x <= 40, with an absolute error of about 1e-15."""
    total, coefficient = torch.ones_like(x), torch.ones_like(x)
    for n in range(1, _MOST_TERMS):
        coefficient = coefficient * ((1 - n - count) / n)
        total = total + coefficient * (1 + 2 * n / count) * torch.exp(-2 * n * (n + count) / x)
    return total
