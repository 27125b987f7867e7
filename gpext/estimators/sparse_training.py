"""Training of a model of inducing points, of which there are more and more.

Inducing points are doubled until the bound gains less than `WORTH` nats a datum by it, each time from the
hyperparameters of a model of all of a thousand rows. With many latents they are learned on a sample; q(u) of all data,
with more inducing points, follows in closed-form steps that begin at the sites of the sample's model.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from gpytorch.mlls import MarginalLogLikelihood, VariationalELBO
from torch import Tensor

from gpext.bounds import num_latents
from gpext.estimators.dense_training import train_once
from gpext.estimators.models import SparseGP, hyperparameters_of, start_from
from gpext.estimators.plan import Plan
from gpext.estimators.task import Settings, Task, Trained, fit_task, inducing_points_of, random_rows
from gpext.likelihoods.super_gaussian import AugmentedLikelihood
from gpext.mlls import AugmentedELBO
from gpext.priors import register_priors
from gpext.training import FitStatus
from gpext.variational import CollapsedBound

WORTH = 0.003  # nats a datum
_SETTLED = 10  # times the tolerance, for steps in q(u) alone that begin near its optimum
_FINER = 0.3  # times the tolerance: the bound has plateaus on which steps gain less than many more of them would
_FEW_LATENTS = 6  # from which on it rises to the tolerance itself: what a step costs is proportional to their number
_PART = 1000  # rows whose hyperparameters those of inducing points begin with


def train_on_sample(task: Task, plan: Plan, size: int, settings: Settings) -> Trained:
    """Learn the hyperparameters on `size` rows, then q(u) of all rows with the largest number of inducing points."""
    assert plan.inducing is not None
    first = _fit_sparse(random_rows(task, size, settings.seed), plan.inducing, task.start, settings)
    if first.result.status is FitStatus.INTERRUPTED:
        return first
    assert isinstance(first.model, SparseGP)
    model = SparseGP(inducing_points_of(task, plan.most, settings.seed), first.likelihood, first.model.covar_module)
    start_from(model.to(task.inputs.dtype), hyperparameters_of(first.model, first.likelihood))
    collapsed = CollapsedBound(
        model.variational_strategy,
        first.likelihood,
        task.inputs,
        task.targets,
        bound="exact",
        start=first.model.variational_strategy,
    )
    try:
        value = float(collapsed.settle(tolerance=_SETTLED * settings.tolerance)) / len(task.inputs)
    except KeyboardInterrupt:
        message = "interrupted: the model is that of the sample alone"
        return replace(first, result=replace(first.result, status=FitStatus.INTERRUPTED, message=message))
    collapsed.commit()
    return Trained(model.eval(), first.likelihood, replace(first.result, objective=value))


def train_sparse(task: Task, plan: Plan, settings: Settings) -> Trained:
    """Train with more and more inducing points, each time from the hyperparameters that a part of all data tells.

    A few points lead hyperparameters to what these can follow: columns that matter less seem not to matter, and where
    more points begin with that they gain nothing.
    """
    assert plan.inducing is not None
    size, start, objectives, reasons = plan.inducing, task.start, {}, list[str]()
    best: Trained | None = None
    if plan.grows and task.start_rows < _PART:
        first = _train_on_part(task, settings)
        start = hyperparameters_of(first.model, first.likelihood)
        reasons.append(f"hyperparameters were first learned from all of {len(first.model.train_inputs[0])} random rows")
        if first.result.status is FitStatus.INTERRUPTED:
            at_once = _fit_sparse(task, size, start, replace(settings, max_steps=1), plan.batch_size)
            result = replace(at_once.result, status=FitStatus.INTERRUPTED, message=first.result.message)
            return replace(at_once, result=result)
    while True:
        trained = _fit_sparse(task, size, start, settings, plan.batch_size)
        if best is not None and trained.score < best.score and trained.result.status is not FitStatus.INTERRUPTED:
            # More points can do what fewer can: training has ended short of it.
            values = hyperparameters_of(best.model, best.likelihood)
            trained = _fit_sparse(task, size, values, settings, plan.batch_size)
        objectives[size] = trained.score
        gain = trained.score - (best.score if best is not None else -float("inf"))
        if best is None or gain > 0:
            best = trained
        larger = min(2 * size, plan.most, len(task.inputs))
        if not plan.grows or gain < WORTH or larger <= size or trained.result.status is FitStatus.INTERRUPTED:
            break
        size = larger
    if not plan.grows:
        return best
    steps = ", ".join(f"{value:.4f} with {size}" for size, value in objectives.items())
    reasons.append(f"inducing points were doubled while the bound gained {WORTH} nats a datum by it: {steps}")
    return replace(best, reasons=tuple(reasons))


def _train_on_part(task: Task, settings: Settings) -> Trained:
    """Train a model of all of a thousand random rows, roughly."""
    likelihood, kernel = copy.deepcopy((task.likelihood, task.kernel))
    own = replace(task, likelihood=likelihood, kernel=kernel, points=None, rules=task.rules.cheap)
    return train_once(random_rows(own, _PART, settings.seed), settings.rough)


def _fit_sparse(
    task: Task, size: int, values: dict[str, Tensor] | None, settings: Settings, batch_size: int | None = None
) -> Trained:
    """Train a model of this number of inducing points, from hyperparameters by name if there are any."""
    likelihood, kernel = copy.deepcopy((task.likelihood, task.kernel))
    model = SparseGP(inducing_points_of(task, size, settings.seed), likelihood, kernel).to(task.inputs.dtype)
    if values is not None:
        start_from(model, values)
        start_from(likelihood, values)
    objective = _bound(likelihood, model, len(task.inputs))
    if task.priors:
        register_priors(objective)
    finer = min(1.0, _FINER * max(1.0, (num_latents(likelihood) or 1) / _FEW_LATENTS))
    settings = replace(settings, tolerance=finer * settings.tolerance)
    return Trained(model, likelihood, fit_task(objective, task, settings, batch_size))


def _bound(likelihood: Any, model: SparseGP, num_data: int) -> MarginalLogLikelihood:
    kind = AugmentedELBO if isinstance(likelihood, AugmentedLikelihood) else VariationalELBO
    return kind(likelihood, model, num_data=num_data)
