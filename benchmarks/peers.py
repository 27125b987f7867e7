"""The peers: stock gpytorch's sparse variational Gaussian process, trained as its documentation shows.

Whitened ``VariationalStrategy`` with fixed inducing points, ``VariationalELBO`` with gpytorch's own quadrature, and

* ``adam``: ``CholeskyVariationalDistribution``, one Adam over all parameters [Hensman et al. 2015];
* ``ngd``: ``NaturalVariationalDistribution``, ``NGD`` for q(u) and Adam for the rest [Salimbeni et al. 2018].

gpytorch has no logit and no Matern-3/2 likelihood; both are written here as a gpytorch user would write them, from
``forward`` alone.
"""

from __future__ import annotations

import math
from typing import Any

import gpytorch
import torch
from gpytorch.likelihoods import LaplaceLikelihood, Likelihood, StudentTLikelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from gpytorch.variational import CholeskyVariationalDistribution, NaturalVariationalDistribution, VariationalStrategy
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, constraints

from benchmarks.harness import Method, Problem, ScaledKernelParameters, Trace, train


class BernoulliLogit(_OneDimensionalLikelihood):
    """``p(y = 1 | f) = 1 / (1 + exp(-f))``, targets in {0, 1}."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Bernoulli:
        """Return the conditional distribution at samples of f."""
        return Bernoulli(logits=function_samples)


class Matern32Distribution(Distribution):
    """Density ``sqrt(3) / (4 rho) (1 + r) exp(-r)`` with ``r = sqrt(3) |y - loc| / rho``; density only."""

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}
    support = constraints.real

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = torch.broadcast_tensors(loc, scale)
        super().__init__(self.loc.shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density."""
        r = math.sqrt(3) * (value - self.loc).abs() / self.scale
        return torch.log1p(r) - r - self.scale.log() + math.log(math.sqrt(3) / 4)


class Matern32(_OneDimensionalLikelihood):
    """Matern-3/2 noise with parameter ``noise = rho^2``."""

    def __init__(self) -> None:
        super().__init__()
        self.raw_noise = torch.nn.Parameter(torch.zeros(1))
        self.register_constraint("raw_noise", gpytorch.constraints.Positive())

    @property
    def noise(self) -> Tensor:
        """The squared scale."""
        return self.raw_noise_constraint.transform(self.raw_noise)

    @noise.setter
    def noise(self, value: float) -> None:
        self.initialize(raw_noise=self.raw_noise_constraint.inverse_transform(torch.as_tensor(value)))

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Matern32Distribution:
        """Return the conditional distribution at samples of f."""
        return Matern32Distribution(function_samples, self.noise.sqrt())


class SVGP(gpytorch.models.ApproximateGP):
    """Zero mean, scaled ARD squared exponential, fixed inducing points."""

    def __init__(self, problem: Problem, *, natural: bool) -> None:
        z = problem.inducing_points
        distribution = (NaturalVariationalDistribution if natural else CholeskyVariationalDistribution)(len(z))
        super().__init__(VariationalStrategy(self, z, distribution, learn_inducing_locations=False))
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=z.shape[-1]))
        self.covar_module.outputscale = problem.initial.outputscale
        self.covar_module.base_kernel.lengthscale = problem.initial.lengthscale

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """Return the prior at ``x``."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def make_likelihood(problem: Problem) -> Likelihood:
    """Return the likelihood of a problem with its initial parameters."""
    if problem.likelihood == "logit":
        return BernoulliLogit()
    likelihood = {"laplace": LaplaceLikelihood, "student_t": StudentTLikelihood, "matern32": Matern32}[
        problem.likelihood
    ]()
    likelihood.noise = problem.initial.noise
    if problem.likelihood == "student_t":
        likelihood.deg_free = problem.initial.deg_free
    return likelihood


class GPyTorchLearner(ScaledKernelParameters):
    """A stock model, likelihood, objective and optimisers behind the harness's ``Learner``."""

    def __init__(
        self, problem: Problem, *, seed: int, dtype: torch.dtype, lr: float, natural_lr: float | None = None
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # gpytorch perturbs the initial variational mean
            self.model = SVGP(problem, natural=natural_lr is not None).to(dtype)
            self.likelihood = make_likelihood(problem).to(dtype)
            self.model.train()
            self.model(problem.inducing_points[:2].to(dtype))  # the first call draws that perturbation
        self.dtype = dtype
        num_data = len(problem.train_y)
        self.objective = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, num_data=num_data)
        if natural_lr is None:
            parameters = [*self.model.parameters(), *self.likelihood.parameters()]
            self.optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(parameters, lr=lr)]
        else:
            parameters = [*self.model.hyperparameters(), *self.likelihood.parameters()]
            natural = gpytorch.optim.NGD(self.model.variational_parameters(), num_data=num_data, lr=natural_lr)
            self.optimizers = [natural, torch.optim.Adam(parameters, lr=lr)]

    def step(self, x: Tensor, y: Tensor) -> None:
        """Do one gradient step on the negative bound."""
        self.model.train()
        self.likelihood.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        (-self.objective(self.model(x), y)).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of f."""
        self.model.eval()
        with torch.no_grad():
            marginal = self.model(x.to(self.dtype))
            return marginal.mean, marginal.variance


def _run(
    problem: Problem,
    *,
    batch_size: int,
    budget: float,
    seed: int,
    dtype: torch.dtype,
    max_steps: int | None = None,
    **options: float,
) -> Trace:
    def make_learner() -> GPyTorchLearner:
        return GPyTorchLearner(problem, seed=seed, dtype=dtype, **options)

    return train(
        problem, make_learner, batch_size=batch_size, budget=budget, seed=seed, dtype=dtype, max_steps=max_steps
    )


PEERS: dict[str, Method] = {
    "adam": Method(
        run=_run,
        options={"lr": 0.01},
        grid=tuple({"lr": lr} for lr in (0.003, 0.01, 0.03, 0.1)),
        learner=GPyTorchLearner,
    ),
    "ngd": Method(
        run=_run,
        options={"lr": 0.01, "natural_lr": 0.1},
        # 0.01 because small minibatches need a small natural step: at 100 points 0.1 stalls or breaks down
        grid=tuple({"lr": lr, "natural_lr": rate} for lr in (0.01, 0.03) for rate in (0.01, 0.03, 0.1, 0.3, 1.0)),
        learner=GPyTorchLearner,
    ),
}
