"""Distributions of torch (of Pyro where installed) with the cumulative distribution function that torch leaves out.

They are computed by scipy on the CPU in float64 and moved back: they carry no gradient. (Torch has the incomplete gamma
function of the Poisson, but with errors of 1e-9 at a rate of 300.)
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from gpytorch.distributions import base_distributions
from torch import Tensor
from torch.distributions import Distribution

from gpext.distributions.drawing import drawn_from

_LARGE_RATE = 1e15  # of a Poisson distribution, from where on its draws are those of a normal one, rounded


class StudentT(base_distributions.StudentT):
    """Student-t with `cdf` and `icdf` (no gradient).

    Example:
        >>> import torch
        >>> StudentT(torch.tensor(3.0)).icdf(torch.tensor(0.5))
        tensor(0.)
    """

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value), relatively accurate in the lower tail."""
        if self._validate_args:
            self._validate_sample(value)
        return by_scipy(_special().stdtr, self.df, (value - self.loc) / self.scale)

    def icdf(self, value: Tensor) -> Tensor:
        """The quantile at probability `value` in [0, 1]."""
        return self.loc + self.scale * by_scipy(_special().stdtrit, self.df, value)


class Bernoulli(base_distributions.Bernoulli):
    """Bernoulli with `cdf`, `icdf` and `quantile`, classes of any dtype, and draws from a generator.

    Example:
        >>> import torch
        >>> Bernoulli(probs=torch.tensor(0.25)).cdf(torch.tensor(0.0))
        tensor(0.7500)
    """

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape; from torch's global generator by default."""
        with drawn_from(generator):
            return super().sample(torch.Size(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log P(Y = value)."""
        return super().log_prob(value.to(self.logits.dtype))

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value): 0 below 0, 1 - probs below 1, 1 from there."""
        failure = torch.sigmoid(-self.logits)
        return torch.where(
            value < 0, torch.zeros_like(failure), torch.where(value < 1, failure, torch.ones_like(failure))
        )

    def icdf(self, value: Tensor | float) -> Tensor:
        """The smallest class k with P(Y <= k) >= value."""
        return (torch.as_tensor(value, device=self.logits.device) > torch.sigmoid(-self.logits)).to(self.logits.dtype)

    def quantile(self, q: Tensor | float) -> Tensor:
        """The same as `icdf`."""
        return self.icdf(q)


class Beta(base_distributions.Beta):
    """Beta with `cdf` and `icdf` (no gradient).

    Example:
        >>> import torch
        >>> Beta(2.0, 2.0).icdf(torch.tensor(0.5))
        tensor(0.5000)
    """

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value) = I_value(alpha, beta), relatively accurate in the lower tail."""
        if self._validate_args:
            self._validate_sample(value)
        return by_scipy(_special().betainc, self.concentration1, self.concentration0, value)

    def icdf(self, value: Tensor) -> Tensor:
        """The quantile at probability `value` in [0, 1]."""
        return by_scipy(_special().betaincinv, self.concentration1, self.concentration0, value)


class NegativeBinomial(base_distributions.NegativeBinomial):
    """Negative binomial with `cdf` (no gradient), and draws of any size.

    Example:
        >>> import torch
        >>> NegativeBinomial(torch.tensor(1.0), probs=torch.tensor(0.5)).cdf(torch.tensor(0.0))
        tensor(0.5000)
    """

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """Draws of shape sample_shape + batch_shape."""
        with torch.no_grad():
            return _poisson_draws(self._gamma.sample(torch.Size(sample_shape)))

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value) = I_{1 - probs}(total_count, value + 1)."""
        if self._validate_args:
            self._validate_sample(value)
        # sigmoid(-logits) keeps its digits where 1 - probs would cancel.
        cdf = by_scipy(_special().betainc, self.total_count, value.floor() + 1, torch.sigmoid(-self.logits))
        return torch.where(self.total_count == 0, torch.ones_like(cdf), cdf)


class Poisson(base_distributions.Poisson):
    """Poisson with `cdf` (no gradient), and draws of any size.

    Example:
        >>> import torch
        >>> Poisson(torch.tensor(1.0)).cdf(torch.tensor(0.0))  # exp(-1)
        tensor(0.3679)
    """

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """Draws of shape sample_shape + batch_shape."""
        with torch.no_grad():
            return _poisson_draws(self.rate.expand(self._extended_shape(torch.Size(sample_shape))))

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value) = Q(value + 1, rate)."""
        if self._validate_args:
            self._validate_sample(value)
        return by_scipy(_special().pdtr, value.floor(), self.rate)


def with_cdf(distribution: Distribution) -> Distribution:
    """Return a distribution of torch as the one of this file, where there is one; any other as it is.

    Example:
        >>> import torch
        >>> with_cdf(torch.distributions.Poisson(torch.tensor(1.0))).cdf(torch.tensor(0.0))
        tensor(0.3679)
    """
    if isinstance(distribution, (StudentT, Bernoulli, Beta, NegativeBinomial, Poisson)):
        return distribution
    if isinstance(distribution, torch.distributions.StudentT):
        return StudentT(distribution.df, distribution.loc, distribution.scale)
    if isinstance(distribution, torch.distributions.Bernoulli):
        return Bernoulli(logits=distribution.logits)
    if isinstance(distribution, torch.distributions.Beta):
        return Beta(distribution.concentration1, distribution.concentration0)
    if isinstance(distribution, torch.distributions.NegativeBinomial):
        return NegativeBinomial(distribution.total_count, logits=distribution.logits)
    if isinstance(distribution, torch.distributions.Poisson):
        return Poisson(distribution.rate)
    return distribution


def _poisson_draws(rate: Tensor) -> Tensor:
    """Return a Poisson draw for each rate; torch's are 64-bit integers inside, negative at rates above 2^63."""
    large = rate > _LARGE_RATE
    draws = torch.poisson(torch.where(large, 1.0, rate))
    if not bool(large.any()):
        return draws
    # Normal to one part in sqrt(rate) of its width. In this form an infinite rate stays infinite.
    normal = rate * (1 + torch.randn_like(rate) * rate.rsqrt())
    return torch.where(large, normal.round(), draws)


def by_scipy(function: Callable, *arguments: Tensor) -> Tensor:
    """Return an elementwise function of scipy, computed in float64 on the CPU; no gradient."""
    dtype = torch.float32
    for argument in arguments:
        dtype = torch.promote_types(dtype, argument.dtype)
    result = function(*(argument.detach().double().cpu().numpy() for argument in arguments))
    return torch.as_tensor(result, dtype=dtype, device=arguments[-1].device)


def _special() -> ModuleType:
    """Return scipy.special, imported at the first use: it takes a tenth of the time of `import gpytorch`."""
    from scipy import special

    return special
