"""phi(r) = (1 + sqrt(3r)) exp(-sqrt(3r)): Matern-3/2 noise, mixed by w ~ InvGamma(3/2, 3/4) [GWO20 Tab. 1]."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.augmentations.radial import RadialFunction, distance


@dataclass(frozen=True)
class Matern32Radial(RadialFunction):
    """The radial function of a Matern-3/2 density of unit scale."""

    def log_phi(self, r: Tensor) -> Tensor:
        """Return log(1 + x) - x with x = sqrt(3 r)."""
        x = math.sqrt(3) * distance(r)
        return torch.log1p(x) - x

    def mean(self, r: Tensor) -> Tensor:
        """Return (3/2) / (1 + sqrt(3 r))."""
        return 1.5 / (1 + math.sqrt(3) * distance(r))
