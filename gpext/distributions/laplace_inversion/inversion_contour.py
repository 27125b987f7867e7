r"""Numerical inversion of a Laplace transform on a contour through its saddle point, for all data at once.

    density = 1/(2 pi i) int e^{(S - r) w} phi(S)/phi(r) dS
    cdf     = 1/(2 pi i) int e^{(S - r) w} phi(S)/phi(r) dS/(S - r)

The contour is the parabola S(tau) = S0 + i tau - beta tau^2, the rule the trapezoidal one, whose error falls
exponentially with the number of nodes because phi is analytic off the negative real axis:

- S0 is the saddle point, -(log phi)'(S0) = w, so nothing cancels, whether w is typical or rare;
- beta = kappa_3 / (6 kappa_2), cumulants at S0, keeps to the path of steepest descent to the third order. For
  phi = exp(-sqrt r) the integrand is then exactly a Gaussian in tau, and it nearly is for every phi of heavier or
  lighter tails;
- where the saddle is not to the right of the origin (w far in an upper tail) the vertex stays there, at distance
  of order 1 / w, and beta grows until e^{-w beta tau^2} decays within the nodes [Weideman & Trefethen 2007];
- the pole S = r of the cdf is at tau = i y; its part of the rule's error is known, 1 / (1 + e^{2 pi y / h}), and added.

Largest errors of the cdf found over Student-t, Laplace, logistic (counts 0.3 to 3000) and Matern-3/2 at tilts 0 to 1e4
and probabilities 1e-12 to 1 - 1e-9: 6e-9 with 12 nodes, 2e-10 with 16, 3e-12 with 24 (and rounding of log phi).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.distributions.laplace_inversion.radial_transform import RadialTransform
from gpext.distributions.laplace_inversion.saddle_model import SaddleModel

_DECAY = {12: 23.0, 16: 28.0, 24: 36.0, 64: 36.0, 96: 36.0}  # by how many nats the integrand falls over the nodes
_CLEARANCE = 2.5  # distance of the vertex from the singularities, in units of 1 / w
_ALIASING = math.pi / 2  # largest step in units of 1 / (w - the vertex' own w)


@dataclass(frozen=True)
class Laws:
    """P(W <= w), P(W > w), the density and its derivative."""

    cdf: Tensor
    survival: Tensor
    density: Tensor
    slope: Tensor


@dataclass(frozen=True)
class Contour:
    """Nodes and terms of the rule for the w it was made for; good for any near it."""

    w: Tensor  # (*shape)
    nodes: Tensor  # S - r, (Q, *shape) complex128
    terms: Tensor  # e^{(S - r) w} phi(S) / phi(r) dS / (pi i), likewise
    pole: Tensor  # -2 pi y / h, (*shape)

    @classmethod
    def through(
        cls,
        transform: RadialTransform,
        r: Tensor,  # (*batch), >= 0 and finite
        w: Tensor,  # (*shape), positive and finite
        model: SaddleModel,  # (*batch), at a reference point
        num_nodes: int,
        limit: Tensor | float = math.inf,
    ) -> Contour:
        """The contour through the saddle point of w, or the limit if that is left of it; nodes as many as in _DECAY."""
        model = SaddleModel.matched(transform, model.vertex(w, _CLEARANCE).clamp_max(limit))
        vertex = model.vertex(w, _CLEARANCE).clamp_max(limit)
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
        nodes = s - r
        terms = transform.ratio(s, r, nodes * w) * slope
        gap = vertex - r
        height = 2 * gap / (1 + (1 - 4 * bend * gap).clamp_min(0).sqrt())  # y, of the pole
        return cls(w, nodes, terms, -2 * math.pi * height / step)

    def laws(self) -> Laws:
        """Values of the quadrature rule at w."""
        integral = (self.terms / self.nodes).real.sum(0)
        slope = (self.terms * self.nodes).real.sum(0)
        cdf, survival = torch.sigmoid(self.pole) + integral, torch.sigmoid(-self.pole) - integral
        return Laws(cdf, survival, self.terms.real.sum(0), slope)

    def moved(self, w: Tensor) -> Contour:
        """The same contour for a w nearby."""
        return Contour(w, self.nodes, self.terms * torch.exp(self.nodes * (w - self.w)), self.pole)

    def last_term(self) -> Tensor:
        """A bound on the truncation error of the cdf."""
        return (self.terms[-1] / self.nodes[-1]).abs()
