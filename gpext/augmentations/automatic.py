"""The scale mixture of any phi: its moments by automatic differentiation [GWO20 Sec. 3.3.1].

Differentiating log phi directly is right until c is small: in (1 + c) e^{-c}, say, the first derivative is the
difference of two numbers near one, and E[w] = -psi'(c) / (2c) with psi(c) = log phi(c^2) loses as many digits as c has
zeros. There we integrate the second derivative, which does not cancel, from the limit at zero:

    psi'(c) = psi'(0+) + c int_0^1 psi''(c s) ds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpext.augmentations.radial import RadialFunction
from gpext.quadrature import gauss_legendre

# Closer to the origin than this, in units of phi's own scale (-log phi), the integral form is used; a five-point
# Gauss-Legendre rule is exact there to rounding, and the direct form has lost two digits at most.
_NEAR_ZERO = 1e-3
# Stands for c -> 0+. Its square and its powers up to the sixth are normal float64 numbers.
_LIMIT = 1e-40


class AutomaticRadial(RadialFunction):
    """The radial function given by the user's phi or log phi.

    Evaluated in float64 whatever the dtype of the argument: phi itself underflows early in float32.

    Args:
        phi: completely monotone, phi(0) = 1, elementwise on a tensor of any shape.
        log_phi: its logarithm; give this instead where phi would underflow. Exactly one of the two.

    Raises:
        ValueError: neither or both are given; or, when evaluated, phi has underflowed to zero or is not finite.
    """

    def __init__(
        self, phi: Callable[[Tensor], Tensor] | None = None, *, log_phi: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        if (phi is None) == (log_phi is None):
            raise ValueError("expected exactly one of phi and log_phi; got " + ("none" if phi is None else "both"))
        self._phi, self._log_phi = phi, log_phi

    def log_phi(self, r: Tensor) -> Tensor:
        """Return log phi(r); raises ValueError where it is not finite."""
        value = self.evaluate(r.double())
        if not bool(value.isfinite().all()):
            where = r.broadcast_to(value.shape)[~value.isfinite()].flatten()[0].item()
            remedy = "give log_phi instead of phi" if self._phi is not None else "make log_phi stable there"
            raise ValueError(f"log phi is not finite at r = {where:.6g} (phi underflowed or overflowed); {remedy}.")
        return value.to(r.dtype)

    def mean(self, r: Tensor) -> Tensor:
        """Return E[w | c] at r = c^2; parameters inside phi are not differentiated."""
        with torch.enable_grad():
            c = r.detach().double().sqrt()
            c = c.broadcast_to(self.evaluate(c.square()).shape)
            near = (c < 1) & (-self.evaluate(c.square()).detach() < _NEAR_ZERO)
            slope = self._slope(torch.where(near, torch.ones_like(c), c))
            w = -0.5 * slope / torch.where(near, torch.ones_like(c), c)
            if bool(near.any()):
                w = torch.where(near, self._mean_near_zero(torch.where(near, c, torch.full_like(c, _LIMIT))), w)
        return w.detach().to(r.dtype)

    def _mean_near_zero(self, c: Tensor) -> Tensor:
        c = torch.maximum(c, torch.full_like(c, _LIMIT))
        nodes, weights = gauss_legendre(5, c.dtype, c.device)  # on [0, 1]
        column = (-1,) + (1,) * c.dim()
        points = (c * nodes.view(column)).requires_grad_(True)  # (5, ..., N)
        slope = self._slope(points, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), points)
        slope_at_zero = self._slope(torch.full_like(c, _LIMIT))
        return -0.5 * (slope_at_zero / c + (weights.view(column) * bend).sum(0))

    def _slope(self, c: Tensor, *, create_graph: bool = False) -> Tensor:
        """Return psi'(c), psi(c) = log phi(c^2)."""
        c = c if c.requires_grad else c.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.evaluate(c.square()).sum(), c, create_graph=create_graph)
        return slope

    def evaluate(self, r: Tensor) -> Tensor:
        """Return log phi(r) as the user wrote it, with no check, in whatever dtype r has."""
        if self._log_phi is not None:
            return self._log_phi(r)
        assert self._phi is not None  # by construction
        return self._phi(r).log()
