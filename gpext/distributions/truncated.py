"""A distribution given that its variable lies between two limits, and one with more zeros than it has."""

from __future__ import annotations

from typing import ClassVar

import torch
from gpytorch.distributions import Distribution
from torch import Tensor
from torch.distributions import constraints

from gpext.distributions.drawing import drawn_from
from gpext.distributions.tails import is_count, log_cdf, log_interval, log_survival, log_tail
from gpext.distributions.with_cdf import with_cdf

_MOST_ROUNDS = 1000


class Truncated(Distribution):
    """p(y) / P(lower < Y <= upper) between the limits (counts: lower <= Y <= upper), zero elsewhere.

    Args:
        base: of real numbers or counts, with tails that are known (:func:`gpext.distributions.log_tail`).
        lower: -inf for none.
        upper: inf for none.

    Example:
        >>> import torch
        >>> from gpext.distributions import StudentT
        >>> half = Truncated(StudentT(torch.tensor(3.0)), 0.0, float("inf"))
        >>> half.cdf(torch.tensor(0.0))
        tensor(0.)
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}

    def __init__(self, base: torch.distributions.Distribution, lower: float, upper: float) -> None:
        self.base, self.lower, self.upper = with_cdf(base), lower, upper
        super().__init__(self.base.batch_shape, validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: Truncated | None = None) -> Truncated:
        """The same distribution, repeated over `batch_shape`."""
        return Truncated(self.base.expand(batch_shape), self.lower, self.upper)

    @property
    def support(self) -> constraints.Constraint | None:
        """Counts or real numbers; outside of the limits the density is zero."""
        return self.base.support

    def _limits(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(like, self.lower), torch.full_like(like, self.upper)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, -inf outside of the limits."""
        inside = (value >= self.lower) & (value <= self.upper)
        safe = torch.where(inside, value, self.lower if self.lower > -torch.inf else self.upper)
        log_prob = self.base.log_prob(safe)
        return torch.where(inside, log_prob - log_interval(self.base, *self._limits(log_prob)), -torch.inf)

    def cdf(self, value: Tensor) -> Tensor:
        """Return P(Y <= value); no gradient."""
        with torch.no_grad():
            low, high = self._limits(self.base.log_prob(torch.where(value.isfinite(), value, self.lower)))
            clipped = torch.minimum(torch.maximum(value.expand(low.shape), low), high)
            log_share = log_interval(self.base, low, clipped) - log_interval(self.base, low, high)
            if not is_count(self.base):  # an interval of no width
                log_share = torch.where(clipped <= low, -torch.inf, log_share)
            return torch.where(value < low, 0.0, torch.where(value >= high, 1.0, log_share.exp()))

    @property
    def mean(self) -> Tensor:
        """E Y of counts without zero.

        Raises:
            NotImplementedError: other limits.
        """
        return self.base.mean * torch.exp(-self._log_positive())

    @property
    def variance(self) -> Tensor:
        """Var Y of counts without zero.

        Raises:
            NotImplementedError: other limits.
        """
        mean = self.mean
        return (self.base.variance + self.base.mean.square()) * torch.exp(-self._log_positive()) - mean.square()

    def _log_positive(self) -> Tensor:
        if not (is_count(self.base) and 0 < self.lower <= 1 and self.upper == torch.inf):
            raise NotImplementedError("the moments of a truncated distribution are known of counts without zero alone.")
        return log_survival(self.base, torch.zeros_like(self.base.mean))

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return draws of shape sample_shape + batch_shape, by rejection.

        Raises:
            RuntimeError: the limits have next to no probability, and draws are rejected a thousand times over.
        """
        with torch.no_grad(), drawn_from(generator):
            drawn = self.base.sample(torch.Size(sample_shape))
            for _ in range(_MOST_ROUNDS):
                outside = (drawn < self.lower) | (drawn > self.upper)
                if not bool(outside.any()):
                    return drawn
                drawn = torch.where(outside, self.base.sample(torch.Size(sample_shape)), drawn)
        raise RuntimeError(
            f"{int(outside.sum())} draws between {self.lower:g} and {self.upper:g} were rejected {_MOST_ROUNDS} times: "
            "the limits have next to no probability."
        )


@log_tail.register
def _truncated(distribution: Truncated, value: Tensor, upper: bool) -> Tensor:
    base = distribution.base
    low, high = distribution._limits(base.log_prob(value.clamp(distribution.lower, distribution.upper)))
    outside = (value >= high) if upper else (value < low)
    edge = torch.where(outside, high, torch.minimum(torch.maximum(value, low), high))
    step = 1 if is_count(base) else 0
    part = log_interval(base, edge + step, high) if upper else log_interval(base, low, edge)
    part = torch.where((edge + step > high) if upper else (edge < low), -torch.inf, part)
    whole = (value < low) if upper else (value >= high)
    found = torch.where(whole, 0.0, part - log_interval(base, low, high))
    return torch.where(outside, -torch.inf, found)


class ZeroInflated(Distribution):
    """Zero with probability pi, else a draw of the base, which may be zero as well.

    Args:
        base: of counts.
        zero_probability: pi in (0, 1), broadcast with the base.

    Example:
        >>> import torch
        >>> from gpext.distributions import Poisson
        >>> ZeroInflated(Poisson(torch.tensor(2.0)), torch.tensor(0.25)).mean
        tensor(1.5000)
    """

    arg_constraints = {"zero_probability": constraints.unit_interval}

    def __init__(self, base: torch.distributions.Distribution, zero_probability: Tensor) -> None:
        self.base = with_cdf(base)
        self.zero_probability = zero_probability.expand(self.base.batch_shape)
        super().__init__(self.base.batch_shape, validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: ZeroInflated | None = None) -> ZeroInflated:
        """The same distribution, repeated over `batch_shape`."""
        return ZeroInflated(self.base.expand(batch_shape), self.zero_probability.expand(batch_shape))

    @property
    def support(self) -> constraints.Constraint | None:
        """That of the base."""
        return self.base.support

    @property
    def mean(self) -> Tensor:
        """(1 - pi) E."""
        return (1 - self.zero_probability) * self.base.mean

    @property
    def variance(self) -> Tensor:
        """(1 - pi) (Var + pi E^2)."""
        pi = self.zero_probability
        return (1 - pi) * (self.base.variance + pi * self.base.mean.square())

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log P(Y = value)."""
        inside = torch.log1p(-self.zero_probability) + self.base.log_prob(value)
        return torch.where(value == 0, torch.logaddexp(self.zero_probability.log(), inside), inside)

    def cdf(self, value: Tensor) -> Tensor:
        """Return P(Y <= value)."""
        pi = self.zero_probability
        return torch.where(value < 0, 0.0, pi + (1 - pi) * self.base.cdf(value.clamp_min(0)))

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return draws of shape sample_shape + batch_shape."""
        with torch.no_grad(), drawn_from(generator):
            drawn = self.base.sample(torch.Size(sample_shape))
            return torch.where(torch.rand_like(drawn) < self.zero_probability, 0.0, drawn)


@log_tail.register
def _zero_inflated(distribution: ZeroInflated, value: Tensor, upper: bool) -> Tensor:
    pi, known = distribution.zero_probability, value.clamp_min(0)
    if upper:
        return torch.where(value < 0, 0.0, torch.log1p(-pi) + log_survival(distribution.base, known))
    below = torch.logaddexp(pi.log(), torch.log1p(-pi) + log_cdf(distribution.base, known))
    return torch.where(value < 0, -torch.inf, below)
