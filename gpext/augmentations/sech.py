"""phi(r) = 1 / cosh(sqrt r)^b: the logistic family, mixed by Polya-Gamma variables.

With h = f/2 and w = 2 PG(b, f) this is the identity of Polson, Scott & Windle (2013) in the notation of [GWO20 Tab. 1],
where b = 1; the negative binomial with logit link has b = y + count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.augmentations.radial import RadialFunction, distance


@dataclass(frozen=True)
class SechRadial(RadialFunction):
    """A power of the hyperbolic secant of sqrt(r).

    Args:
        count: the power b > 0, broadcastable against the argument.
    """

    count: Tensor

    def log_phi(self, r: Tensor) -> Tensor:
        """Return -b log cosh(sqrt r), as -b (c + log1p(e^{-2c}) - log 2), which neither overflows nor underflows."""
        c = distance(r)
        return -self.count * (c + torch.log1p(torch.exp(-2 * c)) - math.log(2))

    def mean(self, r: Tensor) -> Tensor:
        """Return b tanh(c) / (2c), and its limit b/2 at c = 0."""
        c = distance(r)
        at_zero = c == 0
        ratio = torch.tanh(c) / torch.where(at_zero, torch.ones_like(c), c)
        return 0.5 * self.count * torch.where(at_zero, torch.ones_like(c), ratio)

    def strip(self) -> Tensor:
        """Return pi/2: cosh z vanishes at z = i pi/2."""
        return torch.full_like(self.count, math.pi / 2)
