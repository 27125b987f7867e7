"""The average 1/S sum_s p_s(y) of a batch of S distributions: what posterior draws predict."""

from __future__ import annotations

import math

import torch
from gpytorch.distributions import Distribution
from torch import Tensor
from torch.distributions import constraints

from gpext.distributions.drawing import drawn_from
from gpext.distributions.predictive.newton_quantiles import mixture_quantile


class BatchMixture(Distribution):
    """A mixture, with equal weights, of the distributions along the first dimension of a batch.

    Args:
        components: batch shape (S, ...), events of one number each.
        validate_args: as in torch.distributions.

    Raises:
        ValueError: there is no batch to average over, or events have a shape.

    Example:
        >>> import torch
        >>> BatchMixture(torch.distributions.Normal(torch.tensor([0.0, 2.0]), 1.0)).variance
        tensor(2.)
    """

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(self, components: torch.distributions.Distribution, validate_args: bool | None = None) -> None:
        if not components.batch_shape or components.event_shape:
            raise ValueError(
                "expected distributions of numbers with a batch shape (S, ...); got batch shape "
                f"{tuple(components.batch_shape)} and event shape {tuple(components.event_shape)}."
            )
        self.components = components
        super().__init__(components.batch_shape[1:], validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: BatchMixture | None = None) -> BatchMixture:
        """The same distribution, repeated over `batch_shape`."""
        new = self._get_checked_instance(BatchMixture, _instance)
        if len(batch_shape) != len(self.batch_shape):
            raise NotImplementedError(f"cannot expand batch shape {tuple(self.batch_shape)} to {tuple(batch_shape)}.")
        new.components = self.components.expand(torch.Size((self._size, *batch_shape)))
        super(BatchMixture, new).__init__(batch_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def support(self) -> constraints.Constraint:
        """The support of the components."""
        support = self.components.support
        if support is None:
            raise NotImplementedError("the components do not declare their support.")
        return support

    @property
    def mean(self) -> Tensor:
        """The mean of the means (...)."""
        return self.components.mean.mean(0)

    @property
    def variance(self) -> Tensor:
        """The variances' mean and the means' variance (...)."""
        means = self.components.mean
        return self.components.variance.mean(0) + means.var(0, correction=0)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density, (..., *batch_shape)."""
        return torch.logsumexp(self.components.log_prob(self._to_all(value)), self._dim) - math.log(self._size)

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value), (..., *batch_shape)."""
        return self.components.cdf(self._to_all(value)).mean(self._dim)

    def icdf(self, value: Tensor | float) -> Tensor:
        """The quantile of a continuous mixture, to rounding of its cdf, by Newton inside a bracket; no gradient.

        Raises:
            NotImplementedError: the support is discrete.
            ValueError: a probability is not strictly between 0 and 1.
        """
        return mixture_quantile(self, value, self.components.mean, self._quantiles)

    def quantile(self, q: Tensor | float) -> Tensor:
        """The same as `icdf`."""
        return self.icdf(q)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape, each from a component of its own.

        From torch's global generator by default.
        """
        shape = torch.Size(sample_shape) + self.batch_shape
        with torch.no_grad(), drawn_from(generator):
            draws = []
            for _ in range(torch.Size(sample_shape).numel()):  # of all components; in one piece they may not fit
                chosen = torch.randint(self._size, self.batch_shape, device=self.components.mean.device)
                draws.append(self.components.sample().gather(0, chosen.unsqueeze(0)).squeeze(0))
            return torch.stack(draws).view(shape)

    @property
    def _size(self) -> int:
        return self.components.batch_shape[0]

    @property
    def _dim(self) -> int:
        """The dimension of the components in their densities of a value."""
        return -1 - len(self.batch_shape)

    def _to_all(self, value: Tensor) -> Tensor:
        inner = torch.broadcast_to(value, torch.broadcast_shapes(value.shape, self.batch_shape))
        return inner.unsqueeze(self._dim)

    def _quantiles(self, probability: Tensor) -> Tensor:
        return self.components.icdf(self._to_all(probability)).movedim(self._dim, 0)
