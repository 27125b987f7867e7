r"""Hazards of a family of positive times, T ~ p(t | f), for a Gaussian posterior of f.

    S(t) = E[S(t | f)],   H(t | f) = -log S(t | f),   h(t | f) = p(t | f) / S(t | f),     f ~ N(m, v)

Where T / e^f has a law without f and t h(t | 0) increases with t, as in every family of positive times of gpext, S, H,
h and the quantiles of T are monotone in f, and their credible limits are their values at the quantiles of f. Means are
integrals over f by adaptive quadrature. No number depends on chance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from gpext.checks import check_finite, check_tensor
from gpext.distributions import LatentNormal, log_survival
from gpext.likelihoods import Censored, LatentLikelihood
from gpext.likelihoods.latent import strip_of
from gpext.likelihoods.positive import PositiveLikelihood
from gpext.quadrature import Function, analytic_expectation, expectation
from gpext.survival.bands import Band, Limits, probabilities
from gpext.survival.times import check_grid, check_survival

_CHUNK = 4096  # integrals at once


@dataclass(frozen=True)
class ParametricHazard:
    """The posterior of the hazards of S subjects whose times have a parametric law given f.

    Attributes:
        likelihood: p(t | f): Weibull, log-logistic, log-normal, gamma or generalised Pareto, `Censored` or not.
        mean: of f (S,).
        variance: of f (S,).

    Raises:
        TypeError: another likelihood.
        ValueError: shapes that do not match, numbers that are not finite, or a negative variance.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import WeibullLikelihood
        >>> hazard = ParametricHazard(WeibullLikelihood().initialize(shape=1.0), torch.zeros(1), torch.zeros(1))
        >>> hazard.survival(torch.tensor([1.0, 2.0])).mean
        tensor([[0.3679, 0.1353]])
    """

    likelihood: LatentLikelihood
    mean: Tensor = field(repr=False)
    variance: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self._inside, PositiveLikelihood):
            raise TypeError(
                "expected a likelihood of positive times, such as Censored(WeibullLikelihood()); got "
                f"{type(self._inside).__name__}."
            )
        for name, values in (("mean", self.mean), ("variance", self.variance)):
            check_tensor(name, values)
            check_finite(name, values)
        if self.mean.dim() != 1 or self.variance.shape != self.mean.shape or bool((self.variance < 0).any()):
            raise ValueError(
                "expected means and variances (S,) of the latent function, none of which is negative; got shapes "
                f"{tuple(self.mean.shape)} and {tuple(self.variance.shape)}, and a smallest variance of "
                f"{float(self.variance.min()):g}."
            )

    def survival(self, times: Tensor, *, level: float = 0.9) -> Band:
        """Return the survival functions (S, T) at times (T,); the mean is the predictive probability of no event.

        Raises:
            TypeError, ValueError: times that are negative or not finite, or a level outside (0, 1).
        """
        return self._band(lambda f, t: self._log_survival(f, t).exp(), times, level)

    def cumulative_hazard(self, times: Tensor, *, level: float = 0.9) -> Band:
        """Return the cumulative hazards (S, T) at times (T,).

        Raises:
            TypeError, ValueError: as :meth:`survival`.
        """
        return self._band(lambda f, t: -self._log_survival(f, t), times, level)

    def hazard(self, times: Tensor, *, level: float = 0.9) -> Band:
        """Return the hazards (S, T) at positive times (T,): events per unit of time.

        Raises:
            TypeError, ValueError: as :meth:`survival`, or a time of zero, where a hazard may be infinite.
        """
        check_tensor("times", times)
        if bool((times == 0).any()):
            raise ValueError("the hazard at time 0 may be zero or infinite; ask for it at positive times.")

        def function(f: Tensor, t: Tensor) -> Tensor:
            return (self.likelihood.forward(f).log_prob(t) - self._log_survival(f, t)).exp()

        return self._band(function, times, level)

    def quantile_times(self, probability: float = 0.5, *, level: float = 0.9) -> Limits:
        """Return the times (S,) at which the probability of an event reaches `probability`.

        Args:
            probability: of an event until then: 0.5 for the median survival time.
            level: of the credible limits.

        Raises:
            ValueError: a probability or a level outside (0, 1).
        """
        f = self._quantiles_of_f(level)
        given = self.likelihood.marginal(LatentNormal(f, DiagLinearOperator(torch.zeros_like(f))))
        lower, median, upper = given.icdf(f.new_tensor(probability))
        return Limits(median, lower, upper, level)

    def log_density(self, time: Tensor, event: Tensor) -> Tensor:
        """Return the log predictive density (S,) of an event at each subject's time, or the log of S where censored.

        Raises:
            TypeError, ValueError: as :func:`gpext.survival.split`, or other than S times.
        """
        time, event, _ = check_survival(time, event)
        if len(time) != len(self.mean):
            raise ValueError(f"expected a time of each of {len(self.mean)} subjects; got {len(time)}.")
        limits = torch.stack([time, torch.where(event, time, torch.inf)], -1)
        inside = self.likelihood if isinstance(self.likelihood, Censored) else Censored(self.likelihood)
        return inside.log_density(limits, self.mean, self.variance)

    @property
    def _inside(self) -> LatentLikelihood:
        """The likelihood of times that are not censored."""
        return self.likelihood.likelihood if isinstance(self.likelihood, Censored) else self.likelihood

    def _log_survival(self, f: Tensor, times: Tensor) -> Tensor:
        """Return log P(T > t | f), zero at t = 0."""
        positive = torch.where(times > 0, times, 1.0)
        return torch.where(times > 0, log_survival(self.likelihood.forward(f), positive), 0.0)

    def _quantiles_of_f(self, level: float) -> Tensor:
        """Return the lower limit, the median and the upper limit of f (3, S)."""
        z = torch.special.ndtri(self.mean.new_tensor(probabilities(level)).double()).to(self.mean)
        return self.mean + z.unsqueeze(-1) * self.variance.sqrt()

    @torch.no_grad()
    def _band(self, function: Callable[[Tensor, Tensor], Tensor], times: Tensor, level: float) -> Band:
        """Return the band (S, T) of a function of f and t that is monotone in f."""
        check_grid(times, 0.0)
        times = times.to(self.mean)
        ends = function(self._quantiles_of_f(level).unsqueeze(-1), times)  # (3, S, T)
        shape = ends.shape[1:]
        m, v, t = (
            each.expand(shape).flatten().split(_CHUNK)
            for each in (self.mean.unsqueeze(-1), self.variance.unsqueeze(-1), times)
        )
        parts = [self._mean(function, *some) for some in zip(m, v, t, strict=True)]
        mean = torch.cat(parts).view(shape)
        return Band(ends[1], torch.minimum(ends[0], ends[2]), torch.maximum(ends[0], ends[2]), level, mean)

    def _mean(
        self, function: Callable[[Tensor, Tensor], Tensor], mean: Tensor, variance: Tensor, times: Tensor
    ) -> Tensor:
        """Return E[function(f, t)] for f ~ N(mean, variance), elementwise."""
        positive = torch.where(times > 0, times, 1.0)
        knots = positive.log().unsqueeze(0)
        strip = strip_of(self._inside, positive)  # tails and hazards are analytic where densities are, without zeros
        if strip is None:
            return expectation(lambda f: function(f, times), mean, variance, knots=knots)

        def part(rows: Tensor) -> tuple[Function, Tensor]:
            return lambda f: function(f, times[rows]), knots[:, rows]

        return analytic_expectation(part, mean, variance, strip)


@torch.no_grad()
def parametric_hazard(model: torch.nn.Module, likelihood: LatentLikelihood, inputs: Tensor) -> ParametricHazard:
    """Return the posterior of the hazards at new inputs (S, d), by a model that is in eval mode.

    Args:
        model: a :class:`gpext.models.LatentGP`, or any other gpytorch model of one latent function.
        likelihood: of the times, trained with the model.
        inputs: as the model takes them.

    Raises:
        RuntimeError: the model is in train mode.
        TypeError, ValueError: as :class:`ParametricHazard`, or a model whose call returns something else.

    Example:
        >>> import gpytorch, torch, gpext
        >>> class LogScale(gpext.models.LatentGP):
        ...     def forward(self, x):  # a kernel that is not trained
        ...         kernel = gpytorch.kernels.RBFKernel()
        ...         return gpytorch.distributions.MultivariateNormal(torch.zeros(len(x)), kernel(x))
        >>> x, time = torch.tensor([0.0, 0.3, 0.6, 1.0]), torch.tensor([0.5, 1.0, 2.0, 3.0])
        >>> limits = torch.stack([time, torch.tensor([0.5, 1.0, 2.0, torch.inf])], -1)  # the last one is censored
        >>> likelihood = gpext.likelihoods.Censored(gpext.likelihoods.WeibullLikelihood())
        >>> model = LogScale(x, limits, likelihood).eval()
        >>> hazard = parametric_hazard(model, likelihood, torch.tensor([0.5]))
        >>> hazard.survival(torch.tensor([0.0, 1.0, 2.0])).mean.shape
        torch.Size([1, 3])
    """
    if model.training:
        raise RuntimeError("the model is in train mode; call model.eval() to predict.")
    found = model(inputs)
    if not isinstance(found, MultivariateNormal):
        raise TypeError(f"expected a model that returns the distribution of f; it returned a {type(found).__name__}.")
    return ParametricHazard(likelihood, found.mean, found.variance)
