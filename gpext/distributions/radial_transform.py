r"""A completely monotone phi of the user's as the Laplace transform it is: log phi, its derivatives, the moments of w.

    phi(r) = int e^{-r w} p(w) dw,    E[w | c] = -(log phi)'(r),    Var[w | c] = (log phi)''(r),    r = c^2

Differentiating log phi directly is right until c is small: in (1 + c) e^{-c}, say, the first derivative is the
difference of two numbers near one, and E[w] = -psi'(c) / (2c) with psi(c) = log phi(c^2) loses as many digits as c has
zeros. There we integrate the next derivative, which does not cancel, from the limit at zero:

    psi'(c) / c = psi'(0+) / c + int_0^1 psi''(c s) ds,
    Var[w | c] = (psi'(c) / c)' / (4c) = (int_0^1 s psi'''(c s) ds - psi'(0+) / c^2) / (4c).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpext.quadrature import gauss_legendre

# Closer to the origin than this, in units of phi's own scale (-log phi), the integral form is used; a five-point
# Gauss-Legendre rule is exact there to rounding, and the direct form has lost two digits at most.
_NEAR_ZERO = 1e-3
# Stand for c -> 0+ in first and in higher derivatives; the rounding errors of the latter grow with 1 / c.
_LIMIT = 1e-40
_SMALLEST = 1e-8
_LARGEST_EXPONENT = 700.0


class RadialTransform:
    """log phi of the phi or the log phi that a user gave; all in float64.

    Args:
        phi: completely monotone, phi(0) = 1, elementwise on a tensor of any shape.
        log_phi: its logarithm; give this instead where phi would underflow. Exactly one of the two.

    Raises:
        ValueError: neither or both are given.
    """

    def __init__(
        self, phi: Callable[[Tensor], Tensor] | None = None, log_phi: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        if (phi is None) == (log_phi is None):
            raise ValueError("expected exactly one of phi and log_phi; got " + ("none" if phi is None else "both"))
        self.phi, self.log_phi = phi, log_phi

    def __call__(self, r: Tensor) -> Tensor:
        """Return log phi(r) as the user wrote it, with no check, in whatever dtype r has."""
        if self.log_phi is not None:
            return self.log_phi(r)
        assert self.phi is not None  # by construction
        return self.phi(r).log()

    def checked(self, r: Tensor) -> Tensor:
        """Return log phi(r); raises ValueError where it is not finite."""
        value = self(r.double())
        if not bool(value.isfinite().all()):
            where = r.broadcast_to(value.shape)[~value.isfinite()].flatten()[0].item()
            remedy = "give log_phi instead of phi" if self.phi is not None else "make log_phi stable there"
            raise ValueError(f"log phi is not finite at r = {where:.6g} (phi underflowed or overflowed); {remedy}.")
        return value

    def is_elementwise(self, device: torch.device) -> bool:
        """Whether parameters inside phi have no batch shape of their own."""
        return self(torch.ones(1, dtype=torch.float64, device=device)).shape == (1,)

    def ratio(self, s: Tensor, r: Tensor, exponent: Tensor) -> Tensor:
        """Return exp(exponent) phi(s) / phi(r) at complex128 s, phi(0) being 1.

        Raises:
            TypeError: phi does not take complex tensors.
        """
        function, name = (self.phi, "phi") if self.log_phi is None else (self.log_phi, "log_phi")
        assert function is not None  # by construction
        try:
            value = function(s)
        except (RuntimeError, TypeError) as error:
            raise TypeError(
                f"{name} must take complex128 tensors, for numerical inversion; it raised: {error}"
            ) from error
        if not value.is_complex():
            raise TypeError(f"{name} must be analytic: of a complex128 tensor it returned {value.dtype}.")
        if self.log_phi is not None:
            return torch.exp(exponent + (value - torch.where(r == 0, 0.0, self.log_phi(r))))
        assert self.phi is not None
        start = torch.where(r == 0, 1.0, self.phi(r))
        if bool((exponent.real < _LARGEST_EXPONENT).all()):
            return torch.exp(exponent) * value * start.reciprocal()
        return torch.where(value == 0, 0.0, torch.exp(exponent + torch.where(value == 0, 1.0, value / start).log()))

    def mean(self, r: Tensor) -> Tensor:
        """Return E[w | c] at r = c^2 in the dtype of r; parameters inside phi are not differentiated."""
        return self._moment(r, order=1)

    def variance(self, r: Tensor) -> Tensor:
        """Return Var[w | c] at r = c^2 in the dtype of r; parameters inside phi are not differentiated."""
        return self._moment(r, order=2)

    def cumulants(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first three cumulants of w at r > 0, by differentiating log phi directly."""
        with torch.enable_grad():
            r = r.detach().clone().requires_grad_(True)
            first = -self._derivative(self._to_differentiate(r), r)
            second = -self._derivative(first, r)
            third = -self._derivative(second, r, create_graph=False)
        return first.detach(), second.detach(), third.detach()

    def _moment(self, r: Tensor, order: int) -> Tensor:
        with torch.enable_grad():
            c = r.detach().double().sqrt()
            c = c.broadcast_to(self(c.square()).shape)
            near = (c < 1) & (-self(c.square()).detach() < _NEAR_ZERO)
            value = self._directly(torch.where(near, 1.0, c), order)
            if bool(near.any()):
                value = torch.where(near, self._near_zero(torch.where(near, c, 1.0), order), value)
        return value.detach().to(r.dtype)

    def _directly(self, c: Tensor, order: int) -> Tensor:
        if order == 1:
            return -0.5 * self._slopes(c, 1) / c
        return 0.25 * (self._slopes(c, 2) - self._slopes(c, 1) / c) / c.square()

    def _near_zero(self, c: Tensor, order: int) -> Tensor:
        nodes, weights = (t.view((-1,) + (1,) * c.dim()) for t in gauss_legendre(5, c.dtype, c.device))  # on [0, 1]
        bend = self._slopes(c.clamp_min(_SMALLEST) * nodes, order + 1)  # (5, ..., N)
        slope_at_zero, nearby = (self._slopes(torch.full_like(c, at), 1) for at in (_LIMIT, 1e10 * _LIMIT))
        if order == 1:  # a slope that is still falling has the limit 0
            slope_at_zero = torch.where(slope_at_zero.abs() < 0.5 * nearby.abs(), 0.0, slope_at_zero)
            return -0.5 * (torch.where(slope_at_zero == 0, 0.0, slope_at_zero / c) + (weights * bend).sum(0))
        return 0.25 * ((weights * nodes * bend).sum(0) - slope_at_zero / c / c) / c

    def _slopes(self, c: Tensor, order: int) -> Tensor:
        """Return the derivative of psi(c) = log phi(c^2) of this order."""
        c = c.detach().clone().requires_grad_(True)
        value = self._to_differentiate(c.square())
        for k in range(order):
            value = self._derivative(value, c, create_graph=k + 1 < order)
        return value.detach()

    def _to_differentiate(self, r: Tensor) -> Tensor:
        """Return log phi(r) up to a constant: derivatives of log phi have powers of phi in denominators."""
        if self.log_phi is not None:
            return self.log_phi(r)
        assert self.phi is not None  # by construction
        value = self.phi(r)
        return (value / value.detach()).log()

    @staticmethod
    def _derivative(value: Tensor, at: Tensor, *, create_graph: bool = True) -> Tensor:
        if not value.requires_grad:  # a constant
            return torch.zeros_like(at)
        (slope,) = torch.autograd.grad(value.sum(), at, create_graph=create_graph, materialize_grads=True)
        return slope
