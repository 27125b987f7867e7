"""phi(r) = 1 / cosh(sqrt r)^b: the logistic family, mixed by Polya-Gamma variables.

With h = f/2 and w = 2 PG(b, f) this is the identity of Polson, Scott & Windle (2013) in the notation of [GWO20 Tab. 1],
where b = 1; the negative binomial with logit link has b = y + count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.augmentations.radial import RadialFunction, distance, folded_mean
from gpext.distributions import PolyaGamma, Scaled
from gpext.quadrature import gauss_legendre, smooth_expectation, trapezoid, trapezoid_nodes

_WIDE = 4.0  # standard deviation of z above which the fixed panels are cheaper; they are accurate from 0.8


def _panels(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return nodes and weights on [0, 15]: twelve panels, twelve Gauss-Legendre nodes each."""
    nodes, weights = gauss_legendre(12, dtype, device)
    starts = 1.25 * torch.arange(12, dtype=dtype, device=device).unsqueeze(-1)
    return (starts + 1.25 * nodes).flatten(), (1.25 * weights).repeat(12)


@dataclass(frozen=True)
class SechRadial(RadialFunction):
    """A power of the hyperbolic secant of sqrt(r).

    Args:
        count: the power b > 0, broadcastable against the argument.

    Example:
        >>> import torch
        >>> SechRadial(torch.tensor(1.0)).mean(torch.tensor([0.0]))
        tensor([0.5000])
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

    def mixing(self, r: Tensor) -> Scaled:
        """Return 2 PG(b, 2 sqrt r)."""
        return Scaled(PolyaGamma(self.count, 2 * r.sqrt()), 2.0)

    def mixing_of_power(self, r: Tensor, power: Tensor) -> Scaled:
        """Return 2 PG(power b, 2 sqrt r)."""
        return SechRadial(power * self.count).mixing(r)

    def expected_log_phi(self, gap: Tensor, variance: Tensor) -> Tensor:
        r"""Return -b E[log cosh z] for z ~ N(gap, variance).

        By the trapezoidal rule; where z is spread wide, :math:`\log\cosh z = |z| + \log(1 + e^{-2|z|}) - \log 2`: the
        first part has a closed form, the second is gone beyond |z| = 15 and is integrated on fixed panels that resolve
        it and a Gaussian of this width.
        """
        wide = variance > _WIDE**2
        narrow = torch.where(wide, torch.zeros_like(variance), variance)
        num_nodes = trapezoid_nodes(math.pi / 2, narrow.detach().amax().sqrt())  # cosh vanishes at i pi/2
        expected = -self.count * smooth_expectation(_log_cosh, gap, narrow, trapezoid(num_nodes), num_nodes)
        if not bool(wide.any()):
            return expected
        return torch.where(wide, self._by_panels(gap, torch.where(wide, variance, torch.ones_like(variance))), expected)

    def _by_panels(self, gap: Tensor, variance: Tensor) -> Tensor:
        nodes, weights = _panels(gap.dtype, gap.device)
        shape = torch.broadcast_shapes(gap.shape, variance.shape)
        t = nodes.view((-1,) + (1,) * len(shape))
        scaled = 0.5 / variance
        density = torch.exp(-scaled * (t - gap).square()) + torch.exp(-scaled * (t + gap).square())
        rest = torch.tensordot(weights * torch.log1p(torch.exp(-2 * nodes)), density, dims=1)
        rest = rest * (scaled / math.pi).sqrt()
        return -self.count * (folded_mean(gap, variance) + rest - math.log(2))


def _log_cosh(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    c = z.abs()
    decay = torch.exp(-2 * c)
    inverse = (1 + decay).reciprocal()
    slope = (1 - decay) * inverse
    return c + torch.log1p(decay) - math.log(2), torch.copysign(slope, z), 4 * decay * inverse.square()
