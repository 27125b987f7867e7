r"""A completely monotone phi of the user's as the Laplace transform it is: log phi, its derivatives, the moments of w.

    phi(r) = int e^{-r w} p(w) dw,    E[w | c] = -(log phi)'(r),    Var[w | c] = (log phi)''(r),    r = c^2

Differentiating log phi directly is right until c is small: in (1 + c) e^{-c}, say, the first derivative is the
difference of two numbers near one, and E[w] = -psi'(c) / (2c) with psi(c) = log phi(c^2) loses as many digits as c has
zeros. There we integrate the second derivative, which does not cancel, from the limit at zero:

    psi'(c) = psi'(0+) + c int_0^1 psi''(c s) ds.

The variance (psi''(c) - psi'(c) / c) / (4 c^2) = -psi'(0+) / (4 c^3) + U(0) / c + W(c) is extrapolated: W and
U(c) = U(0) + c W(c) are smooth, and known where c is not small.
"""

from __future__ import annotations

import math
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
_EXPONENTS = 10  # halvings of the range of exponents 2^-1023 .. 2^1024
# The variance is extrapolated from eight places up to where -log phi is about 0.005.
_VARIANCE_DEPTH, _PLACES = 0.005, 8
_ROUNDING = 1e-9


class InversionError(ValueError):
    """A phi cannot be inverted numerically at some point; the message names the point and the requirement.

    Example:
        >>> import torch
        >>> RadialTransform(phi=lambda r: torch.exp(-r)).checked(torch.tensor([1e4]))
        Traceback (most recent call last):
            ...
        gpext.distributions.laplace_inversion.radial_transform.InversionError: log phi is not finite at r = 10000 ...
    """


class RadialTransform:
    """log phi of the phi or the log phi that a user gave; all in float64.

    Args:
        phi: completely monotone, phi(0) = 1, elementwise on a tensor of any shape.
        log_phi: its logarithm; give this instead where phi would underflow. Exactly one of the two.

    Raises:
        ValueError: neither or both are given.

    Example:
        >>> import torch
        >>> transform = RadialTransform(phi=lambda r: torch.exp(-r))
        >>> r = torch.tensor([0.0, 2.0]).double()
        >>> transform(r), transform.mean(r)  # log phi(r) and -(log phi)'(r)
        (tensor([ 0., -2.], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))
    """

    def __init__(
        self, phi: Callable[[Tensor], Tensor] | None = None, log_phi: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        if (phi is None) == (log_phi is None):
            raise ValueError("expected exactly one of phi and log_phi; got " + ("none" if phi is None else "both"))
        self.phi, self.log_phi = phi, log_phi

    def __call__(self, r: Tensor) -> Tensor:
        """Return log phi(r) as the user wrote it, with no check of its values, in whatever dtype r has.

        Raises:
            TypeError: phi does not return a tensor.
        """
        value = self._given(r)
        return value if self.phi is None else value.detach().log() + _log_ratio(value)

    def checked(self, r: Tensor) -> Tensor:
        """Return log phi(r); raises InversionError where it is not finite."""
        value = self(r.double())
        if not bool(value.isfinite().all()):
            where = r.broadcast_to(value.shape)[~value.isfinite()].flatten()[0].item()
            remedy = "give log_phi instead of phi" if self.phi is not None else "make log_phi stable there"
            raise InversionError(f"log phi is not finite at r = {where:.6g} (phi underflowed or overflowed); {remedy}.")
        return value

    def shape(self, r: Tensor) -> torch.Size:
        """Return the shape of log phi(r).

        Raises:
            TypeError: phi does not return a tensor.
        """
        return self._given(r).shape

    def _given(self, r: Tensor) -> Tensor:
        """Return phi(r) or log phi(r), whichever the user gave."""
        function, name = (self.phi, "phi") if self.log_phi is None else (self.log_phi, "log_phi")
        assert function is not None  # by construction
        value = function(r)
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must map tensors to tensors, elementwise; it returned {type(value).__name__}.")
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
        with torch.enable_grad():
            c = r.detach().double().sqrt()
            c = c.broadcast_to(self(c.square()).shape)
            near = (c < 1) & (-self(c.square()).detach() < _NEAR_ZERO)
            safe = torch.where(near, 1.0, c)
            w = -0.5 * self._slopes(safe, 1) / safe
            if bool(near.any()):
                w = torch.where(near, self._mean_near_zero(torch.where(near, c, 1.0)), w)
        return w.detach().to(r.dtype)

    def variance(self, r: Tensor) -> Tensor:
        """Return Var[w | c] at r = c^2 in the dtype of r; parameters inside phi are not differentiated."""
        c = r.detach().double().sqrt()
        c = c.broadcast_to(self(c.square()).shape)
        reach = self.fallen(torch.zeros_like(c), _VARIANCE_DEPTH).sqrt()
        near = c < reach / _PLACES
        variance = self._variance(torch.where(near, reach, c))
        if bool(near.any()):
            variance = torch.where(near, self._variance_near_zero(torch.where(near, c, 0.0), reach), variance)
        return variance.to(r.dtype)

    def fallen(self, r: Tensor, depth: Tensor | float) -> Tensor:
        """The argument at which log phi has fallen from r by this depth, its distance up to a factor of two."""
        start = torch.where(r == 0, 0.0, self(r))
        exponent = torch.zeros_like(start)
        for k in range(_EXPONENTS):
            deeper = start - self(r + torch.exp2(exponent)) > depth
            exponent = exponent + torch.where(deeper, -1.0, 1.0) * 2.0 ** (_EXPONENTS - 1 - k)
        return r + torch.exp2(exponent)

    def cumulants(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first three cumulants of w at r > 0, by differentiating log phi directly."""
        with torch.enable_grad():
            r = r.detach().clone().requires_grad_(True)
            first = -self._derivative(self._to_differentiate(r), r)
            second = -self._derivative(first, r)
            third = -self._derivative(second, r, create_graph=False)
        return first.detach(), second.detach(), third.detach()

    def _mean_near_zero(self, c: Tensor) -> Tensor:
        nodes, weights = (t.view((-1,) + (1,) * c.dim()) for t in gauss_legendre(5, c.dtype, c.device))  # on [0, 1]
        bend = self._slopes(c.clamp_min(_SMALLEST) * nodes, 2)  # (5, ..., N)
        slope = self._slope_at_zero(c)
        return -0.5 * (torch.where(slope == 0, 0.0, slope / c) + (weights * bend).sum(0))

    def _variance(self, c: Tensor) -> Tensor:
        return 0.25 * (self._slopes(c, 2) - self._slopes(c, 1) / c) / c.square()

    def _variance_near_zero(self, c: Tensor, reach: Tensor) -> Tensor:
        fractions = torch.arange(1, _PLACES + 1, dtype=c.dtype, device=c.device) / _PLACES
        places = reach * fractions.view((-1,) + (1,) * c.dim())  # (8, ..., N)
        slope = self._slope_at_zero(c)
        singular = slope / (4 * places.square())
        smooth = places * self._variance(places) + singular  # U
        at_zero = _extrapolated(smooth, torch.zeros_like(c))
        noise = _ROUNDING * smooth.abs().amax(0) + 1e-3 * _ROUNDING * singular.abs().amax(0)
        at_zero = torch.where(at_zero.abs() < noise, 0.0, at_zero)
        rest = _extrapolated((smooth - at_zero) / places, c / reach)  # W
        poles = torch.where(slope == 0, 0.0, -slope / (4 * c**3)) + torch.where(at_zero == 0, 0.0, at_zero / c)
        return poles + rest

    def _slope_at_zero(self, like: Tensor) -> Tensor:
        """psi'(0+): zero if the slope is still falling in proportion to c."""
        slope, nearby = (self._slopes(torch.full_like(like, at), 1) for at in (_LIMIT, 1e10 * _LIMIT))
        return torch.where(slope.abs() < 0.5 * nearby.abs(), 0.0, slope)

    def _slopes(self, c: Tensor, order: int) -> Tensor:
        """Return the derivative of psi(c) = log phi(c^2) of this order."""
        c = c.detach().clone().requires_grad_(True)
        value = self._to_differentiate(c.square())
        for k in range(order):
            value = self._derivative(value, c, create_graph=k + 1 < order)
        return value.detach()

    def _to_differentiate(self, r: Tensor) -> Tensor:
        """Return log phi(r) up to a constant."""
        value = self._given(r)
        return value if self.phi is None else _log_ratio(value)

    @staticmethod
    def _derivative(value: Tensor, at: Tensor, *, create_graph: bool = True) -> Tensor:
        if not value.requires_grad:  # a constant
            return torch.zeros_like(at)
        (slope,) = torch.autograd.grad(value.sum(), at, create_graph=create_graph, materialize_grads=True)
        return slope


def _log_ratio(value: Tensor) -> Tensor:
    """Return log(value / value) = 0, whose derivatives of any order are those of log(value); -inf at zero.

    These have powers of the value in denominators, which underflow long before it does.
    """
    size = value.detach()
    return (value / torch.where(size == 0, 1, size)).log()


def _extrapolated(values: Tensor, at: Tensor) -> Tensor:
    """The polynomial through the values (8, ...) at 1/8, 2/8, ..., 1, at the places `at` (...)."""
    offsets = [_PLACES * at - k for k in range(1, _PLACES + 1)]
    total = torch.zeros_like(at)
    for k, value in enumerate(values):
        others = math.prod((offset for j, offset in enumerate(offsets) if j != k), start=torch.ones_like(at))
        total = total + value * others / math.prod(k - j for j in range(_PLACES) if j != k)
    return total
