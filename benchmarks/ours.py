"""gpext's entries in the registry: `gpext.fit` with no option set, and with minibatches.

* ``gpext``: ``gpext.fit(mll, x, y)``, L-BFGS on the collapsed augmented bound of growing subsets, independent of the
  batch size of the benchmark;
* ``gpext-svi``: ``gpext.fit(mll, x, y, batch_size=B)``, L-BFGS on a sample, then closed-form q(u) steps and
  Adam for the hyperparameters.
"""

from __future__ import annotations

from typing import Any, Literal

import gpytorch
import torch
from torch import Tensor

import gpext
from benchmarks.harness import Method, Problem, Recorder, ScaledKernelParameters, Trace
from gpext.likelihoods import BernoulliLogitLikelihood, LaplaceLikelihood, Matern32Likelihood, StudentTLikelihood
from gpext.mlls import AugmentedELBO
from gpext.training.minibatch import Minibatches, SiteStepper, default_rate, hyperparameter_interval
from gpext.variational import SiteVariationalStrategy

LIKELIHOODS = {
    "logit": BernoulliLogitLikelihood,
    "laplace": LaplaceLikelihood,
    "student_t": StudentTLikelihood,
    "matern32": Matern32Likelihood,
}


class SiteGP(gpytorch.models.ApproximateGP):
    """Zero mean, scaled ARD squared exponential, fixed inducing points: the peers' model with gpext's strategy."""

    def __init__(self, problem: Problem, dtype: torch.dtype) -> None:
        z = problem.inducing_points.to(dtype)
        super().__init__(SiteVariationalStrategy(self, z, learn_inducing_locations=False))
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=z.shape[-1])).to(dtype)
        self.covar_module.outputscale = problem.initial.outputscale
        self.covar_module.base_kernel.lengthscale = problem.initial.lengthscale

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """Return the prior at ``x``."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class SiteLearner(ScaledKernelParameters):
    """A gpext model and its objective behind the harness's ``Learner``."""

    def __init__(
        self, problem: Problem, *, seed: int, dtype: torch.dtype, gradient: Literal["augmented", "exact"] = "exact"
    ) -> None:
        self.dtype, self.gradient = dtype, gradient
        self.model = SiteGP(problem, dtype)
        self.likelihood = LIKELIHOODS[problem.likelihood]().to(dtype)
        if problem.likelihood != "logit":
            self.likelihood.noise = problem.initial.noise
        if problem.likelihood == "student_t":
            self.likelihood.deg_free = problem.initial.deg_free
        self.num_data = len(problem.train_y)
        self.mll = AugmentedELBO(self.likelihood, self.model, self.num_data)
        self._stepper: SiteStepper | None = None
        self._batches: Minibatches | None = None

    def step(self, x: Tensor, y: Tensor) -> None:
        """Do one minibatch step on these data."""
        if self._batches is None:
            self._batches = Minibatches(len(y), len(y), torch.Generator())
        self.next_step(x, y, self._batches)

    def next_step(self, x: Tensor, y: Tensor, batches: Minibatches) -> None:
        """Do one minibatch step, as `gpext.fit(mll, x, y, batch_size=batches.batch_size)` does at first."""
        if self._stepper is None:
            size = batches.batch_size
            self._stepper = SiteStepper(
                self.mll,
                self.model.variational_strategy,
                self.likelihood,
                self.num_data,
                rate=default_rate(size / self.num_data),
                learning_rate=0.05,
                bound="augmented",
                gradient=self.gradient,
                interval=hyperparameter_interval(size, self.num_data),
            )
        self._stepper.step(x, y, batches)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of f."""
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            marginal = self.model(x.to(self.dtype))
            mean, variance = marginal.mean, marginal.variance
        self.model.train(training)
        return mean, variance


def _run(
    problem: Problem,
    *,
    batch_size: int | None,
    budget: float,
    seed: int,
    dtype: torch.dtype,
    max_steps: int | None = None,
) -> Trace:
    x, y = problem.train_x.to(dtype), problem.train_y.to(dtype)
    recorder = Recorder(problem, budget=budget, max_steps=max_steps)
    recorder.start()
    learner = SiteLearner(problem, seed=seed, dtype=dtype)
    recorder.stop()
    recorder.evaluate(learner)
    recorder.start()
    generator = torch.Generator().manual_seed(seed)
    try:
        gpext.fit(
            learner.mll,
            x,
            y,
            batch_size=batch_size,
            max_steps=max_steps,
            generator=generator,
            progress=False,
            callback=lambda step, value: not recorder.advance(learner),
        )
    except (torch.linalg.LinAlgError, ValueError) as error:
        recorder.fail(error)
    else:
        if recorder.running:  # it converged within the budget
            recorder.stop()
            recorder.evaluate(learner)
    return recorder.trace()


def _run_full(problem: Problem, *, batch_size: int, **options: Any) -> Trace:
    return _run(problem, batch_size=None, **options)


OURS: dict[str, Method] = {
    "gpext": Method(run=_run_full, options={}, learner=SiteLearner),
    "gpext-svi": Method(run=_run, options={}, learner=None),
}
