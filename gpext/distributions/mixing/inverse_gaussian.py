r"""The inverse Gaussian: the first time at which a Brownian motion with drift reaches a level.

    p(w) = sqrt(shape / (2 pi w^3)) exp(-shape (w / mean - 1)^2 / (2 w))

With mean = inf it is the Levy distribution; in terms of 1 / mean this limit is no special case.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.special import erfcx

from gpext.distributions.positive import PositiveDistribution, broadcast_floating


class InverseGaussian(PositiveDistribution):
    """Inverse Gaussian w > 0 with variance mean^3 / shape.

    Args:
        mean: positive; infinity gives the Levy distribution, whose mean and variance are infinite.
        shape: positive.
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> w = InverseGaussian(torch.tensor(2.0), torch.tensor(4.0))
        >>> w.mean, w.variance  # 2^3 / 4
        (tensor(2.), tensor(2.))
    """

    arg_constraints = {"loc": constraints.positive, "shape": constraints.positive}

    def __init__(self, mean: Tensor | float, shape: Tensor | float, validate_args: bool | None = None) -> None:
        self.loc, self.shape = broadcast_floating(mean, shape)
        super().__init__(self.loc.shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """The mean."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """mean^3 / shape."""
        return self.loc**3 / self.shape

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density; value and result broadcast with the batch shape."""
        if self._validate_args:
            self._validate_sample(value)
        constant = 0.5 * (self.shape / (2 * math.pi)).log()
        gap = value / self.loc - 1
        density = constant - 1.5 * value.log() - self.shape * gap.square() / (2 * value)
        return torch.where((value > 0) & (value < math.inf), density, -math.inf)

    def cdf(self, value: Tensor) -> Tensor:
        """P(W <= value), relatively accurate in the lower tail."""
        value, below, decay, near, far = self._tails(value)
        return torch.where(below, decay * (near + far), 1 - decay * (near - far))

    def survival(self, value: Tensor) -> Tensor:
        """P(W > value), in the upper tail with a relative error of about 1e-16 value / mean."""
        value, below, decay, near, far = self._tails(value)
        return torch.where(below, 1 - decay * (near + far), decay * (near - far))

    def _tails(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        r"""The terms of :math:`\Phi(a) + e^{2 \lambda/\mu} \Phi(-b)`, a, b = sqrt(shape / w) (w / mean -+ 1).

        b^2 = a^2 + 4 shape / mean, so both normal tails have the factor exp(-a^2 / 2), and nothing overflows.
        """
        if self._validate_args:
            self._validate_sample(value)
        inside = (value > 0) & (value < math.inf)
        w = torch.where(inside, value, 1.0)
        root = (self.shape / (2 * w)).sqrt()
        a, b = root * (w / self.loc - 1), root * (w / self.loc + 1)
        below = torch.where(inside, a < 0, value <= 0)
        decay = torch.where(inside, 0.5 * torch.exp(-a.square()), 0.0)
        return value, below, decay, erfcx(a.abs()), erfcx(b)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape [Michael, Schucany & Haas 1976]."""
        with torch.no_grad():
            shape = self._extended_shape(torch.Size(sample_shape))
            rate = self.loc.double().reciprocal().expand(shape)
            return inverse_gaussian_draws(rate, self.shape.double().expand(shape), generator).to(self.loc.dtype)


def inverse_gaussian_draws(
    rate: Tensor,  # 1 / mean, zero allowed, float64
    shape: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One draw for each element, without cancellation.

    With N standard normal, N^2 = shape (w / mean - 1)^2 / w has two roots whose product is mean^2. The smaller one is
    1 / (rate + g + sqrt(g (2 rate + g))), g = N^2 / (2 shape), taken with probability mean / (mean + w).
    """
    # N / sqrt 2 = erfinv of a uniform variable on (-1, 1), of which only the square is wanted.
    g = torch.empty_like(rate).uniform_(generator=generator).erfinv_().square_().div_(shape)
    inverse = (2 * rate).add_(g).mul_(g).sqrt_().add_(rate).add_(g)
    threshold = (inverse + rate).mul_(torch.empty_like(rate).uniform_(generator=generator))
    return torch.where(threshold <= inverse, inverse.reciprocal(), inverse / rate.square())
