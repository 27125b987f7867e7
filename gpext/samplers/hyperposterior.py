"""Draws of the hyperparameters of a GP, and predictions averaged over them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributions import Normal

from gpext.distributions import BatchMixture
from gpext.samplers.draws import NUM_DRAWS, Draws
from gpext.samplers.targets.latent_posterior import checked_inputs
from gpext.samplers.targets.log_posterior import LogPosterior
from gpext.samplers.targets.predictive import predictive


@dataclass(frozen=True)
class HyperPosterior(Draws):
    """Draws of hyperparameters of C chains, S each; see :class:`Draws`.

    Example:
        >>> import gpytorch, torch
        >>> from gpytorch.priors import LogNormalPrior
        >>> from gpext.samplers import MetropolisHastings
        >>> class Model(gpytorch.models.ExactGP):
        ...     def __init__(self, x, y):
        ...         super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood(LogNormalPrior(-3.0, 1.0)))
        ...         self.mean_module = gpytorch.means.ZeroMean()
        ...         self.covar_module = gpytorch.kernels.RBFKernel(lengthscale_prior=LogNormalPrior(0.0, 1.0))
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 6, 20).double()
        >>> model = Model(x, torch.sin(x)).double()
        >>> sampler = MetropolisHastings(gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model))
        >>> draws = sampler.run(20, warmup=20, progress=False, generator=torch.Generator().manual_seed(0))
        >>> draws.predict(x[:3], num_draws=5).mean.shape
        torch.Size([3])
    """

    target: LogPosterior = field(repr=False)

    @torch.no_grad()
    def predict(self, x: Tensor, *, num_draws: int = NUM_DRAWS, noise: Tensor | None = None) -> BatchMixture:
        """Return p(y_* | y) at new inputs (S,), the average of Gaussians over draws.

        Without a factorisation where draws came from unbiased gradients.

        Args:
            x: (S, d).
            num_draws: how many draws to average over, evenly spaced in the chains; all if there are fewer.
            noise: of a likelihood with fixed noise, its variances (S,) at x; without them the prediction is of f, and
                of what noise is learnt.

        Raises:
            TypeError: noise of a likelihood that takes none.
            ValueError: no draw, or x is not finite or not of the training inputs' dimension.
            FloatingPointError: a draw makes no covariance of the data that can be solved with.
        """
        numbers = self.chosen(num_draws)
        x = checked_inputs(x, self.target.model.train_inputs[0])
        means, variances = [], []
        for number, raw in zip(numbers.tolist(), self.take(numbers)[1], strict=True):
            self.target.moved.write(raw)
            try:
                mean, variance = predictive(self.target, x, noise)
            except FloatingPointError as error:
                at = ", ".join(f"{name} {each.tolist()}" for name, each in self.target.constrained(raw).items())
                raise FloatingPointError(f"no prediction from draw {number}, {at}: {error}") from error
            means.append(mean)
            variances.append(variance)
        return BatchMixture(Normal(torch.stack(means), torch.stack(variances).sqrt()))
