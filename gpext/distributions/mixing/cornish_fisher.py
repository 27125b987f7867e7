"""Quantiles from cumulants [Cornish & Fisher 1938; Abramowitz & Stegun 1964, 26.2.49]."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def cornish_fisher(score: Tensor, cumulants: Sequence[Tensor]) -> Tensor:
    """The fourth-order expansion of the quantile at probability Phi(score) from the first six cumulants."""
    mean, variance, *higher = cumulants
    sd = variance.sqrt()
    a, b, c, d = (cumulant / sd ** (k + 3) for k, cumulant in enumerate(higher))
    # Hermite polynomials
    h1 = score
    h2 = score.square() - 1
    h3 = score * h2 - 2 * h1
    h4 = score * h3 - 3 * h2
    h5 = score * h4 - 4 * h3
    first = a * h2 / 6
    second = b * h3 / 24 - a**2 * (2 * h3 + h1) / 36
    third = c * h4 / 120 - a * b * (h4 + h2) / 24 + a**3 * (12 * h4 + 19 * h2) / 324
    fourth = (
        d * h5 / 720
        - b**2 * (3 * h5 + 6 * h3 + 2 * h1) / 384
        - a * c * (2 * h5 + 3 * h3) / 180
        + a**2 * b * (14 * h5 + 37 * h3 + 8 * h1) / 288
        - a**4 * (252 * h5 + 832 * h3 + 227 * h1) / 7776
    )
    return mean + sd * (score + (first + second + third + fourth))
