"""Counts with more, or other, zeros than their distribution has."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.constraints import Interval
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.priors import Prior
from torch import Tensor
from torch.distributions import Distribution

from gpext.distributions import ZeroInflated as ZeroInflatedDistribution
from gpext.distributions.tails import is_count
from gpext.likelihoods.composed import Observed, WrappedLikelihood, check_inner, inner_log_prob, require_one_number
from gpext.likelihoods.latent import LatentLikelihood, strip_of
from gpext.likelihoods.truncated import Truncated


class ZeroInflated(WrappedLikelihood):
    r"""Counts that are zero with probability pi for another reason than the likelihood's.

    :math:`P(0 | f) = \pi + (1 - \pi) p(0 | f)`, :math:`P(y | f) = (1 - \pi) p(y | f)` for y > 0. Pi is trained with the
    other parameters, `raw_zero_probability` by gpytorch's constraints.

    Args:
        likelihood: p(y | f) of counts, of one latent.
        zero_probability_prior: of pi.

    Raises:
        TypeError: something else than a likelihood of counts, of one latent.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import PoissonLikelihood
        >>> likelihood = ZeroInflated(PoissonLikelihood()).initialize(zero_probability=0.25)
        >>> likelihood.log_prob(torch.tensor([0.0, 1.0]), torch.zeros(2)).exp().detach()
        tensor([0.5259, 0.2759])
    """

    def __init__(self, likelihood: Likelihood, zero_probability_prior: Prior | None = None) -> None:
        super().__init__(likelihood)
        require_one_number(self)
        _require_counts(self)
        self.register_parameter("raw_zero_probability", torch.nn.Parameter(torch.zeros(())))
        self.register_constraint("raw_zero_probability", Interval(0.0, 1.0))
        if zero_probability_prior is not None:
            self.register_prior(
                "zero_probability_prior", zero_probability_prior, _zero_probability, _set_zero_probability
            )

    @property
    def zero_probability(self) -> Tensor:
        """Pi ()."""
        return self.raw_zero_probability_constraint.transform(self.raw_zero_probability)

    @zero_probability.setter
    def zero_probability(self, value: Tensor | float) -> None:
        value = torch.as_tensor(value).to(self.raw_zero_probability)
        self.initialize(raw_zero_probability=self.raw_zero_probability_constraint.inverse_transform(value))

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log P(y | f) (..., N)."""
        pi = self.zero_probability.to(f)
        is_zero = targets == 0
        inside = torch.log1p(-pi) + inner_log_prob(self.likelihood, targets, f)
        return torch.where(is_zero, torch.logaddexp(pi.log(), inside), inside)

    def strip(self, targets: Tensor) -> Tensor | None:
        """Return that of the likelihood inside, less where pi + (1 - pi) exp(-e^f) has zeros."""
        inside, raw = strip_of(self.likelihood, targets), self.raw_zero_probability.detach()
        return None if inside is None else inside.clamp(max=float(0.8 * torch.atan2(torch.tensor(math.pi), -raw)))

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> ZeroInflatedDistribution:
        """Return p(y | f)."""
        inside = self.likelihood.forward(function_samples)
        return ZeroInflatedDistribution(inside, self.zero_probability.to(function_samples))

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y) at the marginals of function_dist."""
        return LatentLikelihood.marginal(self, function_dist)

    def observed(self, targets: Tensor, mean: Tensor) -> list[Observed]:
        """Return nothing: a zero need not be one of the likelihood inside."""
        return []


class Hurdle(ZeroInflated):
    r"""Counts that are zero with probability pi, whatever f is, and otherwise at least one.

    :math:`P(0 | f) = \pi`, :math:`P(y | f) = (1 - \pi) p(y | f) / (1 - p(0 | f))` for y > 0. A zero carries no
    information on f.

    Args:
        likelihood: p(y | f) of counts, of one latent, whose tails are known (Poisson, negative binomial).
        zero_probability_prior: of pi.

    Raises:
        TypeError: something else than a likelihood of counts, of one latent.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import PoissonLikelihood
        >>> likelihood = Hurdle(PoissonLikelihood())
        >>> likelihood.zero_probability = 0.25
        >>> likelihood.log_prob(torch.tensor([0.0]), torch.tensor([1.0])).exp().detach()
        tensor([0.2500])
    """

    def __init__(self, likelihood: Likelihood, zero_probability_prior: Prior | None = None) -> None:
        super().__init__(Truncated(likelihood, lower=1), zero_probability_prior)

    def check(self, targets: Tensor) -> None:
        """Raise unless the targets are counts, as the likelihood inside takes them.

        Raises:
            TypeError, ValueError: as the likelihood inside.
        """
        check_inner(self.likelihood.likelihood, targets)

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log P(y | f) (..., N)."""
        pi, is_zero = self.zero_probability.to(f), targets == 0
        positive = torch.log1p(-pi) + inner_log_prob(self.likelihood, torch.where(is_zero, 1, targets), f)
        return torch.where(is_zero, pi.log(), positive)

    def knots(self, targets: Tensor) -> Tensor | None:
        """Return those of the likelihood inside."""
        return super().knots(targets.clamp_min(1))

    def strip(self, targets: Tensor) -> Tensor | None:
        """Return that of the likelihood inside."""
        return strip_of(self.likelihood, targets.clamp_min(1))


def _require_counts(composed: ZeroInflated) -> None:
    """Raise TypeError if the likelihood inside has no counts: a density at zero cannot be added to a probability."""
    inside = composed.likelihood.likelihood if isinstance(composed.likelihood, Truncated) else composed.likelihood
    try:
        given = inside.forward(torch.zeros(1))
    except NotImplementedError:  # one of a user's own, whose density is all that there is
        return
    if given.support is not None and not is_count(given):
        raise TypeError(
            f"{type(composed).__name__} takes a likelihood of counts; {type(inside).__qualname__} has a density. For "
            "zeros that are cut-off numbers take gpext.likelihoods.Censored."
        )


def _zero_probability(module: ZeroInflated) -> Tensor:
    return module.zero_probability


def _set_zero_probability(module: ZeroInflated, value: Tensor) -> None:
    module.zero_probability = value
