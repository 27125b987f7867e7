"""gpytorch's counterparts for the jobs of Gibbs sampling and of EP: a draw of f given Gaussian sites, and NGD."""

from __future__ import annotations

import math
from collections.abc import Callable

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.variational import NaturalVariationalDistribution, VariationalStrategy
from torch import Tensor

from benchmarks.peers import BernoulliLogit

_RATE = 0.5  # of NGD; at 1 it does not converge on every problem
_STILL = 1e-6  # relative change of the bound from one step to the next
_MOST_STEPS = 100


def _rbf(x: Tensor) -> gpytorch.kernels.Kernel:
    kernel = gpytorch.kernels.RBFKernel().to(x)
    kernel.lengthscale = math.sqrt(x.size(-1))
    return kernel


class _Exact(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.GaussianLikelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), _rbf(x)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def gpytorch_draw(x: Tensor, y: Tensor, num_chains: int) -> Callable[[], Tensor]:
    """Return a function that returns draws of f given Polya-Gamma variables (chains, n), by dense factors.

    Every call builds a new model, as the variables change in every sweep; w itself is not drawn, but is 1/4, its mean
    where f = 0.
    """
    n = len(y)
    w = torch.full((num_chains, n), 0.25, dtype=x.dtype, device=x.device)
    at, targets = x.expand(num_chains, *x.shape), (y - 0.5) / w

    @torch.no_grad()
    def draw() -> Tensor:
        settings = gpytorch.settings
        with settings.max_cholesky_size(n + 1), settings.debug(False), settings.fast_computations(False, False, False):
            noise = FixedNoiseGaussianLikelihood(noise=1 / w)
            return _Exact(at, targets, noise).eval()(at).rsample()

    return draw


def gaussian_evidence(x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns the evidence a datum with Gaussian noise, differentiated; by a dense factor."""
    model = _Exact(x, y, gpytorch.likelihoods.GaussianLikelihood().to(x)).train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)

    def evaluate() -> Tensor:
        model.zero_grad()
        with gpytorch.settings.max_cholesky_size(len(y) + 1):
            value = mll(model(x), y)
        value.backward()
        return value.detach()

    return evaluate


class _Variational(gpytorch.models.ApproximateGP):
    def __init__(self, x: Tensor) -> None:
        distribution = NaturalVariationalDistribution(len(x)).to(x)
        super().__init__(VariationalStrategy(self, x, distribution, learn_inducing_locations=False))
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), _rbf(x)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def variational_posterior(x: Tensor, y: Tensor) -> float:
    """Return the bound per datum of a logit model at fixed hyperparameters when steps of NGD no longer change it."""
    model, likelihood = _Variational(x), BernoulliLogit().to(x)
    model.to(x)
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    optimizer = gpytorch.optim.NGD(model.variational_parameters(), num_data=len(y), lr=_RATE)
    before = -math.inf
    for _ in range(_MOST_STEPS):
        optimizer.zero_grad()
        value = objective(model(x), y)
        (-value).backward()
        optimizer.step()
        after = float(value.detach())
        if abs(after - before) <= _STILL * abs(after):
            break
        before = after
    return after
