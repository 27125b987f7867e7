r"""The Polya-Gamma distribution PG(b, z) [Polson, Scott & Windle 2013].

E e^{-s W} = (cosh(z / 2) / cosh sqrt(z^2 / 4 + s / 2))^b,    W = sum_k G_k / (2 pi^2 (k - 1/2)^2 + z^2 / 2), G_k ~ Gamma(b)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all

from gpext.distributions.jacobi import jacobi_draws
from gpext.distributions.positive import PositiveDistribution


class PolyaGamma(PositiveDistribution):
    """Polya-Gamma W >= 0.

    Args:
        count: b >= 0; at 0 all draws are 0.
        tilt: z of either sign; at infinity all draws are 0.
        validate_args: as in torch.distributions.
    """

    arg_constraints = {"count": constraints.nonnegative, "tilt": constraints.dependent(is_discrete=False, event_dim=0)}

    def __init__(self, count: Tensor | float, tilt: Tensor | float, validate_args: bool | None = None) -> None:
        self.count, self.tilt = broadcast_all(count, tilt)
        super().__init__(self.count.shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """count tanh(tilt / 2) / (2 tilt)."""
        c = 0.5 * self.tilt.abs()
        ratio = torch.where(c < 1e-4, 1 - c.square() / 3, torch.tanh(c) / torch.where(c == 0, 1.0, c))
        return 0.25 * self.count * ratio

    @property
    def variance(self) -> Tensor:
        """count (tanh(c) / c - sech(c)^2) / (16 c^2), c = tilt / 2."""
        c = 0.5 * self.tilt.abs()
        safe = torch.where(c < 0.05, 1.0, c)
        direct = (torch.tanh(safe) / safe - 1 + torch.tanh(safe).square()) / safe.square()
        square = c.square()
        series = 2 / 3 - square * (8 / 15 - square * (34 / 105 - square * 496 / 2835))
        return self.count / 16 * torch.where(c < 0.05, series, direct)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape."""
        with torch.no_grad():
            shape = self._extended_shape(torch.Size(sample_shape))
            count = self.count.double().expand(shape).flatten()
            tilt = (0.5 * self.tilt.double().abs()).expand(shape).flatten()
            draws = torch.zeros_like(tilt)
            live = ((count > 0) & (tilt < torch.inf)).nonzero().squeeze(-1)
            whole, part = count.floor().long(), count.frac()
            units = live.repeat_interleave(whole[live])
            draws.index_add_(0, units, jacobi_draws(torch.ones_like(tilt[units]), tilt[units], generator))
            rest = live[part[live] > 0]
            draws.index_add_(0, rest, jacobi_draws(part[rest], tilt[rest], generator))
            return (0.25 * draws).view(shape).to(self.tilt.dtype)
