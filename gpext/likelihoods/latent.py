r"""The shared gpytorch shell of a likelihood p(y | f), with f of one or of several latent functions.

A subclass defines functions of plain tensors; gpytorch's methods are built on them, datum by datum:

    log_prob(y, f)                  log p(y | f)
    expected_log_density(y, m, v)   E[log p(y | f)],  f ~ N(m, v)
    log_density(y, m, v)            log E[p(y | f)]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Distribution

from gpext.bounds import has_density_of, serves_density
from gpext.checks import check_tensor
from gpext.distributions import CompoundDistribution
from gpext.likelihoods.checks import check_targets
from gpext.quadrature import (
    Function,
    Part,
    analytic_expectation,
    analytic_tilted_moments,
    expectation,
    log_expectation,
)

STRIP = 2.2  # of a standard normal or logistic law: the distribution functions have no zeros or poles within
_CHUNK = 4096  # data in one adaptive integration: some 1000 nodes each, in float64


def strip_of(likelihood: Any, targets: Tensor) -> Tensor | None:
    """Return half the width of the strip (..., N) in which p(y | f) is analytic, or None where it is not known.

    A subclass with a density of its own has to say its own strip.
    """
    if has_density_of(likelihood, gpytorch.likelihoods.GaussianLikelihood):
        return STRIP * likelihood.noise.detach().sqrt().expand(targets.shape)
    if not isinstance(likelihood, LatentLikelihood):
        return None
    return likelihood.strip(targets) if serves_density(likelihood, "strip") else None


class LatentLikelihood(Likelihood, ABC):
    """The base of every likelihood of gpext.

    With one latent function per datum (`num_latents` is None) everything works elementwise on latent values (..., N);
    of a multitask distribution (..., N, T) the T tasks share the parameters and their log densities are summed, as
    gpytorch's multitask likelihoods do.

    With D latent functions (`num_latents` is D) means, variances and latent values have shape (..., D, N), the latents
    being independent given q, and results (..., N). gpytorch's methods then take a MultivariateNormal with batch shape
    (..., D), or a MultitaskMultivariateNormal with D tasks.

    A user-defined likelihood overrides :meth:`unchecked_log_prob`, and that is all that KL, EP, Laplace, Taylor and
    training need; derivatives and integrals over one latent come from autograd and adaptive quadrature. Optional are

    * `forward(f)`, the distribution p(y | f), for predictions of y;
    * :meth:`check_support`, to refuse targets that it has no density for;
    * :meth:`datum_shape`, where the target of a datum is several numbers, of which some may be side information: times
      with censoring marks, counts with exposures. `likelihood.log_marginal(targets, model(x))` has the predictive log
      density of such targets; the predictive distribution is that of what `forward` returns;
    * :meth:`knots`, where p(y | f) is far narrower in f than the Gaussian may be;
    * :meth:`strip`, where p(y | f) is analytic in f: integrals then take some 40 nodes in place of hundreds;
    * `log_prob_slopes(targets, f)`, the two derivatives of log p(y | f) in f, which Laplace otherwise has by autograd;
    * :meth:`expected_log_density` and :meth:`log_density`, where they have a closed form.

    With several latents subclass :class:`gpext.likelihoods.JointLikelihood`, which needs `curvature` as well.

    Example:
        Survival times, some only known to be longer: a target is a pair (time, event), event 0 where the time is
        censored; e^f is the scale of a Weibull distribution, whose shape is learnt.

        >>> import torch
        >>> from gpytorch.constraints import Positive
        >>> class SurvivalLikelihood(LatentLikelihood):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.register_parameter("raw_concentration", torch.nn.Parameter(torch.zeros(())))
        ...         self.register_constraint("raw_concentration", Positive())
        ...
        ...     @property
        ...     def concentration(self):
        ...         return self.raw_concentration_constraint.transform(self.raw_concentration)
        ...
        ...     def datum_shape(self, targets):
        ...         return targets.shape[:-1]  # (..., N, 2) -> (..., N)
        ...
        ...     def check_support(self, targets):
        ...         if targets.dim() < 2 or targets.size(-1) != 2:
        ...             raise ValueError(f"targets must be pairs (..., N, 2); got shape {tuple(targets.shape)}.")
        ...         time, event = targets.unbind(-1)
        ...         if bool((time <= 0).any()) or bool(((event != 0) & (event != 1)).any()):
        ...             raise ValueError("times must be positive, and events 0 or 1.")
        ...
        ...     def unchecked_log_prob(self, targets, f):  # (..., N, 2), (..., N) -> (..., N)
        ...         time, event = targets.unbind(-1)
        ...         log_hazard = self.concentration * (time.log() - f)  # accumulated; the log of -log S(time)
        ...         return event * (self.concentration.log() + log_hazard - time.log()) - log_hazard.exp()
        ...
        ...     def forward(self, f):
        ...         return torch.distributions.Weibull(f.exp(), self.concentration)
        >>> targets = torch.tensor([[2.0, 1.0], [3.0, 0.0]])  # an event at 2, none until 3
        >>> SurvivalLikelihood().log_prob(targets, torch.zeros(2)).detach()
        tensor([-2.1960, -2.1415])
    """

    num_latents: int | None = None

    @property
    def target_numbers(self) -> int | None:
        """The number of numbers in the target of a datum; None if a subclass overrides :meth:`datum_shape` alone."""
        return 1 if type(self).datum_shape is LatentLikelihood.datum_shape else None

    def check(self, targets: Tensor) -> None:
        """Raise unless the targets are finite, of a dtype that the algebra works in, and in the support.

        Raises:
            TypeError: the targets are half precision.
            ValueError: targets are not finite or outside the support.
        """
        check_targets(targets)
        self.check_support(targets)

    def datum_shape(self, targets: Tensor) -> torch.Size:
        """Return the shape of the data (..., N), without the last dimensions that belong to one datum; to override."""
        return targets.shape

    def join(self, targets: Tensor) -> Tensor:
        """Return the targets with the numbers of each datum that the likelihood holds, such as weights, behind them."""
        return targets

    def take(self, targets: Tensor, index: Tensor | slice) -> Tensor:
        """Return the targets of the data at `index`."""
        return targets[(..., index, *(slice(None),) * self.target_dims(targets))]

    def target_dims(self, targets: Tensor) -> int:
        """Return how many dimensions the target of one datum has."""
        return targets.dim() - len(self.datum_shape(targets))

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target, known to be finite, is outside the support; to override."""

    @abstractmethod
    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets that :meth:`check` has passed; what a subclass overrides.

        Twice differentiable in f by autograd, and in the likelihood's parameters. f may have more dimensions in front
        than the data, such as the nodes of a quadrature.

        Args:
            targets: (..., N), or (..., N, ...) where the target of a datum is several numbers.
            f: (..., N), or (..., D, N) for D latents.
        """

    def log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), twice differentiable in f (..., N) or (..., D, N).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        return self.unchecked_log_prob(targets, f)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, variance): :meth:`expected_log_prob` from plain tensors.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        return self._in_chunks(expectation, targets, mean, variance)

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, variance) df: :meth:`log_marginal` from plain tensors.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        return self._in_chunks(log_expectation, targets, mean, variance)

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return E[log p(y | f)] under the marginals of function_dist, (..., N), exact to quadrature tolerance.

        Raises:
            TypeError: the targets are half precision.
            ValueError: targets do not fit the latent distribution, are not finite, or are outside the support.
        """
        mean, variance = self._fitting_marginals(observations, function_dist)
        return self._sum_tasks(self.expected_log_density(observations, mean, variance), function_dist)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        r"""Return :math:`\log \int p(y_i | f) q(f) df` for each datum, (..., N), exact to quadrature tolerance.

        Raises:
            TypeError, ValueError: as :meth:`expected_log_prob`.
        """
        mean, variance = self._fitting_marginals(observations, function_dist)
        return self._sum_tasks(self.log_density(observations, mean, variance), function_dist)

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y) at the marginals of function_dist: mean, variance, log_prob, cdf, quantile, sample."""
        mean, variance = self._marginals(function_dist)
        # With side information, `log_density` needs more than a value of the predicted variable.
        if type(self).datum_shape is not LatentLikelihood.datum_shape:
            return CompoundDistribution(self.forward, mean, variance)
        # By equal steps `forward` takes some of the data alone, which parameters of a batch might not fit.
        strip = None if any(p.numel() > 1 for p in self.parameters()) else partial(strip_of, self)
        return CompoundDistribution(
            self.forward, mean, variance, knots=self.knots, log_prob=self.log_density, strip=strip
        )

    def pyro_guide(self, function_dist: Any, target: Tensor, *args: Any, **kwargs: Any) -> None:
        """Draw f in a Pyro guide, as gpytorch's models call it; see :meth:`pyro_model`."""
        with self._plates(function_dist):
            self._sample_latents(function_dist)

    def pyro_model(self, function_dist: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Draw f and observe the targets in a Pyro model, as gpytorch's models call it.

        The data are a plate, and so is each batch of them; several latents, or tasks, of a datum are one event.
        `function_dist` has the marginals of f, Normal with batch shape (..., N), (..., D, N), or (..., N) and D events.
        """
        with self._plates(function_dist):
            output = self(self._sample_latents(function_dist), *args, **kwargs)
            if self.num_latents is None:
                output = output.to_event(len(function_dist.event_shape))
            return self.sample_target(output, target)

    def _sample_latents(self, function_dist: Any) -> Tensor:
        """Return f as :meth:`forward` takes it."""
        import pyro

        if self.num_latents is None:
            return pyro.sample(f"{self.name_prefix}.f", function_dist)
        mean, variance = function_dist.mean, function_dist.variance
        if not function_dist.event_shape:
            mean, variance = mean.mT, variance.mT
        by_datum = pyro.distributions.Normal(mean, variance.sqrt()).to_event(1)
        return pyro.sample(f"{self.name_prefix}.f", by_datum.mask(False)).mT

    def _plates(self, function_dist: Any) -> Any:
        """Return the plates of the data and of their batches."""
        import pyro

        shape = function_dist.batch_shape
        if self.num_latents is not None and not function_dist.event_shape:
            shape = shape[:-2] + shape[-1:]
        return pyro.plate_stack(f"{self.name_prefix}.data_plate", shape)

    def knots(self, targets: Tensor) -> Tensor | None:  # (J, ..., N)
        """Return latent values where p(y | f) has a kink or a feature that may be much narrower than the Gaussian."""
        return None

    def strip(self, targets: Tensor) -> Tensor | None:  # (..., N)
        """Return half the width of a strip about the real line in which p(y | f) is analytic in f and has no zeros.

        There |p(y | f + ia)| should be no more than about e^4 times p(y | f). None, by default, where it is not known
        or where p(y | f) has a kink.
        """
        return None

    def part(self, targets: Tensor, power: float = 1.0) -> Part:
        """Return a function of rows (n,): f -> power log p(y | f) of these data, and their knots."""

        def part(rows: Tensor) -> tuple[Function, Tensor | None]:
            some = self.take(targets, rows)
            return lambda f: power * self.unchecked_log_prob(some, f), self.knots(some)

        return part

    def _in_chunks(self, integral: Callable[..., Tensor], targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the integral of log p(y | f) (or of p) over one latent, some thousand data at a time."""
        data = self.datum_shape(targets)
        of_datum = targets.shape[len(data) :]
        shape = torch.broadcast_shapes(data, mean.shape, variance.shape)
        targets, mean, variance = targets.expand(*shape, *of_datum), mean.expand(shape), variance.expand(shape)
        size = mean.size(-1) if mean.dim() else 1
        chunk = max(_CHUNK * size // max(mean.numel(), 1), 1)
        if size <= chunk:
            return self._integral(integral, targets, mean, variance)
        parts = zip(
            targets.split(chunk, -1 - len(of_datum)), mean.split(chunk, -1), variance.split(chunk, -1), strict=True
        )
        return torch.cat([self._integral(integral, *part) for part in parts], -1)

    def _integral(self, integral: Callable[..., Tensor], targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        strip = strip_of(self, targets) if mean.dim() else None
        if strip is not None and integral is expectation:
            return analytic_expectation(self.part(targets), mean, variance, strip)
        if strip is not None:
            return analytic_tilted_moments(self.part(targets), mean, variance, strip).log_normalizer
        return integral(lambda f: self.unchecked_log_prob(targets, f), mean, variance, knots=self.knots(targets))

    def _marginals(self, function_dist: MultivariateNormal) -> tuple[Tensor, Tensor]:
        """Return means and variances, (..., N) or (..., D, N)."""
        if isinstance(function_dist, Tensor):
            raise TypeError(
                "expected the distribution of f, as a model returns it; got a Tensor. Of latent values themselves "
                "likelihood(f) is p(y | f), and log_prob(targets, f) its logarithm."
            )
        mean, variance = function_dist.mean, function_dist.variance
        if self.num_latents is None:
            return mean, variance
        if isinstance(function_dist, MultitaskMultivariateNormal):
            mean, variance = mean.mT, variance.mT
        if mean.dim() < 2 or mean.size(-2) != self.num_latents:
            raise ValueError(
                f"{type(self).__name__} has num_latents = {self.num_latents}: expected a MultivariateNormal with batch "
                f"shape (..., {self.num_latents}) or a MultitaskMultivariateNormal with {self.num_latents} tasks; got "
                f"a {type(function_dist).__name__} with mean of shape {tuple(function_dist.mean.shape)}."
            )
        return mean, variance

    def _fitting_marginals(self, observations: Tensor, function_dist: MultivariateNormal) -> tuple[Tensor, Tensor]:
        """Return the marginals; raise if the targets do not broadcast against them."""
        check_tensor("targets", observations)
        mean, variance = self._marginals(function_dist)
        shape = mean.shape if self.num_latents is None else mean.select(-2, 0).shape
        data = self.datum_shape(observations)
        try:
            fits = torch.broadcast_shapes(data, shape)[-1:] == shape[-1:] and data[-1:] in ((), shape[-1:])
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(
                f"targets must broadcast against the latent function; got targets of shape "
                f"{tuple(observations.shape)} and a latent distribution of shape {tuple(function_dist.mean.shape)}."
            )
        return mean, variance

    def _sum_tasks(self, log_prob: Tensor, function_dist: MultivariateNormal) -> Tensor:
        tasks = self.num_latents is None and isinstance(function_dist, MultitaskMultivariateNormal)
        return log_prob.sum(-1) if tasks else log_prob
