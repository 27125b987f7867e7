r"""Distribution function, quantiles and shortest arcs of any smooth density on the circle.

    theta = loc + 2 atan(rho tan((x - pi) / 2)),    q(x) = p(theta) dtheta/dx = sum_k c_k e^{ikx},    0 <= x < 2 pi

The map takes the circle onto itself and a peak of width rho at `loc` onto one of width 1, so that M equidistant values
of q, of a peak however sharp, give its Fourier series (for a von Mises density of any concentration 64 leave an error
of 1e-13). The series is integrated term by term, from the cut opposite to `loc`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.callers import warn_caller
from gpext.distributions.predictive.newton_quantiles import quantile_between
from gpext.quadrature import QuadratureWarning

_WIDTH = 2.0  # rho, in standard deviations of a narrow peak
_FEWEST, _MOST = 64, 1024  # values of q
_TOLERANCE = 1e-9  # of the distribution function
_STARTS = 128  # of arcs that are compared
_BISECTIONS = 32  # of the best one's neighbourhood


@dataclass(frozen=True)
class AngleTable:
    """A density as a Fourier series, its integral 1; float64, whatever `dtype` was asked for; no gradients."""

    loc: Tensor  # (...)
    rho: Tensor  # (...)
    series: Tensor  # 2 c_k / c_0 for k = 1, ..., K (K, ...), complex
    dtype: torch.dtype  # of answers

    @classmethod
    @torch.no_grad()
    def of(cls, density: Callable[[Tensor], Tensor], loc: Tensor, concentration: Tensor) -> AngleTable:
        """Return the table of a density.

        A :class:`QuadratureWarning` says if 1024 values of it did not suffice.

        Args:
            density: p, maps angles (M, ...) to values alike.
            loc: where its peak is, roughly (...); its dtype is that of answers.
            concentration: of a von Mises density as wide, roughly (...).
        """
        dtype, loc = loc.dtype, loc.double()
        rho = _WIDTH / (concentration.double() + _WIDTH**2).sqrt()
        x = _equidistant(_FEWEST, 0.0, loc)
        values = _in_x(density, x, loc, rho)
        while True:
            c = torch.fft.rfft(values, dim=0)[:-1] / values.sum(0)
            error = float(c[-max(len(c) // 8, 1) :].abs().max()) / len(c)
            if error <= _TOLERANCE or len(values) >= _MOST:
                break
            between = _in_x(density, _equidistant(len(values), 0.5, loc), loc, rho)
            values = torch.stack([values, between], 1).flatten(0, 1)
        if error > _TOLERANCE:
            warn_caller(
                f"the distribution function of an angle has an error of up to about {error:.1e}.",
                QuadratureWarning,
            )
        return cls(loc, rho, 2 * c[1:], dtype)

    def cdf(self, x: Tensor) -> Tensor:
        """The probability between 0 and x, (..., like loc)."""
        k = torch.arange(1, len(self.series) + 1, device=x.device).view(-1, *(1,) * self.loc.dim())
        integrated = self.series / (1j * k)
        return (x + (_power_series(integrated, x) - integrated.sum(0)).real) / (2 * math.pi)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log q(x) (..., like loc), nan where it is lost in rounding."""
        return (1 + _power_series(self.series, x).real).log() - math.log(2 * math.pi)

    def log_density(self, x: Tensor) -> Tensor:
        """Log p(theta(x))."""
        return self.log_prob(x) - _stretch(x, self.rho).log()

    def quantile(self, probability: Tensor) -> Tensor:
        """The x below which a probability in [0, 1] lies, (..., like loc)."""
        low = torch.zeros(torch.broadcast_shapes(probability.shape, self.loc.shape)).to(self.loc)
        return quantile_between(self, probability, low, low + 2 * math.pi)

    def offset(self, x: Tensor) -> Tensor:
        """Return theta - loc, from -pi at x = 0 to pi at x = 2 pi."""
        half = 0.5 * (x - math.pi)
        return 2 * torch.atan2(self.rho * half.sin(), half.cos())

    def place(self, offset: Tensor) -> Tensor:
        """Return the x of theta - loc in [-pi, pi]."""
        half = 0.5 * offset
        return math.pi + 2 * torch.atan2(half.sin(), self.rho * half.cos())

    def shortest_arc(self, probability: float) -> tuple[Tensor, Tensor]:
        """Return centre - loc and half-width of the shortest arc with a probability, each (...).

        Its ends have one density: the best of 128 starts is improved until they have.
        """
        start = _equidistant(_STARTS, 0.0, self.loc).expand(_STARTS, *self.loc.shape)
        _, width = self._arc(start, probability)
        best = start.gather(0, width.argmin(0, keepdim=True)).squeeze(0)
        low, high = best - 2 * math.pi / _STARTS, best + 2 * math.pi / _STARTS
        for _ in range(_BISECTIONS):
            start = 0.5 * (low + high)
            end, _ = self._arc(start, probability)
            rises = self.log_density(start) < self.log_density(end)
            low, high = torch.where(rises, start, low), torch.where(rises, high, start)
        _, width = self._arc(start, probability)
        return self._turned(start) + 0.5 * width, 0.5 * width

    def _arc(self, start: Tensor, probability: float) -> tuple[Tensor, Tensor]:
        """Return the end, as an x, and the width, as an angle, of arcs that start at x = start, of any turn."""
        within = torch.remainder(start, 2 * math.pi)
        reached = self.cdf(within) + probability
        end = self.quantile(torch.remainder(reached, 1.0))
        width = self.offset(end) + 2 * math.pi * (reached >= 1).to(end) - self.offset(within)
        return end, width

    def _turned(self, x: Tensor) -> Tensor:
        return self.offset(torch.remainder(x, 2 * math.pi))


def _equidistant(size: int, first: float, like: Tensor) -> Tensor:
    """Return x (size, 1, ...), the first one at a share of the step."""
    x = (torch.arange(size, dtype=torch.float64, device=like.device) + first) * (2 * math.pi / size)
    return x.view(-1, *(1,) * like.dim())


def _in_x(density: Callable[[Tensor], Tensor], x: Tensor, loc: Tensor, rho: Tensor) -> Tensor:
    """Return q(x) (M, ...)."""
    half = 0.5 * (x - math.pi)
    theta = loc + 2 * torch.atan2(rho * half.sin(), half.cos())
    return density(theta).double() * _stretch(x, rho)


def _stretch(x: Tensor, rho: Tensor) -> Tensor:
    """Return dtheta/dx."""
    half = 0.5 * (x - math.pi)
    return rho / (half.cos().square() + (rho * half.sin()).square())


def _power_series(coefficients: Tensor, x: Tensor) -> Tensor:
    """Return sum_k a_k e^{ikx} by Horner's rule, a_1, a_2, ... along the first dimension."""
    z = torch.polar(torch.ones_like(x), x)
    total = torch.zeros_like(z)
    for a in reversed(coefficients.unbind(0)):
        total = (total + a) * z
    return total
