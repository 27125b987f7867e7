r"""Numerical inversion of a Laplace transform on a contour through its saddle point, for all data at once.

    density = 1/(2 pi i) int e^{(S - r) w} phi(S)/phi(r) dS,     cdf = 1/(2 pi i) int e^{(S - r) w} phi(S)/phi(r) dS/(S - r)

The contour is the parabola S(tau) = S0 + i tau - beta tau^2, the rule the trapezoidal one, whose error falls
exponentially with the number of nodes because phi is analytic off the negative real axis:

- S0 is the saddle point, -(log phi)'(S0) = w, so nothing cancels, whether w is typical or rare;
- beta = kappa_3 / (6 kappa_2), cumulants at S0, keeps to the path of steepest descent to the third order. For
  phi = exp(-sqrt r) the integrand is then exactly a Gaussian in tau, and it nearly is for every phi of heavier or
  lighter tails;
- where the saddle is not to the right of the origin (w far in an upper tail) the vertex stays there, at distance
  of order 1 / w, and beta grows until e^{-w beta tau^2} decays within the nodes [Weideman & Trefethen 2007];
- the pole S = r of the cdf sits at tau = i y; its part of the rule's error is known, 1 / (1 + e^{2 pi y / h}), and added.

The saddle point is that of a model with the first three cumulants of phi at a reference point,
-(log phi)'(S) = kappa_1 (1 + (S - R) / theta)^-p, exact for powers, stable laws and (inverse) Gaussians. It needs no
precision.

Largest errors of the cdf found over Student-t, Laplace, logistic (counts 0.3 to 3000) and Matern-3/2 at tilts 0 to 1e4
and probabilities 1e-12 to 1 - 1e-9: 6e-9 with 12 nodes, 2e-10 with 16, 3e-12 with 24 (and rounding of log phi).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.distributions.radial_transform import RadialTransform

_DECAY = {12: 23.0, 16: 28.0, 24: 36.0}  # by how many nats the integrand falls over the nodes
_CLEARANCE = 2.5  # distance of the vertex from the singularities, in units of 1 / w
_ALIASING = math.pi / 2  # largest step in units of 1 / (w - the vertex' own w)
_LEAST_SKEWNESS = 1.02  # kappa_1 kappa_3 / kappa_2^2 of the model; at least 2 for generalised gamma convolutions
_EXPONENTS = 10  # 2^-1023 .. 2^1024: halvings of the range of exponents


@dataclass(frozen=True)
class SaddleModel:
    """-(log phi)'(S) = first (1 + (S - at) / theta)^-power; fields broadcast."""

    at: Tensor
    first: Tensor
    theta: Tensor
    power: Tensor

    @classmethod
    def matched(cls, transform: RadialTransform, at: Tensor) -> SaddleModel:
        """The model with the first three cumulants at this point."""
        first, second, third = transform.cumulants(at)
        skewness = (first * third / second.square()).clamp_min(_LEAST_SKEWNESS)
        power = 1 / (skewness - 1)
        return cls(at, first, power * first / second, power)

    @classmethod
    def reference(cls, transform: RadialTransform, r: Tensor) -> SaddleModel:
        """The model matched where log phi has fallen from r by one, up to a factor of two in the distance."""
        start = torch.where(r == 0, 0.0, transform(r))
        exponent = torch.zeros_like(start)
        for k in range(_EXPONENTS):
            fallen = start - transform(r + torch.exp2(exponent)) > 1
            exponent = exponent + torch.where(fallen, -1.0, 1.0) * 2.0 ** (_EXPONENTS - 1 - k)
        return cls.matched(transform, r + torch.exp2(exponent))

    def vertex(self, w: Tensor) -> Tensor:
        """The saddle point of w, or the nearest point with the clearance."""
        ratio = torch.maximum((w / self.first) ** (-1 / self.power), _CLEARANCE / (w * self.theta))
        return torch.maximum((self.at - self.theta) + self.theta * ratio, _CLEARANCE / w)

    def cumulants(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first two cumulants at s, and beta."""
        ratio = 1 + (s - self.at) / self.theta
        first = self.first * ratio**-self.power
        return first, first * self.power / (self.theta * ratio), (self.power + 1) / (6 * self.theta * ratio)


@dataclass(frozen=True)
class Inversion:
    """Cdf and density at w, each of its shape, and what is known of their errors."""

    cdf: Tensor
    density: Tensor
    doubt: Tensor  # change of the cdf if two nodes of three are left out, and the size of the last term


def invert(
    transform: RadialTransform,
    r: Tensor,  # (*batch), >= 0 and finite
    w: Tensor,  # (*sample, *batch), positive and finite
    model: SaddleModel,  # (*batch), at a reference point
    num_nodes: int = 16,
) -> Inversion:
    """Return cdf and density of w under e^{-r w} p(w) / phi(r), phi the transform of p."""
    model = SaddleModel.matched(transform, model.vertex(w))
    vertex = model.vertex(w)
    first, second, bend = model.cumulants(vertex)
    decay = _DECAY[num_nodes]
    at_saddle = torch.minimum(torch.maximum(first * bend, second / 3), second / 2)
    excess = (w - first).clamp_min(0)
    step = (decay / (at_saddle + excess * bend)).sqrt() / num_nodes
    step = torch.minimum(step, _ALIASING / excess)
    needed = (decay / (num_nodes * step).square() - at_saddle) / excess
    bend = torch.where(excess > 1e-3 * w, torch.maximum(bend, needed), bend)

    tau = step * torch.arange(0.5, num_nodes, dtype=w.dtype, device=w.device).view((-1,) + (1,) * w.dim())
    s = torch.complex(vertex - bend * tau.square(), tau)
    slope = torch.complex((step / math.pi).expand(tau.shape), 2 / math.pi * step * bend * tau)
    terms = transform.ratio(s, r, (s - r) * w) * slope
    over_pole = (terms / (s - r)).real
    gap = vertex - r
    height = 2 * gap / (1 + (1 - 4 * bend * gap).clamp_min(0).sqrt())  # of the pole
    pole = -2 * math.pi * height / step
    cdf = over_pole.sum(0) + torch.sigmoid(pole)
    coarse = 3 * over_pole[1::3].sum(0) + torch.sigmoid(pole / 3)
    return Inversion(cdf, terms.real.sum(0), (coarse - cdf).abs() + over_pole[-1].abs())
