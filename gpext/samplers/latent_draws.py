r"""Draws of latent values and hyperparameters, and predictions from them.

A new value is Gaussian given the latent values at the training inputs, and the posterior is the average over draws

    p(f_* | y) = 1/S sum_s N(f_* | mu_* + A' R^+ (f_s - mu), k_** - A' A),    K = R R',  A = R^+ K_x*

so nothing is drawn anew, and mean, variance, density and quantiles of the average are exact. Under a prior by nearest
neighbours a new value depends on the latent values of those alone.
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
from gpext.posteriors import DensePrior
from gpext.samplers.draws import NUM_DRAWS, Draws
from gpext.samplers.exporting import to_arviz
from gpext.samplers.targets.latent_posterior import ModelTarget, Target, conditional

if TYPE_CHECKING:
    import arviz


@dataclass(frozen=True)
class GibbsDraws(Draws):
    """Draws of latent values, and of the hyperparameters that moved, of C chains, S each; see :class:`Draws`.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import BernoulliLogitLikelihood
        >>> from gpext.samplers import GibbsSampler
        >>> prior = MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
        >>> sampler = GibbsSampler(prior, BernoulliLogitLikelihood(), torch.tensor([1.0, 0.0]).double())
        >>> draws = sampler.run(30, generator=torch.Generator().manual_seed(0), progress=False)
        >>> draws.latent.shape
        torch.Size([4, 30, 2])
    """

    target: Target = field(repr=False)

    @cached_property
    def latent(self) -> Tensor:
        """Draws of f at the training inputs (C, S, ..., N); all in memory, wherever they were written."""
        first = torch.cat([state.latent for state in self.states])
        nothing = first.to(self.target.dtype).unsqueeze(1)[:, :0]
        return torch.cat([nothing, *(chunk.latent for chunk in self.chunks)], 1)

    @property
    def draws(self) -> dict[str, Tensor]:
        """All that is drawn (C, S, *shape) by name: "latent", f at the training inputs, and the hyperparameters."""
        return {"latent": self.latent, **self.hyperparameters}

    @torch.no_grad()
    def predict(self, x: Tensor, *, num_draws: int = NUM_DRAWS) -> BatchMixture:
        """Return the posterior of f at new inputs, value by value: the average of Gaussians above.

        Args:
            x: new inputs (S, d) or (S,).
            num_draws: average over at most so many draws, evenly spaced; each costs a Cholesky if the prior moves.

        Raises:
            TypeError: the sampler was given a prior and no model; see :meth:`predict_from`.
            ValueError: x is not finite or not of the training inputs' dimension, or there is no draw to average over.
        """
        target = self._model_target()
        return self._predicted(target, x, *self.take(self.chosen(num_draws)))

    def predict_from(
        self, test_mean: Tensor, cross_covariance: Tensor, test_variance: Tensor, *, num_draws: int = NUM_DRAWS
    ) -> BatchMixture:
        """Return the posterior of f at S new inputs, from the joint prior with the old ones.

        Args:
            test_mean: (..., S) prior mean there.
            cross_covariance: (..., N, S) prior covariance of the training and the new values.
            test_variance: (..., S) prior variances there.
            num_draws: average over at most so many draws, evenly spaced.

        Raises:
            TypeError: the prior moves, or is by neighbours; see :meth:`predict`.
        """
        if self.target.of_prior:
            raise TypeError("hyperparameters of the prior moved, so that no one prior holds; call predict(x).")
        latent, raw = self.take(self.chosen(num_draws))
        prior = self.target.prior(raw)
        if not isinstance(prior, DensePrior):
            raise TypeError("a prior by neighbours has no covariances with new values; call predict(x).")
        known = (test_mean.double(), cross_covariance.double(), test_variance.double())
        return self._average(*conditional(latent, prior, *known))

    @torch.no_grad()
    def predict_targets(self, x: Tensor, *, num_draws: int = NUM_DRAWS) -> Distribution:
        """Return the predictive distribution of targets at new inputs: p(y) averaged over draws.

        Args:
            x: new inputs (S, d) or (S,).
            num_draws: average over at most so many draws, evenly spaced.

        Raises:
            TypeError, ValueError: as :meth:`predict`.
        """
        target = self._model_target()
        drawn, raw = self.take(self.chosen(num_draws))
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
        pairs = zip(self.latent.flatten(0, 1), self.raw.flatten(0, 1), strict=True)
        values = [self.target.likelihood_at(row).log_prob(self.target.targets, f) for f, row in pairs]
        return torch.stack(values).view(self.latent.shape)

    def to_arviz(self, *, log_likelihood: bool = False) -> arviz.InferenceData:
        """Return the draws for ArviZ: its diagnostics, tables and plots; a `DataTree` from ArviZ 1.0 on.

        Args:
            log_likelihood: add :meth:`log_likelihood`, for `arviz.loo` and `arviz.compare`.

        Raises:
            ImportError: ArviZ is not installed.
        """
        groups = {"posterior": self.draws}
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

    def _average(self, mean: Tensor, variance: Tensor) -> BatchMixture:
        mean, variance = torch.broadcast_tensors(mean.to(self.target.dtype), variance.to(self.target.dtype))
        return BatchMixture(base_distributions.Normal(mean, variance.sqrt()))


def _marginal(likelihood: AugmentedLikelihood, mean: Tensor, variance: Tensor) -> Distribution:
    """Return int p(y | f) N(f | mean, variance) df, elementwise."""
    with settings.min_variance(float_value=0.0, double_value=0.0):  # at a training input next to nothing is left
        return likelihood.marginal(LatentNormal(mean, DiagLinearOperator(variance)))
