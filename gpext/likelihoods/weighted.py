"""A power of a likelihood for each datum: p(y | f)^w."""

from __future__ import annotations

from typing import Any

from gpytorch.likelihoods import Likelihood
from torch import Tensor

from gpext.augmentations import Augmentation, PowerRadial
from gpext.likelihoods.composed import (
    ArgumentLikelihood,
    Observed,
    all_of,
    inner_expected,
    inner_knots,
    inner_log_prob,
    inner_point,
)
from gpext.likelihoods.latent import strip_of
from gpext.likelihoods.super_gaussian import AugmentedLikelihood


class Weighted(ArgumentLikelihood):
    r"""Data of weights w: :math:`\log p_w(y | f) = w \log p(y | f)`.

    A whole weight is a datum that occurs w times at one input. Any other is a part of a datum (of a survey, or of a
    stratified sample), and p(y | f)^w is no density of y any more: the evidence is then the normaliser of the
    posterior, not a probability.

    * KL, CAVI, Laplace, Taylor: w times the expected log density or its bound, or its slope and curvature. Evidence,
      posterior and gradients are those of the repeated data.
    * EP: one site for the w copies, from the moments of p(y | f)^w times the cavity: closer to the exact posterior than
      a site for each copy.
    * Gibbs sampling: the auxiliary variables of the w-th power, in closed form for Bernoulli and negative binomial
      logits, Student-t and Laplace noise; refused for others.
    * `log_loo` of a datum is that of its w copies at once, given the others; its tail probability that of one.
    * predictions are of one observation: of p(y | f) itself.

    Args:
        likelihood: p(y | f), of gpext or gpytorch, of one latent.
        weights: w (N,), positive. If None, the last number of a target is its weight: targets (..., N, 2).

    Raises:
        TypeError: something else than a likelihood of one latent.
        ValueError: weights that are not positive and finite.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import PoissonLikelihood
        >>> likelihood = Weighted(PoissonLikelihood(), torch.tensor([1.0, 3.0]))
        >>> likelihood.log_prob(torch.tensor([0.0, 0.0]), torch.zeros(2))
        tensor([-1., -3.])
    """

    argument_name = "weights"

    def __new__(cls, likelihood: Any = None, *args: Any, **kwargs: Any) -> Weighted:
        """Return one that keeps the augmentation of a likelihood that has one."""
        augmented = cls is Weighted and isinstance(likelihood, AugmentedLikelihood)
        return super().__new__(AugmentedWeighted if augmented else cls)

    def __init__(self, likelihood: Likelihood, weights: Tensor | None = None) -> None:
        super().__init__(likelihood, weights)

    def check_argument(self, argument: Tensor) -> None:
        """Raise ValueError unless every weight is positive."""
        wrong = (argument <= 0).nonzero()
        if len(wrong):
            index = tuple(wrong[0].tolist())
            raise ValueError(
                f"weights must be positive; got {float(argument[index]):g} at index {index[-1]}. Leave out a datum of "
                "no weight."
            )

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return w log p(y | f) (..., N)."""
        y, weights = self.parts(targets)
        return (weights * inner_log_prob(self.likelihood, y, f)).to(f.dtype)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return w E[log p(y | f)] under N(mean, variance).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        y, weights = self.parts(targets)
        return (weights * inner_expected(self.likelihood, y, mean, variance)).to(mean.dtype)

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(y | f)^w N(f | mean, variance) df.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        return super().log_density(self.join(targets), mean, variance)

    def knots(self, targets: Tensor) -> Tensor | None:
        """Return those of the likelihood inside."""
        return inner_knots(self.likelihood, self.parts(targets)[0])

    def strip(self, targets: Tensor) -> Tensor | None:
        """Return that of the likelihood inside, of which a power is the narrower the larger the weight is."""
        y, weights = self.parts(targets)
        inside = strip_of(self.likelihood, y)
        return None if inside is None else inside / weights.clamp(min=1).sqrt()

    def expansion_point(self, targets: Tensor) -> Tensor:
        """Return that of the likelihood inside."""
        return inner_point(self.likelihood, self.parts(targets)[0])

    def observed(self, targets: Tensor, mean: Tensor) -> list[Observed]:
        """Return all data as those of the likelihood inside."""
        return [Observed(all_of(mean), self.likelihood, self.parts(targets)[0], mean)]


class AugmentedWeighted(Weighted, AugmentedLikelihood):
    """Weights of a likelihood with an augmentation, which a power of it has as well."""

    likelihood: AugmentedLikelihood

    def knots(self, targets: Tensor) -> Tensor:
        """Return where h^2 is least: phi may have a kink there."""
        return AugmentedLikelihood.knots(self, targets)

    strip = Weighted.strip  # the augmented density is the same

    def unchecked_augmentation(self, targets: Tensor) -> Augmentation:
        """Return the augmentation of p(y | f)^w."""
        y, w = self.parts(targets)
        inner = self.likelihood.unchecked_augmentation(y)
        radial = PowerRadial(inner.radial, w)
        constant, potential = w * inner.log_constant, w * inner.potential
        return Augmentation(radial, constant, potential, inner.center, inner.curvature, inner.offset)
