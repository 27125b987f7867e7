"""phi(r) = (1 + r/nu)^(-(nu+1)/2): the Student-t, mixed by w ~ Gamma((nu+1)/2, rate nu) [GWO20 Tab. 1]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.augmentations.radial import RadialFunction
from gpext.distributions import Gamma
from gpext.quadrature import expected_log1p_square, smooth_expectation, trapezoid, trapezoid_nodes

_MOST_NODES = 90  # which take as long as the rule for any spread


@dataclass(frozen=True)
class StudentTRadial(RadialFunction):
    """The radial function of a Student-t density of unit scale.

    Args:
        deg_free: degrees of freedom nu > 0, broadcastable against the argument.

    Example:
        >>> import torch
        >>> StudentTRadial(torch.tensor(4.0)).mean(torch.tensor([0.0]))  # (nu + 1) / (2 nu)
        tensor([0.6250])
    """

    deg_free: Tensor

    def log_phi(self, r: Tensor) -> Tensor:
        """Return -(nu + 1)/2 log(1 + r/nu)."""
        return -0.5 * (self.deg_free + 1) * torch.log1p(r / self.deg_free)

    def mean(self, r: Tensor) -> Tensor:
        """Return (nu + 1) / (2 (nu + r)): the tilted Gamma((nu+1)/2, rate nu + r) has this mean."""
        return 0.5 * (self.deg_free + 1) / (self.deg_free + r)

    def mixing(self, r: Tensor) -> Gamma:
        """Return Gamma((nu + 1) / 2, rate nu + r)."""
        return Gamma(0.5 * (self.deg_free + 1), self.deg_free + r)

    def mixing_of_power(self, r: Tensor, power: Tensor) -> Gamma:
        """Return Gamma(power (nu + 1) / 2, rate nu + r)."""
        return Gamma(0.5 * power * (self.deg_free + 1), self.deg_free + r)

    def expected_log_phi(self, gap: Tensor, variance: Tensor) -> Tensor:
        """Return -(nu + 1)/2 E[log(1 + t^2)], t = z / sqrt(nu), by the faster of two fixed rules."""
        gap, variance = gap / self.deg_free.sqrt(), variance / self.deg_free
        num_nodes = trapezoid_nodes(1.0, variance.detach().amax().sqrt())  # 1 + t^2 vanishes at t = i
        if num_nodes > _MOST_NODES:
            expected = expected_log1p_square(gap, variance)
        else:
            expected = smooth_expectation(_log1p_square, gap, variance, trapezoid(num_nodes), num_nodes)
        return -0.5 * (self.deg_free + 1) * expected


def _log1p_square(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    square = t.square()
    inverse = (1 + square).reciprocal()
    return torch.log1p(square), 2 * t * inverse, 2 * (1 - square) * inverse.square()
