r"""The generalised inverse Gaussian distribution.

    p(w) \propto w^{p - 1} exp(-(a w + b / w) / 2)

In x = log(w / mode) it is log-concave with its mode at 0 [Devroye 2014]:

    p(x) \propto e^{g(x)},    g(x) = p x - a mode (e^x - 1) / 2 - b (e^-x - 1) / (2 mode)
    mode = (p + m) / a = b / (m - p),    m = sqrt(p^2 + a b)

The constant (a Bessel function K_p), the moments and the cdf are integrals over x. By the trapezoidal rule the first
two are exact to rounding: e^g is entire and falls doubly exponentially.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import constraints

from gpext.distributions.mixing.generalized_inverse_gaussian_draws import half_integer_draws, rejection_draws
from gpext.distributions.positive import PositiveDistribution, broadcast_floating, with_slopes
from gpext.quadrature import gauss_legendre

_NEGLIGIBLE = 45.0  # nats below the mode
_BISECTIONS = 12  # of the logarithm of a distance: to one per cent
_STEP = 0.2  # of the trapezoidal rule in x, and in standard deviations where the peak is narrow: 0.6
_PANELS = 12  # of the cdf, with 16 Gauss-Legendre nodes each
_MOST_HALVES = 20  # largest order whose mixture is worth its weights


class GeneralizedInverseGaussian(PositiveDistribution):
    """Generalised inverse Gaussian w > 0.

    Args:
        order: p, any real number.
        a: rate of the upper tail, non-negative; zero, with order < 0, gives the inverse gamma distribution.
        b: rate of the lower tail, non-negative; zero, with order > 0, gives the gamma distribution.
        validate_args: as in torch.distributions.

    Raises:
        ValueError: the density has no finite integral.

    Example:
        >>> import torch
        >>> w = GeneralizedInverseGaussian(torch.tensor(-0.5), torch.tensor(1.0), torch.tensor(1.0))
        >>> w.mean  # of order -1/2 it is an inverse Gaussian
        tensor(1.)
    """

    arg_constraints = {"order": constraints.real, "a": constraints.nonnegative, "b": constraints.nonnegative}

    def __init__(
        self,
        order: Tensor | float,
        a: Tensor | float,
        b: Tensor | float,
        validate_args: bool | None = None,
    ) -> None:
        self.order, self.a, self.b = broadcast_floating(order, a, b)
        super().__init__(self.order.shape, validate_args=validate_args)
        improper = ((self.a == 0) & (self.order >= 0)) | ((self.b == 0) & (self.order <= 0))
        if bool(improper.any()):
            where = tuple(improper.nonzero()[0].tolist())
            raise ValueError(
                "a = 0 needs order < 0 and b = 0 needs order > 0; got order = "
                f"{self.order[where].item():.6g}, a = {self.a[where].item():.6g}, b = {self.b[where].item():.6g}."
            )

    @property
    def mean(self) -> Tensor:
        """E w; infinite if a = 0 and order >= -1."""
        return self._moments()[0].to(self.order.dtype)

    @property
    def variance(self) -> Tensor:
        """Var w; infinite if a = 0 and order >= -2."""
        return self._moments()[1].to(self.order.dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density, with first derivatives in everything; value and result broadcast with the batch shape."""
        if self._validate_args:
            self._validate_sample(value)
        with torch.no_grad():
            law = self._law()
            inside = (value > 0) & (value < math.inf)
            x = (torch.where(inside, value, 1.0).double() / law.mode).log()
            nodes, step = law.grid(law.reach(1))
            log_constant = torch.logsumexp(law.exponent(nodes), 0) + step.log()
            density = law.exponent(x) - log_constant - x - law.mode.log()
            density = torch.where(inside, density, -math.inf).to(self.order.dtype)
            w = torch.where(inside, value, 1.0).double()
            by_value = (self.order - 1) / w - 0.5 * (self.a - self.b / w.square())
            weights = torch.softmax(law.exponent(nodes), 0)
            by_order = w.log() - law.mode.log() - (weights * nodes).sum(0)
            by_a = 0.5 * (law.mode * (weights * nodes.exp()).sum(0) - w)
            by_b = 0.5 * ((weights * (-nodes).exp()).sum(0) / law.mode - 1 / w)
        pairs = ((value, by_value), (self.order, by_order), (self.a, by_a), (self.b, by_b))
        return with_slopes(density, *((x, torch.where(inside, slope, 0.0)) for x, slope in pairs))

    def cdf(self, value: Tensor) -> Tensor:
        """P(W <= value), relatively accurate in the lower tail; no gradient."""
        if self._validate_args:
            self._validate_sample(value)
        with torch.no_grad():
            law = self._law()
            inside = (value > 0) & (value < math.inf)
            x = (torch.where(inside, value, 1.0).double() / law.mode).log()
            at_x = law.exponent(x)
            # A tail is integrated as far as it counts for itself, the rest as far as it counts for the whole.
            x, at_x = torch.broadcast_tensors(x, at_x)
            below = _mass(law, law.reach(-1, torch.where(x < 0, at_x, 0.0)), x)
            above = _mass(law, x, law.reach(1, torch.where(x > 0, at_x, 0.0)))
            return torch.where(inside, below / (below + above), torch.where(value > 0, 1.0, 0.0)).to(self.order.dtype)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape; without rejection if all orders are the same half-integer."""
        with torch.no_grad():
            shape = self._extended_shape(torch.Size(sample_shape))
            order, a, b = (t.double().expand(shape) for t in (self.order, self.a, self.b))
            first = float(self.order.flatten()[0]) if self.order.numel() else 0.5
            if bool((self.order == first).all()) and (first - 0.5).is_integer() and abs(first) < _MOST_HALVES:
                draws = half_integer_draws(first, a, b, generator)
            else:
                draws = rejection_draws(order, a, b, generator)
            return draws.to(self.order.dtype)

    def _law(self) -> _LogLaw:
        order, a, b = self.order.double(), self.a.double(), self.b.double()
        steepness = (order.square() + a * b).sqrt()
        mode = torch.where(order > 0, (order + steepness) / a, b / (steepness - order))
        return _LogLaw(order, a * mode, b / mode, mode)

    def _moments(self) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            law, proper = self._law(), self.a > 0
            # w^2 p(w) may live far above p(w): the grid reaches as far as it does.
            raised = GeneralizedInverseGaussian(law.order + torch.where(proper, 2.0, 0.0), self.a, self.b)._law()
            shift = (raised.mode / law.mode).log()
            nodes, _ = law.grid(torch.maximum(law.reach(1), shift + raised.reach(1)))
            weights = torch.softmax(law.exponent(nodes), 0)
            ratio = nodes.exp()
            mean = (weights * ratio).sum(0)
            variance = (weights * (ratio - mean).square()).sum(0)
            # a = 0: inverse gamma
            scale, shape = 0.5 * law.falling, -law.order
            mean = torch.where(proper, mean, torch.where(shape > 1, scale / (shape - 1), math.inf))
            inverse = scale.square() / ((shape - 1).square() * (shape - 2))
            variance = torch.where(proper, variance, torch.where(shape > 2, inverse, math.inf))
            return law.mode * mean, law.mode.square() * variance


@dataclass(frozen=True)
class _LogLaw:
    """g(x) = p x - (A / 2) (e^x - 1) - (B / 2) (e^-x - 1), A = a mode, B = b / mode, (A - B) / 2 = p; float64."""

    order: Tensor
    rising: Tensor  # A
    falling: Tensor  # B
    mode: Tensor

    def exponent(self, x: Tensor) -> Tensor:
        """g(x)."""
        upper = torch.where(self.rising > 0, self.rising * torch.expm1(x), 0.0)
        lower = torch.where(self.falling > 0, self.falling * torch.expm1(-x), 0.0)
        return self.order * x - 0.5 * (upper + lower)

    def reach(self, side: int, level: Tensor | float = 0.0) -> Tensor:
        """The x on this side of the mode where g has fallen 45 below the level."""
        shape = torch.broadcast_shapes(self.order.shape, torch.as_tensor(level).shape)
        low, high = self.order.new_full(shape, -30.0), self.order.new_full(shape, 11.0)  # of log |x|
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            fallen = ~(self.exponent(side * middle.exp()) > level - _NEGLIGIBLE)
            low, high = torch.where(fallen, low, middle), torch.where(fallen, middle, high)
        return side * high.exp()

    def grid(self, high: Tensor) -> tuple[Tensor, Tensor]:
        """Equidistant nodes (Q, *shape) from where g begins to count up to `high`, and their distance."""
        low = self.reach(-1)
        finest = (3 * _STEP * (0.5 * (self.rising + self.falling)).rsqrt()).clamp_max(_STEP)
        num = int(((high - low) / finest).ceil().max()) if low.numel() else 1
        fractions = torch.linspace(0, 1, num + 1, dtype=low.dtype, device=low.device).view((-1,) + (1,) * low.dim())
        return low + (high - low) * fractions, (high - low) / num


def _mass(law: _LogLaw, left: Tensor, right: Tensor) -> Tensor:
    """Integrate e^g over [left, right]."""
    nodes, weights = (t.view((-1,) + (1,) * left.dim()) for t in gauss_legendre(16, left.dtype, left.device))
    length = (right - left) / _PANELS
    total = torch.zeros_like(length)
    for panel in range(_PANELS):
        total += (weights * law.exponent(left + length * (panel + nodes)).exp()).sum(0)
    return total * length
