"""A known number for each datum that is added to the latent function: exposures, known trends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Distribution

from gpext.augmentations import Augmentation
from gpext.checks import check_finite, check_tensor
from gpext.distributions import LatentNormal
from gpext.likelihoods.composed import (
    ArgumentLikelihood,
    Observed,
    all_of,
    inner_density,
    inner_expected,
    inner_knots,
    inner_log_prob,
    inner_point,
)
from gpext.likelihoods.latent import strip_of
from gpext.likelihoods.super_gaussian import AugmentedLikelihood


class Offset(ArgumentLikelihood):
    r"""Data that depend on f + o with a known o: :math:`p_o(y | f) = p(y | f + o)`.

    The logarithm of an exposure is an offset: with `Offset(PoissonLikelihood(), exposure.log())` the rate is
    exposure e^f. Every rule serves it that serves the likelihood inside, Gibbs sampling included. Predictions take an
    offset of their own, `likelihood(model(x), offset=o)`; without one it is zero, which is an exposure of one.

    Args:
        likelihood: p(y | f), of gpext or gpytorch, of one latent.
        offset: o (N,). If None, the last number of a target is its offset: targets (..., N, 2).

    Raises:
        TypeError: something else than a likelihood of one latent.
        ValueError: offsets that are not finite, such as the logarithm of an exposure of zero.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import PoissonLikelihood
        >>> likelihood = Offset(PoissonLikelihood(), torch.tensor([1.0, 10.0]).log())
        >>> likelihood.log_prob(torch.tensor([0.0, 0.0]), torch.zeros(2))
        tensor([ -1., -10.])
    """

    argument_name = "offset"
    argument_remedy = "An exposure must be positive for its logarithm to be an offset: leave out a datum without one."

    def __new__(cls, likelihood: Any = None, *args: Any, **kwargs: Any) -> Offset:
        """Return one that keeps the augmentation of a likelihood that has one."""
        augmented = cls is Offset and isinstance(likelihood, AugmentedLikelihood)
        return super().__new__(AugmentedOffset if augmented else cls)

    def __init__(self, likelihood: Likelihood, offset: Tensor | None = None) -> None:
        super().__init__(likelihood, offset)

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(y | f + o) (..., N)."""
        y, offset = self.parts(targets)
        return inner_log_prob(self.likelihood, y, f + offset).to(f.dtype)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f + o)] under N(mean, variance).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        y, offset = self.parts(targets)
        return inner_expected(self.likelihood, y, mean + offset, variance).to(mean.dtype)

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(y | f + o) N(f | mean, variance) df.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        y, offset = self.parts(targets)
        return inner_density(self.likelihood, y, mean + offset, variance).to(mean.dtype)

    def knots(self, targets: Tensor) -> Tensor | None:
        """Return those of the likelihood inside, less the offset."""
        y, offset = self.parts(targets)
        knots = inner_knots(self.likelihood, y)
        return None if knots is None else knots - offset

    def strip(self, targets: Tensor) -> Tensor | None:
        """Return that of the likelihood inside."""
        return strip_of(self.likelihood, self.parts(targets)[0])

    def expansion_point(self, targets: Tensor) -> Tensor:
        """Return that of the likelihood inside, less the offset."""
        y, offset = self.parts(targets)
        return inner_point(self.likelihood, y) - offset

    def forward(
        self, function_samples: Tensor, *args: Any, offset: Tensor | None = None, **kwargs: Any
    ) -> Distribution:
        """Return p(y | f + offset), the offset zero by default."""
        shifted = function_samples if offset is None else function_samples + offset
        return super().forward(shifted, *args, **kwargs)

    def marginal(
        self, function_dist: MultivariateNormal, *args: Any, offset: Tensor | None = None, **kwargs: Any
    ) -> Distribution:
        """Return p(y) at the marginals of function_dist and at an offset (..., N), zero by default.

        Raises:
            ValueError: an offset that is not finite.
        """
        if offset is not None:
            check_tensor("offset", offset)
            check_finite("offset", offset, remedy=self.argument_remedy)
            function_dist = LatentNormal(function_dist.mean + offset, function_dist.lazy_covariance_matrix)
        return super().marginal(function_dist, *args, **kwargs)

    def observed(self, targets: Tensor, mean: Tensor) -> list[Observed]:
        """Return all data as those of the likelihood inside, at shifted means."""
        y, offset = self.parts(targets)
        return [Observed(all_of(mean), self.likelihood, y, mean + offset)]


class AugmentedOffset(Offset, AugmentedLikelihood):
    """Offsets of a likelihood with an augmentation."""

    likelihood: AugmentedLikelihood

    def knots(self, targets: Tensor) -> Tensor:
        """Return where h^2 is least: phi may have a kink there."""
        return AugmentedLikelihood.knots(self, targets)

    strip = Offset.strip  # the augmented density is the same

    def unchecked_augmentation(self, targets: Tensor) -> Augmentation:
        """Return the augmentation of p(y | f + o)."""
        y, offset = self.parts(targets)
        inner = self.likelihood.unchecked_augmentation(y)
        constant = inner.log_constant + inner.potential * offset
        return replace(inner, log_constant=constant, center=inner.center - offset)
