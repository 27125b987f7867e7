r"""What a Gibbs sampler returns: draws, how they came about, and predictions from them.

A new value is Gaussian given the latent values at the training inputs, and the posterior is the average over draws

    p(f_* | y) = 1/S sum_s N(f_* | mu_* + A' R^+ (f_s - mu), k_** - A' A),    K = R R',  A = R^+ K_x*

so nothing is drawn anew, and mean, variance, density and quantiles of the average are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from gpytorch import settings
from gpytorch.distributions import base_distributions
from linear_operator.operators import DiagLinearOperator
from torch import Tensor
from torch.distributions import Distribution

from gpext.distributions import BatchMixture, LatentNormal, Mixture
from gpext.likelihoods import AugmentedLikelihood
from gpext.samplers.exporting import to_arviz
from gpext.samplers.state import ChainState
from gpext.samplers.status import SamplingStatus
from gpext.samplers.storage import Chunks
from gpext.samplers.targets.latent_posterior import ModelTarget, Target, conditional

if TYPE_CHECKING:
    import arviz

WELL_MIXED = 1.01  # split R-hat, as [Vehtari et al. 2021] recommend
_FEWEST_DRAWS = 4  # for halves of chains to have a variance


@dataclass(frozen=True)
class GibbsDraws:
    """Draws of C chains, S each.

    Attributes:
        status: how it ended.
        message: one sentence on how it went.
        seconds: time spent on the last run.
        r_hat: the largest split R-hat of any latent value or hyperparameter; nan with fewer than four draws.
    """

    target: Target = field(repr=False)
    chunks: Chunks = field(repr=False)
    states: tuple[ChainState, ...] = field(repr=False)  # what the chains go on from, a batch of them each
    status: SamplingStatus
    message: str
    seconds: float
    r_hat: float

    @property
    def num_chains(self) -> int:
        """C."""
        return sum(state.latent.size(0) for state in self.states)

    @property
    def num_draws(self) -> int:
        """S."""
        return self.chunks.num_draws

    @cached_property
    def latent(self) -> Tensor:
        """Draws of f at the training inputs (C, S, ..., N); all in memory, wherever they were written."""
        first = torch.cat([state.latent for state in self.states])
        nothing = first.to(self.target.dtype).unsqueeze(1)[:, :0]
        return torch.cat([nothing, *(chunk.latent for chunk in self.chunks)], 1)

    @cached_property
    def hyperparameters(self) -> dict[str, Tensor]:
        """Draws of the hyperparameters that moved (C, S, *shape), constrained, by parameter name without `raw_`."""
        return self.target.constrained(self._raw)

    @cached_property
    def _raw(self) -> Tensor:
        nothing = torch.cat([state.raw for state in self.states]).unsqueeze(1)[:, :0].cpu()
        return torch.cat([nothing, *(chunk.raw for chunk in self.chunks)], 1)

    @torch.no_grad()
    def predict(self, x: Tensor, *, num_draws: int = 1000) -> BatchMixture:
        """Return the posterior of f at new inputs, value by value: the average of Gaussians above.

        Args:
            x: new inputs (S, d) or (S,).
            num_draws: average over at most so many draws, evenly spaced; each costs a Cholesky if the prior moves.

        Raises:
            TypeError: the sampler was given a prior and no model; see :meth:`predict_from`.
            ValueError: x is not finite or not of the training inputs' dimension, or there is no draw to average over.
        """
        target = self._model_target()
        return self._predicted(target, x, *self._spread(num_draws))

    def predict_from(
        self, test_mean: Tensor, cross_covariance: Tensor, test_variance: Tensor, *, num_draws: int = 1000
    ) -> BatchMixture:
        """Return the posterior of f at S new inputs, from what the prior says of them.

        Args:
            test_mean: (..., S) prior mean there.
            cross_covariance: (..., N, S) prior covariance of the training and the new values.
            test_variance: (..., S) prior variances there.
            num_draws: average over at most so many draws, evenly spaced.

        Raises:
            TypeError: the prior moves; see :meth:`predict`.
        """
        if self.target.of_prior:
            raise TypeError("hyperparameters of the prior moved, so that no one prior holds; call predict(x).")
        latent, raw = self._spread(num_draws)
        known = (test_mean.double(), cross_covariance.double(), test_variance.double())
        return self._average(*conditional(latent, self.target.prior(raw), *known))

    @torch.no_grad()
    def predict_targets(self, x: Tensor, *, num_draws: int = 200) -> Distribution:
        """Return the predictive distribution of targets at new inputs: p(y) averaged over draws.

        Args:
            x: new inputs (S, d) or (S,).
            num_draws: average over at most so many draws, evenly spaced.

        Raises:
            TypeError, ValueError: as :meth:`predict`.
        """
        target = self._model_target()
        drawn, raw = self._spread(num_draws)
        latent = self._predicted(target, x, drawn, raw).components
        if not target.of_likelihood:
            return BatchMixture(_marginal(target.likelihood, latent.mean, latent.variance))
        means, variances = torch.broadcast_tensors(latent.mean, latent.variance)
        parts = [
            _marginal(target.likelihood_at(row), mean, variance)
            for row, mean, variance in zip(raw, means, variances, strict=True)
        ]
        return Mixture(torch.full((len(parts),), 1 / len(parts), dtype=means.dtype, device=means.device), parts)

    @torch.no_grad()
    def log_likelihood(self) -> Tensor:
        """Return log p(y_i | f_i, theta) of every draw (C, S, ..., N)."""
        if not isinstance(self.target, ModelTarget) or not self.target.of_likelihood:
            return self.target.likelihood.log_prob(self.target.targets, self.latent)
        pairs = zip(self.latent.flatten(0, 1), self._raw.flatten(0, 1), strict=True)
        values = [self.target.likelihood_at(row).log_prob(self.target.targets, f) for f, row in pairs]
        return torch.stack(values).view(self.latent.shape)

    def to_arviz(self, *, log_likelihood: bool = False) -> arviz.InferenceData:
        """Return the draws for ArviZ: its diagnostics, tables and plots; a `DataTree` from ArviZ 1.0 on.

        Args:
            log_likelihood: add :meth:`log_likelihood`, for `arviz.loo` and `arviz.compare`.

        Raises:
            ImportError: ArviZ is not installed.
        """
        groups = {"posterior": {"latent": self.latent, **self.hyperparameters}}
        if log_likelihood:
            groups["log_likelihood"] = {"targets": self.log_likelihood()}
        return to_arviz(groups)

    def _model_target(self) -> ModelTarget:
        if not isinstance(self.target, ModelTarget):
            raise TypeError(
                "a prior at the training inputs does not say what it is elsewhere; build GibbsSampler(model), or call "
                "predict_from(test_mean, cross_covariance, test_variance)."
            )
        return self.target

    def _predicted(self, target: ModelTarget, x: Tensor, latent: Tensor, raw: Tensor) -> BatchMixture:
        """Return the posterior of f at new inputs, averaged over draws (S', ..., N) and (S', P)."""
        x = target.new_inputs(x)
        if not target.of_prior:
            return self._average(*target.predicted_at(raw[0], latent, x))
        parts = [target.predicted_at(row, f, x) for f, row in zip(latent, raw, strict=True)]
        return self._average(torch.stack([mean for mean, _ in parts]), torch.stack([var for _, var in parts]))

    def _spread(self, num_draws: int) -> tuple[Tensor, Tensor]:
        """Return at most so many draws of all chains, evenly spaced: (S', ..., N) and (S', P)."""
        if num_draws < 1:
            raise ValueError(f"num_draws must be at least 1; got {num_draws}.")
        if self.num_draws == 0:
            raise ValueError("there are no draws to predict from; go on with run(..., resume=draws).")
        step = -(-self.num_draws * self.num_chains // num_draws)
        latent, raw, skip = [], [], 0
        for chunk in self.chunks:
            latent.append(chunk.latent[:, skip::step].flatten(0, 1))
            raw.append(chunk.raw[:, skip::step].flatten(0, 1))
            skip = (skip - chunk.size) % step
        return torch.cat(latent).double(), torch.cat(raw)

    def _average(self, mean: Tensor, variance: Tensor) -> BatchMixture:
        mean, variance = torch.broadcast_tensors(mean.to(self.target.dtype), variance.to(self.target.dtype))
        return BatchMixture(base_distributions.Normal(mean, variance.sqrt()))


def conclude(
    name: str,
    target: Target,
    chunks: Chunks,
    states: tuple[ChainState, ...],
    status: SamplingStatus | None,
    note: str,
    seconds: float,
) -> GibbsDraws:
    """Return the draws of a sampler's run that ended with a status, or, with None, because it was done."""
    r_hat = _largest_r_hat(chunks)
    if status is None:
        status = SamplingStatus.MIXED if r_hat < WELL_MIXED else SamplingStatus.NOT_MIXED
    num_chains = sum(state.latent.size(0) for state in states)
    message = (
        f"{name}, {num_chains} chains of {chunks.num_draws} draws in {seconds:.1f} s, largest split R-hat "
        f"{r_hat:.4f}: {status.value}"
        + (f" ({note})" if note else "")
        + (f"; jitter {target.jitter:g}." if target.jitter else ".")
    )
    return GibbsDraws(target, chunks, states, status, message, seconds, r_hat)


def _largest_r_hat(chunks: Chunks) -> float:
    r"""Return the largest split R-hat of all that was drawn, in one pass; nan of too few draws [Gelman et al. 2013].

    With W the mean variance within the halves of all chains, n long, and B the variance of their means,
    R-hat^2 = (n - 1) / n + B / W.
    """
    if chunks.num_draws < _FEWEST_DRAWS:
        return float("nan")
    half = chunks.num_draws // 2
    found = []
    for name in ("latent", "raw"):
        sums, squares, start = [], [], 0
        origin = getattr(next(iter(chunks)), name).flatten(2)[:, :1].double()
        for chunk in chunks:
            draws = getattr(chunk, name).flatten(2)  # (C, S, columns)
            first, last = max(half - start, 0), max(chunks.num_draws - half - start, 0)
            parts = [draws[:, :first].double() - origin, draws[:, last:].double() - origin]
            sums.append(torch.stack([part.sum(1) for part in parts]))
            squares.append(torch.stack([part.square().sum(1) for part in parts]))
            start += chunk.size
        mean = torch.stack(sums).sum(0) / half  # (2, C, columns), from the origin
        within = (torch.stack(squares).sum(0) - half * mean.square()) / (half - 1)
        found.append(_r_hat(mean + origin.squeeze(1), within, half))
    moved = [r_hat for r_hat in found if r_hat is not None]
    return max(moved, default=1.0)


def split_r_hat(draws: Tensor) -> float:
    """Return the same of draws (C, S, P) at hand."""
    half = draws.size(1) // 2
    if draws.size(1) < _FEWEST_DRAWS:
        return float("nan")
    parts = torch.stack([draws[:, :half], draws[:, -half:]])  # (2, C, S / 2, P)
    r_hat = _r_hat(parts.mean(2), parts.var(2), half)
    return 1.0 if r_hat is None else r_hat


def _r_hat(mean: Tensor, within: Tensor, half: int) -> float | None:
    """Return the largest R-hat of means and variances (2, C, columns) of halves of chains; None if nothing moved."""
    mean, within = mean.flatten(0, 1), within.flatten(0, 1).mean(0)
    moved = within > 0
    if not bool(moved.any()):
        return None
    return float((1 - 1 / half + mean[:, moved].var(0) / within[moved]).sqrt().max())


def _marginal(likelihood: AugmentedLikelihood, mean: Tensor, variance: Tensor) -> Distribution:
    """Return int p(y | f) N(f | mean, variance) df, elementwise."""
    with settings.min_variance(float_value=0.0, double_value=0.0):  # at a training input next to nothing is left
        return likelihood.marginal(LatentNormal(mean, DiagLinearOperator(variance)))
