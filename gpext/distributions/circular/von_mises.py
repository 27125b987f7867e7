r"""The von Mises distribution of an angle, accurate at every concentration.

p(y) = exp(kappa cos(y - loc)) / (2 pi I0(kappa)) = exp(-2 kappa sin^2((y - loc) / 2)) / (2 pi I0e(kappa))
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all

from gpext.distributions.circular.angle_table import AngleTable
from gpext.distributions.circular.distribution import CircularDistribution, wrap


class VonMises(CircularDistribution):
    """Angles y in radians, with the mean direction `loc`; torch's own has single precision and stops at large kappa.

    The distribution function is good to 1e-12 for concentrations from 0 to 1e6 and beyond.

    Args:
        loc: the mean direction.
        concentration: kappa, at least 0, where every direction is as likely.
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> angle = VonMises(torch.tensor(0.0), torch.tensor(2.0))
        >>> angle.sample((4,), generator=torch.Generator().manual_seed(0)).shape
        torch.Size([4])
    """

    arg_constraints = {"loc": constraints.real, "concentration": constraints.nonnegative}
    support = constraints.real

    def __init__(self, loc: Tensor | float, concentration: Tensor | float, validate_args: bool | None = None) -> None:
        self.loc, self.concentration = broadcast_all(loc, concentration)
        super().__init__(self.loc.shape, validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: VonMises | None = None) -> VonMises:
        """The same distribution, repeated over `batch_shape`."""
        new = self._get_checked_instance(VonMises, _instance)
        new.loc, new.concentration = self.loc.expand(batch_shape), self.concentration.expand(batch_shape)
        super(VonMises, new).__init__(torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        """The mean direction."""
        return self.loc

    @property
    def resultant_length(self) -> Tensor:
        """A = E[cos(y - loc)] = I1(kappa) / I0(kappa)."""
        return torch.special.i1e(self.concentration) / torch.special.i0e(self.concentration)

    @property
    def variance(self) -> Tensor:
        """The circular variance 1 - A."""
        return 1 - self.resultant_length

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density in radians; value and result broadcast with the batch shape."""
        if self._validate_args:
            self._validate_sample(value)
        across = (0.5 * (value - self.loc)).sin().square()
        return -2 * self.concentration * across - torch.special.i0e(self.concentration).log() - math.log(2 * math.pi)

    def _make_table(self) -> AngleTable:
        exact = VonMises(self.loc.double(), self.concentration.double(), validate_args=False)
        return AngleTable.of(lambda angle: exact.log_prob(angle).exp(), self.loc, self.concentration)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws in (-pi, pi] of shape sample_shape + batch_shape, by rejection [Best & Fisher 1979].

        The proposal is a wrapped Cauchy, density prop. to 1 / (r - cos d), r = (1 + sqrt(1 + 4 kappa^2)) / (2 kappa).
        With q = kappa (r - cos d) a draw is accepted with probability q e^(1 - q), two times in three or more often.
        """
        with torch.no_grad():
            shape = self._extended_shape(torch.Size(sample_shape))
            kappa = self.concentration.double().expand(shape)
            least = 0.5 * (1 + 1 / ((1 + 4 * kappa.square()).sqrt() + 2 * kappa))  # kappa (r - 1)
            narrow = (least / (least + 2 * kappa)).sqrt()
            drawn = torch.zeros_like(kappa)
            waiting = torch.ones_like(kappa, dtype=torch.bool)
            while bool(waiting.any()):
                turn = math.pi * (torch.rand(shape, generator=generator, dtype=kappa.dtype, device=kappa.device) - 0.5)
                half = torch.atan2(narrow * turn.sin(), turn.cos())
                q = least + 2 * kappa * half.sin().square()
                chance = torch.rand(shape, generator=generator, dtype=kappa.dtype, device=kappa.device)
                taken = waiting & (chance < q * (1 - q).exp())
                drawn, waiting = torch.where(taken, 2 * half, drawn), waiting & ~taken
            return wrap(drawn + self.loc.double()).to(self.loc.dtype)
