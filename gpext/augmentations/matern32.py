"""phi(r) = (1 + sqrt(3r)) exp(-sqrt(3r)): Matern-3/2 noise, mixed by w ~ InvGamma(3/2, 3/4) [GWO20 Tab. 1]."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.augmentations.radial import RadialFunction, distance, folded_mean
from gpext.quadrature import gauss_legendre

# Panel edges about the mean, in standard deviations, cut once more at the kink z = 0; twelve nodes a panel.
_EDGES = (-9.0, -6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0, 9.0)
_NARROW = 0.75  # standard deviation of z up to which log(1 + sqrt(3)|z|) is resolved by them to 1e-10


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

    def expected_log_phi(self, gap: Tensor, variance: Tensor) -> Tensor | None:
        r"""Return E[log(1 + sqrt(3)|z|)] - sqrt(3) E|z| for z ~ N(gap, variance), unless some z is spread too wide.

        The second part has a closed form; the first is analytic on either side of zero.
        """
        if not bool((variance <= _NARROW**2).all()):
            return None
        gap, variance = torch.broadcast_tensors(gap, variance)
        s = distance(variance)
        edges = gap.new_tensor(_EDGES).view((-1,) + (1,) * gap.dim())
        safe = torch.where(s == 0, torch.ones_like(s), s)
        kink = (-gap / safe).detach()  # z = 0 in standard units
        lower, upper = edges[:-1], edges[1:]
        cut = torch.minimum(torch.maximum(kink, lower), upper)
        starts = torch.cat([lower.expand(cut.shape), cut])
        widths = torch.cat([cut - lower, upper - cut])
        nodes, weights = gauss_legendre(12, gap.dtype, gap.device)
        column = (-1, 1) + (1,) * gap.dim()
        u = starts + widths * nodes.view(column)  # (12, 16, ..., N) standard normal
        density = widths * torch.exp(-0.5 * u.square()) / math.sqrt(2 * math.pi)
        values = torch.log1p(math.sqrt(3) * (gap + s * u).abs())
        smooth = (weights.view(column) * density * values).sum((0, 1))
        return smooth - math.sqrt(3) * folded_mean(gap, variance)
