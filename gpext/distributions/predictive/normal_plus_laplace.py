r"""Laplace noise about a Gaussian: density and distribution function of f + e, f ~ N(m, v), e ~ Laplace(b), closed.

With d = y - m, s = sqrt v, and M Mills' ratio and phi the density of the standard normal distribution,

    p(y) = (A(d) + A(-d)) / (2 b),     P(Y <= y) = Phi(d / s) - A(d) / 2 + A(-d) / 2

    A(d) = e^(v / (2 b^2) - d / b) Phi(-a) = phi(d / s) M(a),     a = s / b - d / s

The first form of A keeps its digits where a < 0, the second where a > 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpext.distributions.predictive.compound import AdditiveNoisePredictive
from gpext.special import log_mills_ratio, log_ndtr

_NOTHING = 1e-30  # for a variance of zero


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
        far = d.abs()
        near, other = (_log_term(far, variance, scale, sign).exp() for sign in (1, -1))
        gaussian = torch.special.ndtr(-far / variance.clamp_min(_NOTHING).sqrt())
        tail = gaussian + 0.5 * (near - other)  # of the smaller side
        return torch.where(d < 0, tail, 1 - tail)

    def _scale_like(self, mean: Tensor) -> Tensor:
        given: Any = self.conditional(mean)
        return given.scale


def log_density(d: Tensor, variance: Tensor, scale: Tensor) -> Tensor:
    """Return log p(m + d) of the sum, elementwise; differentiable.

    Args:
        d: y - m.
        variance: v, not negative.
        scale: b.
    """
    terms = [_log_term(d, variance, scale, sign) for sign in (1, -1)]
    return torch.logaddexp(*terms) - (2 * scale).log()


def _log_term(d: Tensor, variance: Tensor, scale: Tensor, sign: int) -> Tensor:
    """Return log A(sign d)."""
    v = torch.where(variance > 0, variance, _NOTHING * scale.square())
    s, d = v.sqrt(), sign * d
    a = s / scale - d / s
    is_high = a > 0
    high, low = torch.where(is_high, a, 1.0), torch.where(is_high, -1.0, a)
    of_high = -0.5 * (d / s).square() + log_mills_ratio(high)
    of_low = 0.5 * v / scale.square() - d / scale + log_ndtr(-low)
    return torch.where(is_high, of_high, of_low)
