r"""Hazards that are piecewise constant, e^{f_j} in (b_j, b_{j+1}], for a Gaussian posterior of f = (f_1, ..., f_J).

    H(t) = sum_j e^{f_j} |(b_j, b_{j+1}] n (0, t]|,    S(t) = e^{-H(t)}
    E[h_j] = e^{m_j + v_j / 2},   E[H(t)] = sum_j E[h_j] |...|

Hazards and their limits are log-normal, in closed form, and so is the mean of H. The other numbers depend on a sum of
log-normal variables and are averages and order statistics over joint draws of f.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpext.checks import check_finite, check_tensor
from gpext.distributions.drawing import draws_of_logs
from gpext.survival.bands import Band, Limits, band_of_draws, check_level, log_normal_band
from gpext.survival.splitting import SplitTable
from gpext.survival.times import check_breaks, check_grid, check_survival

_AT_ONCE = 2**22  # numbers of draws that are held together
_ROWS = 512  # inputs in one call of a model, whose joint covariance is dense


@dataclass(frozen=True)
class PiecewiseHazard:
    """The posterior of the piecewise constant hazards of S subjects.

    Attributes:
        breaks: the ends of the intervals (J + 1,), of which the first has a survival of one.
        mean: of the log hazards (S, J).
        covariance: of each subject's log hazards (S, J, J).

    Raises:
        TypeError, ValueError: shapes that do not match, numbers that are not finite, or breaks that do not increase.

    Example:
        >>> import torch
        >>> hazard = PiecewiseHazard(torch.tensor([0.0, 1.0, 3.0]), torch.zeros(1, 2), torch.zeros(1, 2, 2))
        >>> hazard.survival(torch.tensor([0.0, 2.0]), num_draws=10).mean
        tensor([[1.0000, 0.1353]])
    """

    breaks: Tensor
    mean: Tensor = field(repr=False)
    covariance: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        check_breaks(self.breaks)
        for name, values in (("mean", self.mean), ("covariance", self.covariance)):
            check_tensor(name, values)
            check_finite(name, values)
        size = len(self.breaks) - 1
        if self.mean.dim() != 2 or self.mean.size(-1) != size or self.covariance.shape != (*self.mean.shape, size):
            raise ValueError(
                f"expected a mean (S, {size}) and a covariance (S, {size}, {size}) of the log hazards in {size} "
                f"intervals; got {tuple(self.mean.shape)} and {tuple(self.covariance.shape)}."
            )

    @property
    def _variance(self) -> Tensor:
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    def draws(self, num_draws: int = 1000, *, generator: torch.Generator | None = None) -> Tensor:
        """Return joint draws of the log hazards (num_draws, S, J), independent between subjects.

        Raises:
            TypeError, ValueError: not a positive whole number of draws, or a covariance that is not positive
                semidefinite.
        """
        return draws_of_logs(self.mean, self.covariance, num_draws, generator=generator)

    def hazard(self, times: Tensor | None = None, *, level: float = 0.9) -> Band:
        """Return the hazards (S, T) at times (T,), or in all intervals (S, J): events per unit of time.

        Args:
            times: from the first break to the last.
            level: of the credible limits.

        Raises:
            TypeError, ValueError: times outside the intervals, or a level outside (0, 1).
        """
        mean, variance = self.mean, self._variance
        if times is not None:
            inside = self._interval(self._checked(times))
            mean, variance = mean[..., inside], variance[..., inside]
        return log_normal_band(mean, variance, level)

    def cumulative_hazard(
        self, times: Tensor, *, level: float = 0.9, num_draws: int = 1000, generator: torch.Generator | None = None
    ) -> Band:
        """Return the cumulative hazards (S, T) at times (T,); the mean is exact, the limits are from draws.

        Raises:
            TypeError, ValueError: as :meth:`hazard` and :meth:`draws`.
        """
        spent = self._time_in_intervals(self._checked(times))
        band = self._band(lambda f: f.exp() @ spent.mT, len(spent), level, num_draws, generator)
        return replace(band, mean=(self.mean + 0.5 * self._variance).exp() @ spent.mT)

    def survival(
        self, times: Tensor, *, level: float = 0.9, num_draws: int = 1000, generator: torch.Generator | None = None
    ) -> Band:
        """Return the survival functions (S, T) at times (T,), from draws.

        The mean is the predictive probability that a subject is without an event until then. Its Monte Carlo error has
        a standard deviation below 1 / (2 sqrt(num_draws)).

        Raises:
            TypeError, ValueError: as :meth:`hazard` and :meth:`draws`.
        """
        spent = self._time_in_intervals(self._checked(times))
        return self._band(lambda f: torch.exp(-(f.exp() @ spent.mT)), len(spent), level, num_draws, generator)

    def quantile_times(
        self,
        probability: float = 0.5,
        *,
        level: float = 0.9,
        num_draws: int = 1000,
        generator: torch.Generator | None = None,
    ) -> Limits:
        """Return the times (S,) at which the probability of an event reaches `probability`, from draws.

        They are infinite where that is after the last break.

        Args:
            probability: of an event until then: 0.5 for the median survival time.
            level: of the credible limits.
            num_draws: of the log hazards.
            generator: of the draws.

        Raises:
            TypeError, ValueError: as :meth:`hazard` and :meth:`draws`, or a probability outside (0, 1).
        """
        if not 0 < probability < 1:
            raise ValueError(f"probability must be between 0 and 1; got {probability!r}.")
        target, breaks = -math.log1p(-probability), self.breaks.to(self.mean)

        def function(f: Tensor) -> Tensor:
            gained = f.exp() * breaks.diff()  # (K, S, J)
            reached = gained.cumsum(-1)
            inside = (reached < target).sum(-1, keepdim=True)  # J where the target is not reached
            last = inside.clamp_max(gained.size(-1) - 1)
            before = (reached - gained).gather(-1, last)
            time = breaks[last] + (target - before) * (-f.gather(-1, last)).exp()
            return torch.where(inside == last, time, torch.inf).squeeze(-1)

        band = self._band(function, 1, level, num_draws, generator)
        return Limits(band.median, band.lower, band.upper, level)

    def log_density(
        self, time: Tensor, event: Tensor, *, num_draws: int = 1000, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return the log predictive density (S,) of an event at each subject's time, or the log of S where censored.

        log E[h(t)^d e^{-H(t)}], from draws: a logarithm of an average, biased downwards by about half of the relative
        variance of that average.

        Args:
            time: of each subject (S,), within the intervals.
            event: 1, or 0 where censored (S,).
            num_draws: of the log hazards.
            generator: of the draws.

        Raises:
            TypeError, ValueError: as :func:`split` and :meth:`draws`.
        """
        time, event, _ = check_survival(time, event)
        time = self._checked(time)
        if len(time) != len(self.mean):
            raise ValueError(f"expected a time of each of {len(self.mean)} subjects; got {len(time)}.")
        inside = self._interval(time)[:, None]  # (S, 1)
        spent = self._time_in_intervals(time)  # (S, J)
        f = self.draws(num_draws, generator=generator)
        log_hazard = f.gather(-1, inside.expand(len(f), -1, -1)).squeeze(-1)
        log_density = torch.where(event, log_hazard, 0.0) - (f.exp() * spent).sum(-1)
        return log_density.logsumexp(0) - math.log(len(f))

    def _checked(self, times: Tensor) -> Tensor:
        """Return times in the dtype of the mean, known to be within the intervals."""
        check_grid(times, float(self.breaks[0]), float(self.breaks[-1]))
        return times.to(self.mean)

    def _interval(self, times: Tensor) -> Tensor:
        """Return the intervals (T,) of times; an interval has its end, and the first its beginning."""
        return torch.searchsorted(self.breaks[1:-1].to(times).contiguous(), times.contiguous())

    def _time_in_intervals(self, times: Tensor) -> Tensor:
        """Return the time in each interval until each time (T, J)."""
        breaks = self.breaks.to(times)
        return (torch.minimum(times.unsqueeze(-1), breaks[1:]) - breaks[:-1]).clamp_min(0)

    def _band(
        self,
        function: Callable[[Tensor], Tensor],
        width: int,
        level: float,
        num_draws: int,
        generator: torch.Generator | None,
    ) -> Band:
        """Return the band of a function of log hazards (K, s, J) that has `width` values a subject."""
        check_level(level)
        f = self.draws(num_draws, generator=generator)
        at_once = max(_AT_ONCE // (len(f) * max(width, f.size(-1))), 1)
        bands = [band_of_draws(function(part), level) for part in f.split(at_once, 1)]
        mean, median, lower, upper = (
            torch.cat([getattr(band, name) for band in bands]) for name in ("mean", "median", "lower", "upper")
        )
        return Band(median, lower, upper, level, mean)


@torch.no_grad()
def piecewise_hazard(model: torch.nn.Module, table: SplitTable, covariates: Tensor | None = None) -> PiecewiseHazard:
    """Return the posterior of the hazards of new subjects, by a model of the log hazard that is in eval mode.

    Args:
        model: a :class:`gpext.models.LatentGP`, or any other gpytorch model whose call returns the distribution of the
            log hazard at inputs (R, 1 + d) like those of the table.
        table: from which the model was trained.
        covariates: of the new subjects (S, d), or (S,) for d = 1; None where the table has none.

    Raises:
        RuntimeError: the model is in train mode.
        TypeError, ValueError: covariates of another shape than the table's or not finite, or a model whose call returns
            something else.

    Example:
        >>> import gpytorch, torch, gpext
        >>> class LogHazard(gpext.models.LatentGP):
        ...     def __init__(self, table, likelihood):
        ...         super().__init__(table.inputs, table.counts, likelihood)
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> from gpext.survival import event_breaks, split
        >>> time, event = torch.tensor([0.5, 1.0, 2.0, 3.0]), torch.tensor([1, 1, 1, 0])
        >>> breaks = event_breaks(time, event, 2)
        >>> table = split(time, event, breaks, covariates=torch.tensor([1.0, 0.5, -0.5, -1.0]))
        >>> likelihood = gpext.likelihoods.Offset(gpext.likelihoods.PoissonLikelihood(), table.exposure.log())
        >>> model = LogHazard(table, likelihood).eval()
        >>> hazard = piecewise_hazard(model, table, torch.tensor([0.0, 1.0]))
        >>> hazard.hazard().mean.shape  # of two subjects in two intervals
        torch.Size([2, 2])
    """
    if model.training:
        raise RuntimeError("the model is in train mode; call model.eval() to predict.")
    inputs = table.inputs_at(covariates)
    size = inputs.size(1)
    means, covariances = [], []
    for part in inputs.split(max(_ROWS // size, 1)):
        found = model(part.flatten(0, 1))
        if not isinstance(found, MultivariateNormal) or found.mean.shape != (part.size(0) * size,):
            raise TypeError(
                f"expected a model of one latent function, the log hazard at {part.size(0) * size} inputs; it returned "
                f"a {type(found).__name__} of shape {tuple(found.mean.shape)}."
            )
        blocks = found.covariance_matrix.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # (s, J, s, J)
        means.append(found.mean.unflatten(-1, (-1, size)))
        covariances.append(blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0))
    return PiecewiseHazard(table.breaks, torch.cat(means), torch.cat(covariances))
