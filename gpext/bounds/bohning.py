r"""log(1 + e^x) by a parabola of the largest curvature, 1/4 [Böhning 1992].

    log(1 + e^x) <= log(1 + e^c) + sigma(c) (x - c) + (x - c)^2 / 8

for every c. The expectation is least at c = m, because there the parabola touches at the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.bounds.bound import SoftplusBound


class Bohning(SoftplusBound):
    """Böhning's bound at its best expansion point: the cheapest, and loose where v is large.

    Example:
        >>> import torch
        >>> from gpext.bounds import Quadrature
        >>> y, m, v = torch.ones(1), torch.zeros(1), torch.ones(1)
        >>> Quadrature()(y, m, v) - Bohning()(y, m, v)  # its gap
        tensor([0.0121])
    """

    def expected_softplus(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log(1 + e^m) + v/8, elementwise and differentiable."""
        return torch.logaddexp(mean, torch.zeros_like(mean)) + 0.125 * variance
