r"""The normal distribution function far out in its tails, where it underflows and its derivatives cancel.

Mills' ratio and the hazard of a standard normal variable t, with phi the density and Phi the distribution function:

    M(a) = (1 - Phi(a)) / phi(a) = sqrt(pi / 2) erfcx(a / sqrt 2),      h(a) = 1 / M(a) = E[t | t > a]
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_HALF = math.sqrt(0.5)


def log_ndtr(x: Tensor) -> Tensor:
    """Return log Phi(x), with second derivatives that keep their digits far below 0, where torch's lose them."""
    is_low = x < -1
    low, high = torch.where(is_low, x, -1.0), torch.where(is_low, -1.0, x)
    below = torch.log(0.5 * torch.special.erfcx(-_HALF * low)) - 0.5 * low.square()
    return torch.where(is_low, below, torch.special.log_ndtr(high))


def log_mills_ratio(a: Tensor) -> Tensor:
    """Return log(M(a) / sqrt(2 pi)) = log Phi(-a) + a^2 / 2."""
    is_low = a < 0
    low, high = torch.where(is_low, a, 0.0), torch.where(is_low, 0.0, a)
    below = 0.5 * low.square() + torch.special.log_ndtr(-low)
    return torch.where(is_low, below, torch.log(0.5 * torch.special.erfcx(_HALF * high)))


def hazard(a: Tensor) -> Tensor:
    """Return h(a), the mean of a standard normal variable that is known to exceed a."""
    return math.sqrt(2 / math.pi) / torch.special.erfcx(_HALF * a)
