r"""log(1 + e^x) by a parabola at an adjustable point [Jaakkola & Jordan 2000].

    log(1 + e^x) <= x/2 + log(2 cosh(c/2)) + (x^2 - c^2) tanh(c/2) / (4c)

for every c, so E[log(1 + e^x)] <= m/2 + log(2 cosh(c/2)) at the best one, c^2 = E x^2 = m^2 + v. This is the augmented
bound of Polya-Gamma inference [GWO20].
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.bounds.bound import SoftplusBound


class Jaakkola(SoftplusBound):
    """Jaakkola & Jordan's bound at its best expansion point: the objective of CAVI, and its gap.

    Example:
        >>> import torch
        >>> from gpext.bounds import Quadrature
        >>> y, m, v = torch.ones(1), torch.zeros(1), torch.ones(1)
        >>> Quadrature()(y, m, v) - Jaakkola()(y, m, v)  # its gap
        tensor([0.0072])
    """

    def expected_softplus(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return m/2 + log(2 cosh(c/2)), c = sqrt(m^2 + v), elementwise and differentiable."""
        # The variance is raised by one rounding error, which keeps the derivatives at c = 0.
        variance = variance + torch.finfo(variance.dtype).eps
        distance = mean.abs()
        c = (mean.square() + variance).sqrt()
        # m/2 + c/2 = max(m, 0) + (c - |m|)/2
        return 0.5 * (mean + distance + variance / (c + distance)) + torch.log1p(torch.exp(-c))
