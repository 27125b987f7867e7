"""A finite mixture sum_j w_j p_j(y) of distributions that need not be of one family or share parameters.

torch's `MixtureSameFamily` needs all components in the parameters of one distribution object; predictive distributions
of several models are several objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from gpytorch.distributions import Distribution
from torch import Tensor
from torch.distributions import constraints

from gpext.distributions.drawing import drawn_from
from gpext.distributions.predictive.newton_quantiles import mixture_quantile


class Mixture(Distribution):
    """sum_j w_j p_j(y).

    Args:
        weights: (J,) non-negative, of sum one, the same for all of a batch.
        components: J distributions of one batch shape, event shape and support. Those of weight zero are left out: they
            may be anything.
        validate_args: as in torch.distributions.

    Raises:
        ValueError: the weights are no probabilities, or weights and components do not belong together.

    Example:
        >>> import torch
        >>> from torch.distributions import Laplace, Normal
        >>> Mixture(torch.tensor([0.25, 0.75]), [Normal(0.0, 1.0), Laplace(4.0, 1.0)]).mean
        tensor(3.)
    """

    arg_constraints = {"weights": constraints.simplex}

    def __init__(
        self,
        weights: Tensor,
        components: Sequence[torch.distributions.Distribution],
        validate_args: bool | None = None,
    ) -> None:
        if weights.dim() != 1 or len(weights) != len(components):
            raise ValueError(
                f"expected one weight for each component; got weights of shape {tuple(weights.shape)} and "
                f"{len(components)} components."
            )
        if not constraints.simplex.check(weights):
            raise ValueError(f"weights must be non-negative and sum to one; got {weights.tolist()}.")
        shapes = {(c.batch_shape, c.event_shape) for c in components}
        if len(shapes) > 1:
            raise ValueError(f"components must have one batch shape and one event shape; got {sorted(shapes)}.")
        kept = (weights > 0).tolist()
        self.weights = weights[weights > 0]
        self.components = tuple(c for c, keep in zip(components, kept, strict=True) if keep)
        (shape,) = shapes
        super().__init__(*shape, validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: Mixture | None = None) -> Mixture:
        """The same distribution, repeated over `batch_shape`."""
        new = self._get_checked_instance(Mixture, _instance)
        new.weights = self.weights
        new.components = tuple(c.expand(batch_shape) for c in self.components)
        super(Mixture, new).__init__(torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def support(self) -> constraints.Constraint:
        """The support of the components."""
        support = self.components[0].support
        if support is None:
            raise NotImplementedError("the components do not declare their support.")
        return support

    @property
    def mean(self) -> Tensor:
        """sum_j w_j E_j y; nan or inf where that of a component is."""
        return self._average(lambda c: c.mean)

    @property
    def variance(self) -> Tensor:
        """The variances' mean and the means' variance; nan or inf where that of a component is."""
        mean = self.mean
        return self._average(lambda c: c.variance + (c.mean - mean).square())

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density, differentiable as those of the components are."""
        terms = torch.stack([c.log_prob(value) for c in self.components], -1)
        return torch.logsumexp(terms + self.weights.log().to(terms), -1)

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value)."""
        return self._average(lambda c: c.cdf(value))

    def icdf(self, value: Tensor | float) -> Tensor:
        """The quantile of a continuous mixture, to rounding of its cdf, by Newton inside a bracket; no gradient.

        Raises:
            NotImplementedError: the support is discrete.
            ValueError: a probability is not strictly between 0 and 1.
        """
        return mixture_quantile(
            self, value, self.weights, lambda q: torch.stack([component.icdf(q) for component in self.components])
        )

    def quantile(self, q: Tensor | float) -> Tensor:
        """The same as `icdf`."""
        return self.icdf(q)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape + event_shape; from torch's global generator by default."""
        with torch.no_grad(), drawn_from(generator):
            shape = torch.Size(sample_shape) + self.batch_shape
            chosen = torch.multinomial(self.weights, math.prod(shape), replacement=True).view(shape)
            chosen = chosen.view(shape + (1,) * len(self.event_shape))
            draws = self.components[0].sample(torch.Size(sample_shape))
            for j, component in enumerate(self.components[1:], 1):
                draws = torch.where(chosen == j, component.sample(torch.Size(sample_shape)), draws)
            return draws

    def _average(self, statistic: Callable[[torch.distributions.Distribution], Tensor]) -> Tensor:
        values = torch.stack([statistic(c) for c in self.components], -1)
        return values @ self.weights.to(values)
