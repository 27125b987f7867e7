"""Tweedie's compound Poisson-gamma law, 1 < p < 2: the sum of a Poisson number of gamma variables.

Its density is in :mod:`gpext.distributions.tweedie_density`, its tails in :mod:`gpext.distributions.tweedie_tails`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from gpytorch.distributions import Distribution, base_distributions
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all

from gpext.distributions.drawing import drawn_from
from gpext.distributions.tweedie_density import tweedie_log_prob
from gpext.distributions.tweedie_tails import tweedie_log_tail
from gpext.distributions.with_cdf import Poisson

AMOUNTS = constraints.greater_than_eq(0.0)
"""The support of a continuous Y >= 0 that is zero with a positive probability."""


class Tweedie(Distribution):
    """The sum of a Poisson number of gamma variables: zeros and positive amounts.

    Args:
        log_mean: log mu.
        dispersion: phi > 0.
        power: p, in (1, 2): the variance is phi mu^p.
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> Tweedie(torch.tensor(0.0), 1.0, 1.5).log_prob(torch.tensor([0.0, 1.0]))
        tensor([-2.0000, -1.0286])
    """

    arg_constraints: ClassVar = {
        "log_mean": constraints.real,
        "dispersion": constraints.positive,
        "power": constraints.interval(1.0, 2.0),
    }
    support = AMOUNTS

    def __init__(
        self,
        log_mean: Tensor | float,
        dispersion: Tensor | float,
        power: Tensor | float,
        validate_args: bool | None = None,
    ) -> None:
        self.log_mean, self.dispersion, self.power = broadcast_all(log_mean, dispersion, power)
        super().__init__(self.log_mean.shape, validate_args=validate_args)
        if self._validate_args and bool(((self.power == 1) | (self.power == 2)).any()):
            raise ValueError("power must be strictly between 1 and 2; there are distributions Poisson and Gamma.")

    def expand(self, batch_shape: torch.Size, _instance: Tweedie | None = None) -> Tweedie:
        """The same distribution, repeated over `batch_shape`."""
        new = self._get_checked_instance(type(self), _instance)
        for name in self.arg_constraints:
            setattr(new, name, getattr(self, name).expand(batch_shape))
        super(Tweedie, new).__init__(torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        """Mu."""
        return self.log_mean.exp()

    @property
    def variance(self) -> Tensor:
        """Phi mu^p."""
        return self.dispersion * (self.power * self.log_mean).exp()

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, of zero the log probability; differentiable once in dispersion and power."""
        if self._validate_args:
            self._validate_sample(value)
        log_p = tweedie_log_prob(value.double(), self.log_mean.double(), self.dispersion.double(), self.power.double())
        return log_p.to(self.log_mean.dtype)

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value), to some 1e-12 of it, differentiable once in all parameters."""
        parameters = self.log_mean.double(), self.dispersion.double(), self.power.double()
        return tweedie_log_tail(value.double(), *parameters, False).exp().to(self.log_mean.dtype)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return draws of shape sample_shape + batch_shape."""
        with torch.no_grad(), drawn_from(generator):
            rate, shape, scale = (each.expand(self._extended_shape(torch.Size(sample_shape))) for each in self._parts())
            number = Poisson(rate).sample()
            amount = base_distributions.Gamma(torch.where(number > 0, number * shape, 1.0), 1.0).sample()
            return torch.where(number > 0, scale * amount, 0.0).to(self.log_mean.dtype)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return lambda, a and g, float64."""
        f, phi, p = self.log_mean.double(), self.dispersion.double(), self.power.double()
        rate = ((2 - p) * f - (phi * (2 - p)).log()).exp()
        return rate, (2 - p) / (p - 1), phi * (p - 1) * ((p - 1) * f).exp()
