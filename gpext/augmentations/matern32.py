"""phi(r) = (1 + sqrt(3r)) exp(-sqrt(3r)): Matern-3/2 noise, mixed by w ~ InvGamma(3/2, 3/4) [GWO20 Tab. 1]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpext.augmentations.radial import RadialFunction, distance
from gpext.distributions import GeneralizedInverseGaussian
from gpext.quadrature import gauss_legendre, smooth_expectation

# Up to which standard deviation of z how many nodes a side reach full accuracy.
_NARROW = ((0.75, 40), (3.0, 96), (12.0, 200), (50.0, 400))


@dataclass(frozen=True)
class Matern32Radial(RadialFunction):
    """The radial function of a Matern-3/2 density of unit scale.

    Example:
        >>> import torch
        >>> Matern32Radial().mean(torch.tensor([1.0])).shape
        torch.Size([1])
    """

    def log_phi(self, r: Tensor) -> Tensor:
        """Return log(1 + x) - x with x = sqrt(3 r)."""
        x = math.sqrt(3) * distance(r)
        return torch.log1p(x) - x

    def mean(self, r: Tensor) -> Tensor:
        """Return (3/2) / (1 + sqrt(3 r))."""
        return 1.5 / (1 + math.sqrt(3) * distance(r))

    def mixing(self, r: Tensor) -> GeneralizedInverseGaussian:
        """Return GIG(-3/2, 2r, 3/2); inverse gamma at r = 0."""
        return GeneralizedInverseGaussian(-1.5, 2 * r, 1.5)

    def expected_log_phi(self, gap: Tensor, variance: Tensor) -> Tensor | None:
        """Return E[log phi(z^2)] for z ~ N(gap, variance), unless some z is spread too wide for a fixed rule.

        log phi is analytic on either side of its kink z = 0: a Gauss-Legendre rule a side. There is no derivative of a
        jump to add, because log phi has two continuous derivatives.
        """
        widest = variance.detach().amax().sqrt()
        num_nodes = next((number for limit, number in _NARROW if widest <= limit), None)
        if num_nodes is None:
            return None
        return smooth_expectation(_log_phi, gap, variance, partial(_two_sides, num_nodes), 2 * num_nodes)


def _log_phi(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = math.sqrt(3) * z.abs()
    inverse = (1 + x).reciprocal()
    return torch.log1p(x) - x, -3 * z * inverse, -3 * inverse.square()


def _two_sides(num_nodes: int, mean: Tensor, sd: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes and weights (n, 2 num_nodes) on either side of z = 0, up to nine standard deviations away."""
    nodes, weights = gauss_legendre(num_nodes, mean.dtype, mean.device)
    # In standard units; a kink further away than the Gaussian reaches leaves one side empty, and sd = 0 needs no rule.
    kink = (-mean / sd.clamp_min(torch.finfo(sd.dtype).tiny)).clamp(-9, 9)
    u = torch.cat([-9 + (kink + 9) * nodes, kink + (9 - kink) * nodes], -1)
    lengths = torch.cat([(kink + 9) * weights, (9 - kink) * weights], -1)
    return mean + sd * u, lengths * torch.exp(-0.5 * u.square()) / math.sqrt(2 * math.pi)
