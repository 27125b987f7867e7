"""Logarithms of sums that scipy computes until they underflow: incomplete gamma functions P(a, x) and Q(a, x).

Where the function has underflowed it is summed term by term from its largest:

    P(a, x) = D (1 + x / (a + 1) + ...),    Q(a, x) = D a / x (1 + (a - 1) / x + ...),    D = x^a e^-x / Gamma(a + 1)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpext.distributions.with_cdf import by_scipy
from gpext.special import log_poisson

SMALLEST = 1e-290  # of a function that scipy computes, below which it is summed
_MOST_TERMS = 20000


def log_gamma_cdf(log_x: Tensor, shape: Tensor) -> Tensor:
    """Return log P(shape, x), float64, elementwise; no gradient."""
    from scipy import special

    x = log_x.exp()
    return log_or_sum(
        by_scipy(special.gammainc, shape, x), lambda: log_poisson(shape, log_x), lambda j: x / (shape + 1 + j)
    )


def log_gamma_survival(log_x: Tensor, shape: Tensor) -> Tensor:
    """Return log Q(shape, x) like :func:`log_gamma_cdf`."""
    from scipy import special

    x = log_x.exp()
    known = by_scipy(special.gammaincc, shape, x)
    return log_or_sum(known, lambda: log_poisson(shape, log_x) + shape.log() - log_x, lambda j: (shape - 1 - j) / x)


def log_or_sum(known: Tensor, log_mass: Callable[[], Tensor], ratio: Callable[[int], Tensor]) -> Tensor:
    """Return log known, or where it has underflowed the sum of masses that begins with exp(log_mass())."""
    is_lost = known < SMALLEST
    if not bool(is_lost.any()):
        return known.log()
    term = torch.where(is_lost, torch.ones_like(known), 0.0)
    total = term
    for j in range(_MOST_TERMS):
        term = torch.where(is_lost, term * ratio(j), 0.0)
        total = total + term
        if not bool((term.abs() > torch.finfo(term.dtype).eps * total).any()):
            break
    return torch.where(is_lost, log_mass() + torch.where(is_lost, total, 1.0).log(), known.clamp_min(SMALLEST).log())
