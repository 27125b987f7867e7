r"""Laplace noise about a Gaussian: density and distribution function of f + e, f ~ N(m, v), e ~ Laplace(b), closed.

With d = |y - m|, s = sqrt v, M Mills' ratio and phi the density of the standard normal distribution, and the weights

    A(d) = phi(d / s) M(s / b - d / s),     A(-d) = phi(d / s) M(s / b + d / s)

of f on m's side of y and beyond it (:mod:`gpext.quadrature.closed_tilted`),

    p(y) = (A(d) + A(-d)) / (2 b),     P(Y <= m - d) = Phi(-d / s) + A(d) / 2 - A(-d) / 2
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpext.distributions.predictive.compound import AdditiveNoisePredictive
from gpext.quadrature import laplace_tilted_moments
from gpext.quadrature.closed_tilted import laplace_sides

_NOTHING = 1e-30  # of b^2, for a variance of zero


class CompoundLaplace(AdditiveNoisePredictive):
    """`AdditiveNoisePredictive` of Laplace noise.

    Example:
        >>> import torch
        >>> from torch.distributions import Laplace
        >>> y = CompoundLaplace(lambda f: Laplace(f, 1.0), torch.zeros(1).double(), torch.ones(1).double())
        >>> y.cdf(torch.zeros(1).double())
        tensor([0.5000], dtype=torch.float64)
    """

    def _log_density(self, value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return log_density(value - mean, variance, self._scale_like(mean))

    def _cdf(self, value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        d, scale = value - mean, self._scale_like(mean)
        sd = _positive(variance, scale).sqrt()
        far = d.abs() / sd
        log_near, odds = laplace_sides(far, sd / scale)
        tail = torch.special.ndtr(-far) + 0.5 * (log_near.exp() - (log_near + odds).exp())  # of the smaller side
        return torch.where(d < 0, tail, 1 - tail)

    def _scale_like(self, mean: Tensor) -> Tensor:
        given: Any = self.conditional(mean)
        return given.scale


def log_density(d: Tensor, variance: Tensor, scale: Tensor) -> Tensor:
    """Return log p(m + d) of the sum, elementwise; first derivatives.

    Args:
        d: y - m.
        variance: v, not negative.
        scale: b.
    """
    d, variance, scale = torch.broadcast_tensors(d, variance, scale)
    parts = d.double(), _positive(variance, scale).double(), scale.double().square()
    return laplace_tilted_moments(*parts, 1.0).log_normalizer.to(d)


def _positive(variance: Tensor, scale: Tensor) -> Tensor:
    """Return variances of which those that are zero are next to nothing beside the noise."""
    return torch.where(variance > 0, variance, _NOTHING * scale.square())
