"""The predictive distribution p(y) = int p(y | f) N(f | m, v) df of a likelihood, as a distribution object.

Density, cumulative distribution function and moments are one-dimensional integrals, done by `gpext.quadrature`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from gpytorch.distributions import Distribution
from torch import Tensor
from torch.distributions import constraints

from gpext.distributions.drawing import drawn_from
from gpext.distributions.predictive.newton_quantiles import check_probability
from gpext.distributions.predictive.quantile_search import integer_quantile, real_quantile
from gpext.distributions.tweedie import AMOUNTS
from gpext.quadrature import Function, analytic_expectation, expectation, log_expectation

_CDF_TOLERANCE = 1e-12  # relative; the quantile inherits it
_CDF_ROUNDING = 1e-15  # absolute: torch's own cdfs cancel in the lower tail

Conditional = Callable[[Tensor], torch.distributions.Distribution]


class CompoundDistribution(Distribution):
    """p(y) = int p(y | f) N(f | mean, variance) df for scalar y, elementwise over the batch.

    Pickling and copying need a `conditional` (and `knots`, `log_prob`, `strip`) that can be pickled: not a lambda.

    Args:
        conditional: maps f to p(y | f), with batch shape that of f and event shape ().
        mean: (*batch) means of the latent f.
        variance: (*batch) its variances, zero allowed.
        knots: maps a value (*shape) to places f (J, *shape) where p(value | f) has a kink or a narrow peak. Default:
            (or if it returns None) the value itself if the support is the real line, none otherwise.
        log_prob: maps (value, mean, variance), equally shaped, to log p(value), where there is a better route.
        strip: maps a value (*shape) to half the width (*shape) of a strip about the real line in which its cdf given f
            is analytic in f, of a `conditional` without parameters of a batch; None where it is not known.
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> from gpext.distributions import Poisson
        >>> y = CompoundDistribution(lambda f: Poisson(f.exp()), torch.zeros(1), torch.ones(1))
        >>> y.mean  # exp(1/2)
        tensor([1.6487])
    """

    arg_constraints = {"latent_mean": constraints.real, "latent_variance": constraints.nonnegative}

    def __init__(
        self,
        conditional: Conditional,
        mean: Tensor,
        variance: Tensor,
        *,
        knots: Callable[[Tensor], Tensor | None] | None = None,
        log_prob: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        strip: Callable[[Tensor], Tensor | None] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.conditional = conditional
        self.latent_mean, self.latent_variance = torch.broadcast_tensors(mean, variance)
        self._knots, self._log_prob, self._strip = knots, log_prob, strip
        at_mean = conditional(self.latent_mean)
        if at_mean.batch_shape != self.latent_mean.shape or at_mean.event_shape != torch.Size():
            raise ValueError(
                f"conditional must map f of shape {tuple(self.latent_mean.shape)} to a distribution with that batch "
                f"shape and event shape (); got batch shape {tuple(at_mean.batch_shape)} and event shape "
                f"{tuple(at_mean.event_shape)}."
            )
        super().__init__(self.latent_mean.shape, validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: CompoundDistribution | None = None) -> CompoundDistribution:
        """The same distribution, repeated over `batch_shape`."""
        new = self._get_checked_instance(CompoundDistribution, _instance)
        new.conditional, new._knots = self.conditional, self._knots
        new._log_prob, new._strip = self._log_prob, self._strip
        new.latent_mean, new.latent_variance = (
            self.latent_mean.expand(batch_shape),
            self.latent_variance.expand(batch_shape),
        )
        super(CompoundDistribution, new).__init__(torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def support(self) -> constraints.Constraint:
        """The support of the conditional."""
        support = self.conditional(self.latent_mean).support
        if support is None:
            raise NotImplementedError("the conditional does not declare its support.")
        return support

    @property
    def mean(self) -> Tensor:
        """E[E(y | f)], (*batch); nan or inf where the conditional's own is."""
        return self._moment(lambda f: self.conditional(f).mean, self.conditional(self.latent_mean).mean)

    @property
    def variance(self) -> Tensor:
        """E[Var(y | f)] + Var[E(y | f)], (*batch); nan or inf where the conditional's own is."""
        mean = self.mean.detach()
        centre = torch.where(mean.isfinite(), mean, 0.0)  # Var = E (e - centre)^2 has zero derivative in centre
        at_mean = self.conditional(self.latent_mean)

        def second_moment(f: Tensor) -> Tensor:
            given = self.conditional(f)
            return given.variance + (given.mean - centre).square()

        return self._moment(second_moment, torch.where(at_mean.mean.isnan(), at_mean.mean, at_mean.variance))

    def _moment(self, function: Callable[[Tensor], Tensor], at_mean: Tensor) -> Tensor:
        defined = at_mean.isfinite()
        value = expectation(lambda f: torch.where(defined, function(f), 0.0), self.latent_mean, self.latent_variance)
        return torch.where(defined, value, at_mean).to(value.dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log p(value); value (*sample, *batch), result alike, differentiable."""
        value, mean, variance, original = self._aligned(value)
        return self._at_infinity(self._log_density(value, mean, variance), original, -math.inf, -math.inf)

    def _log_density(self, value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        if self._log_prob is not None:
            return self._log_prob(value, mean, variance)
        knots = self._knots_at(value)
        return log_expectation(lambda f: self.conditional(f).log_prob(value), mean, variance, knots=knots)

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value) = E[P(Y <= value | f)]; value (*sample, *batch), result alike.

        Differentiable in the latent mean and variance, and in the conditional's parameters if its cdf is.

        Raises:
            NotImplementedError: the conditional has no cdf.
        """
        value, mean, variance, original = self._aligned(value)
        result = self._cdf(value, mean, variance)
        return self._at_infinity(result, original, 0.0, 1.0)

    def _cdf(self, value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        strip = None if self._strip is None or not mean.dim() else self._strip(value)
        knots = self._knots_at(value)

        def part(rows: Tensor) -> tuple[Function, Tensor | None]:
            some = value[..., rows]
            return lambda f: self.conditional(f).cdf(some), None if knots is None else knots[..., rows]

        try:
            if strip is not None:
                return analytic_expectation(part, mean, variance, strip).clamp(max=1)
            probability = expectation(
                lambda f: self.conditional(f).cdf(value),
                mean,
                variance,
                knots=knots,
                relative_tolerance=_CDF_TOLERANCE if mean.dtype == torch.float64 else None,
                absolute_tolerance=_CDF_ROUNDING,
            )
            return probability.clamp(max=1)  # the weights sum to one but for rounding
        except NotImplementedError as error:
            name = type(self.conditional(mean)).__name__
            raise NotImplementedError(f"{name} has no cdf; gpext.distributions has some that do.") from error

    def icdf(self, value: Tensor | float) -> Tensor:
        """The quantile: the smallest y with cdf(y) >= value, of integers up to 1e-11. No gradient.

        Raises:
            ValueError: a probability is not strictly between 0 and 1.
        """
        with torch.no_grad():
            q, mean = torch.broadcast_tensors(check_probability(value, self.latent_mean), self.latent_mean)
            variance = self.latent_variance.expand(q.shape)
            dtype = torch.promote_types(mean.dtype, variance.dtype)
            q, mean, variance = q.double(), mean.double(), variance.double()
            support = self.support

            def cdf(y: Tensor) -> Tensor:
                return self._cdf(y, mean, variance)

            if support.is_discrete:
                return integer_quantile(cdf, q, support, tolerance=1e-11).to(dtype)
            given = self.conditional(mean)
            of_zero = cdf(torch.zeros_like(q)) if support is AMOUNTS else torch.zeros_like(q)
            inside = torch.where(q > of_zero, q, 0.5 + 0.5 * of_zero)
            centre = torch.where(given.mean.isfinite(), given.mean, mean if support is constraints.real else 1.0)
            width = torch.where(given.stddev.isfinite(), given.stddev, 1.0).double() + variance.sqrt()

            def log_density(y: Tensor) -> Tensor:
                return self._log_density(y, mean, variance)

            found = real_quantile(cdf, log_density, inside, support, centre.double(), width, tolerance=_CDF_TOLERANCE)
            return torch.where(q > of_zero, found, 0.0).to(dtype)

    def quantile(self, q: Tensor | float) -> Tensor:
        """The same as `icdf`."""
        return self.icdf(q)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape; from torch's global generator by default."""
        with torch.no_grad(), drawn_from(generator):
            shape = self._extended_shape(torch.Size(sample_shape))
            mean, sd = self.latent_mean.expand(shape), self.latent_variance.sqrt().expand(shape)
            return self.conditional(torch.normal(mean, sd)).sample()

    def _knots_at(self, value: Tensor) -> Tensor | None:  # (J, *shape)
        knots = None if self._knots is None else self._knots(value)
        return value.unsqueeze(0) if knots is None and self.support is constraints.real else knots

    def _aligned(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The value with infinities and nan replaced by 1 (in every support), mean, variance, the value as it was."""
        if self._validate_args:
            self._validate_sample(value)
        original, mean = torch.broadcast_tensors(value, self.latent_mean)
        variance = self.latent_variance.expand(mean.shape)
        return torch.where(original.isfinite(), original, 1), mean, variance, original

    @staticmethod
    def _at_infinity(result: Tensor, value: Tensor, below: float, above: float) -> Tensor:
        result = torch.where(value == -math.inf, below, torch.where(value == math.inf, above, result))
        return torch.where(value.isnan(), math.nan, result)


class AdditiveNoisePredictive(CompoundDistribution):
    """`CompoundDistribution` of y = f + noise, noise independent of f: the first two moments are exact.

    `conditional(f)` must be the noise distribution shifted to f, with mean f where it has one.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import LaplaceLikelihood
        >>> likelihood = LaplaceLikelihood().double()
        >>> likelihood.noise = 1.0
        >>> y = likelihood(MultivariateNormal(torch.zeros(1).double(), torch.eye(1).double()))
        >>> y.variance.detach()  # 1 + 2
        tensor([3.], dtype=torch.float64)
    """

    @property
    def mean(self) -> Tensor:
        """That of the conditional at the latent mean; nan where the noise has none."""
        return self.conditional(self.latent_mean).mean

    @property
    def variance(self) -> Tensor:
        """Latent variance plus noise variance; inf or nan where the noise has none."""
        return self.latent_variance + self.conditional(self.latent_mean).variance
