"""Observations that exist only between two limits."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Distribution

from gpext.checks import show_index
from gpext.distributions import Truncated as TruncatedDistribution
from gpext.distributions import log_interval
from gpext.likelihoods.composed import Observed, WrappedLikelihood, inner_log_prob, require_one_number
from gpext.likelihoods.latent import LatentLikelihood, strip_of


class Truncated(WrappedLikelihood):
    r"""Data that could only be observed between two limits.

    :math:`\log p(y | f) - \log P(l < Y \le u | f)`, for counts :math:`P(l \le Y \le u | f)`. Data that are there, but
    of which only the limit is known, are censored instead: :class:`gpext.likelihoods.Censored`.
    Predictions are of truncated observations; `likelihood.likelihood(model(x))` predicts all.

    Args:
        likelihood: p(y | f) of numbers or counts, of one latent, whose tails are known, see
            :func:`gpext.distributions.log_tail`.
        lower: l, -inf for none.
        upper: u, inf for none.

    Raises:
        TypeError: something else than a likelihood of one latent.
        ValueError: no limit is finite, or the lower one is not below the upper one.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import PoissonLikelihood
        >>> positive = Truncated(PoissonLikelihood(), lower=1)
        >>> positive.log_prob(torch.tensor([1.0]), torch.zeros(1))
        tensor([-0.5413])
    """

    def __init__(self, likelihood: Likelihood, lower: float = -math.inf, upper: float = math.inf) -> None:
        super().__init__(likelihood)
        require_one_number(self)
        self.lower, self.upper = float(lower), float(upper)
        if not self.lower < self.upper or (math.isinf(self.lower) and math.isinf(self.upper)):
            raise ValueError(f"expected limits lower < upper, one of them finite; got {lower} and {upper}.")

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target is outside the limits."""
        wrong = ((targets < self.lower) | (targets > self.upper)).nonzero()
        if len(wrong):
            index = tuple(wrong[0].tolist())
            raise ValueError(
                f"targets must be between {self.lower:g} and {self.upper:g}; got {float(targets[index]):g} at index "
                f"{show_index(index)}. Move the limit, or leave out data that it would have hidden."
            )

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(y | f) - log P(l < Y <= u | f) (..., N)."""
        value = inner_log_prob(self.likelihood, targets, f)
        latent = f.double()
        limits = torch.full_like(latent, self.lower), torch.full_like(latent, self.upper)
        with torch.no_grad():
            lost = ~log_interval(self.likelihood.forward(latent), *limits).isfinite()
        inside = log_interval(self.likelihood.forward(torch.where(lost, 0.0, latent)), *limits)
        if not bool(lost.any()):
            return value - inside.to(value.dtype)
        # f is so far out that all the mass between the limits is at one of them.
        ends = [torch.as_tensor(end).to(targets) for end in (self.lower, self.upper) if math.isfinite(end)]
        masses = torch.stack([inner_log_prob(self.likelihood, end, latent).to(value.dtype) for end in ends])
        found = value - torch.where(lost, masses.amax(0), inside.to(value.dtype))
        is_end = functools.reduce(torch.logical_or, (targets == end for end in ends))
        return torch.where(found.isnan(), torch.where(is_end, 0.0, -torch.inf), found)

    def strip(self, targets: Tensor) -> Tensor | None:
        """Return the narrowest strip of the likelihood inside at the targets and at the limits."""
        ends = [torch.full_like(targets, end) for end in (self.lower, self.upper) if math.isfinite(end)]
        strips = [strip_of(self.likelihood, value) for value in (targets, *ends)]
        found = [strip for strip in strips if strip is not None]
        return functools.reduce(torch.minimum, found) if len(found) == len(strips) else None

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> TruncatedDistribution:
        """Return p(y | f), truncated."""
        return TruncatedDistribution(self.likelihood.forward(function_samples), self.lower, self.upper)

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y) at the marginals of function_dist, of truncated observations."""
        return LatentLikelihood.marginal(self, function_dist)

    def observed(self, targets: Tensor, mean: Tensor) -> list[Observed]:
        """Return nothing: truncated data are values of this likelihood alone."""
        return []
