r"""A model whose prior at the training inputs is known by its products alone: f given w is drawn by solves.

A new value given a draw (f, theta) is averaged over f once more: with w ~ p(w | f, y, theta), which leaves the joint
distribution of w and theta as it is, f_* given w and theta is that of a Gaussian regression. That takes solves with
K + T^-1, where f_* given f would take some with K, which is all but singular.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpext.inference.gibbs import draw_latent
from gpext.models import LatentGP
from gpext.posteriors import condition_matrix_free
from gpext.samplers.seeds import child_on_cpu
from gpext.samplers.targets.latent_posterior import ModelTarget, above_rounding
from gpext.sites import GaussianSites


class MatrixFreeTarget(ModelTarget):
    """p(f, theta | y) of a model; works on a copy of it.

    Args:
        model: with its likelihood and training data, no batch.
        names: parameters to move; None for those with a prior.
        jitter: added to the diagonal of the prior covariance.
        logarithms: as :class:`gpext.samplers.targets.latent_posterior.ModelTarget`.

    Raises:
        TypeError, ValueError: as :class:`gpext.samplers.targets.latent_posterior.ModelTarget`.
    """

    def __init__(
        self, model: LatentGP, names: Sequence[str] | None, jitter: float, *, logarithms: bool = False
    ) -> None:
        self._take(model, names, logarithms)
        x, y = self.model.train_inputs[0], model.train_targets
        self._observe(self.model.likelihood, y, jitter, y.shape, x.dtype)

    @torch.no_grad()
    def draw_latent(self, raw: Tensor, sites: GaussianSites, generator: torch.Generator) -> Tensor:
        """Return f (N,) given sites (N,) and hyperparameters (P,), float64.

        Raises:
            ArithmeticError: a solve has not converged.
        """
        self._moved.write(raw)
        posterior = condition_matrix_free(self._prior_of_data(), sites, generator=child_on_cpu(generator))
        return draw_latent(posterior, posterior.draw_prior(generator=generator), generator=generator).double()

    @torch.no_grad()
    def predicted_at(self, raw: Tensor, latent: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances (S,) of f at new inputs (S, d) given a draw; the same for the same draw."""
        generator = torch.Generator(latent.device).manual_seed(0)
        sites = self.sites(latent.unsqueeze(0), raw.unsqueeze(0), generator)
        self._moved.write(raw)
        prior, pivots = self._prior_of_data(), torch.Generator().manual_seed(0)
        posterior = condition_matrix_free(prior, GaussianSites(sites.shift[0], sites.precision[0]), generator=pivots)
        test_mean, cross, test_variance = (part.to(prior.mean) for part in self._beside(x))
        mean, variance = posterior.predict(test_mean, cross, test_variance)
        return mean.double(), above_rounding(variance, test_variance).double()

    def _prior_of_data(self) -> MultivariateNormal:
        prior = self._forward(self._x)
        return prior.add_jitter(self.jitter) if self.jitter else prior
