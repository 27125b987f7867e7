"""Training by L-BFGS: the collapsed bound on growing subsets of the data, or any gpytorch objective."""

from __future__ import annotations

from functools import partial

import torch
from gpytorch.mlls import MarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpext.optim import Outcome, minimize_lbfgs
from gpext.training.result import FitResult, FitStatus, Run
from gpext.variational import CollapsedBound, SiteVariationalStrategy

MAX_STEPS = 200
_SUBSET_TOLERANCE = 1e-3  # nats per datum and step: below it a larger subset teaches more than another step


def subset_sizes(num_data: int, num_inducing: int) -> list[int]:
    """Return the numbers of data to train on in turn: quarters of quarters, down to ten data an inducing point."""
    sizes = [num_data]
    while sizes[0] // 4 >= max(10 * num_inducing, 1000):
        sizes.insert(0, sizes[0] // 4)
    return sizes


def fit_collapsed(
    run: Run, strategy: SiteVariationalStrategy, x: Tensor, y: Tensor, sizes: list[int], tolerance: float
) -> FitStatus:
    """Maximise the collapsed bound of the first `size` data for each size in turn; q(u) is that of the last.

    All but the last are left early: most of the way is made where a step is cheap.
    """
    likelihood = run.mll.likelihood
    parameters = hyperparameters(run.mll)
    metric = None  # each size starts with the curvature that the one before has learned
    for size in sizes:
        bound = CollapsedBound(strategy, likelihood, x[..., :size, :], y[..., :size])
        full = size == y.size(-1)
        result = minimize_lbfgs(
            partial(_negative_mean, bound, size),
            parameters,
            max_steps=max(run.steps_left(MAX_STEPS), 1),
            tolerance=tolerance if full else max(tolerance, _SUBSET_TOLERANCE),
            callback=partial(_after_iteration, bound, run),
            inverse_hessian=metric,
        )
        metric = result.inverse_hessian
        try:
            bound.settle()
        except torch.linalg.LinAlgError:  # q(u) stays that of the last iteration
            return FitStatus.BREAKDOWN
        bound.commit()
        if result.outcome is Outcome.STOPPED or not run.steps_left(MAX_STEPS):
            break
    return FitStatus[result.outcome.name]


def _negative_mean(bound: CollapsedBound, size: int) -> Tensor:
    return -bound.evaluate().sum() / size


def _after_iteration(bound: CollapsedBound, run: Run, loss: float) -> bool:
    bound.commit()
    return run.step(-loss)


def fit_objective(run: Run, x: Tensor, y: Tensor, tolerance: float) -> FitResult:
    """Maximise any gpytorch objective over all its parameters."""
    mll = run.mll

    def objective() -> Tensor:
        try:
            loss = -mll(mll.model(x), y).sum()
            loss.backward()
        except (NotPSDError, NanError) as error:  # what the line search steps back from
            raise torch.linalg.LinAlgError(str(error)) from error
        return loss.detach()

    result = minimize_lbfgs(
        objective,
        [p for p in mll.parameters() if p.requires_grad],
        max_steps=run.steps_left(MAX_STEPS),
        tolerance=tolerance,
        callback=lambda loss: run.step(-loss),
    )
    return run.finish(FitStatus[result.outcome.name])


def hyperparameters(mll: MarginalLogLikelihood) -> list[Tensor]:
    """Return the trainable parameters of the model and the likelihood but those of q(u), each once."""
    parameters = [*mll.model.hyperparameters(), *mll.likelihood.parameters()]
    return list({id(p): p for p in parameters if p.requires_grad}.values())
