"""A positive distribution times a positive constant."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import constraints

from gpext.distributions.positive import PositiveDistribution


class Scaled(PositiveDistribution):
    """factor * W for W of `base`.

    Args:
        base: a distribution of W >= 0.
        factor: positive.
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> from gpext.distributions import InverseGaussian
        >>> Scaled(InverseGaussian(torch.tensor(2.0), torch.tensor(4.0)), 3.0).mean
        tensor(6.)
    """

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(self, base: PositiveDistribution, factor: float, validate_args: bool | None = None) -> None:
        if not factor > 0:
            raise ValueError(f"factor must be positive; got {factor}.")
        self.base, self.factor = base, factor
        super().__init__(base.batch_shape, validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: Scaled | None = None) -> Scaled:
        """The same distribution, repeated over `batch_shape`."""
        new = self._get_checked_instance(Scaled, _instance)
        new.base, new.factor = self.base.expand(batch_shape), self.factor
        super(PositiveDistribution, new).__init__(torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        """``factor * E W``."""
        return self.factor * self.base.mean

    @property
    def variance(self) -> Tensor:
        """``factor^2 Var W``."""
        return self.factor**2 * self.base.variance

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density; value and result broadcast with the batch shape."""
        scale = torch.tensor(self.factor, dtype=torch.float64).log().to(value)
        return self.base.log_prob(value / self.factor) - scale

    def cdf(self, value: Tensor) -> Tensor:
        """P(factor W <= value)."""
        return self.base.cdf(value / self.factor)

    def icdf(self, value: Tensor | float) -> Tensor:
        """The quantile at probability `value` in [0, 1]."""
        return self.factor * self.base.icdf(value)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape."""
        return self.factor * self.base.sample(sample_shape, generator=generator)
