"""phi(r) = exp(-sqrt(r)): Laplace noise and the hinge loss, mixed by w ~ Levy(1/2) [GWO20 Tab. 1]."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.augmentations.radial import RadialFunction, distance


@dataclass(frozen=True)
class ExponentialRadial(RadialFunction):
    """The radial function of a Laplace density of unit scale; the tilted w is inverse Gaussian, mean 1/(2c)."""

    def log_phi(self, r: Tensor) -> Tensor:
        """Return -sqrt(r)."""
        return -distance(r)

    def mean(self, r: Tensor) -> Tensor:
        """Return 1 / (2 sqrt(r)), which is infinite at r = 0: p(w) has no mean."""
        return 0.5 * r.rsqrt()

    def expected_log_phi(self, gap: Tensor, variance: Tensor) -> Tensor:
        r"""Return :math:`-E|z|` for z ~ N(gap, variance): minus the mean of a folded Gaussian.

        With s = sqrt(variance): E|z| = s sqrt(2/pi) exp(-gap^2 / (2 s^2)) + gap erf(gap / (s sqrt 2)).
        """
        s = distance(variance)
        ratio = gap / torch.where(s == 0, torch.ones_like(s), s)
        at_point = gap.abs().expand_as(ratio)
        folded = s * math.sqrt(2 / math.pi) * torch.exp(-0.5 * ratio.square()) + gap * torch.erf(ratio / math.sqrt(2))
        return -torch.where(s == 0, at_point, folded)
