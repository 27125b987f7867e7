"""Training of one model as its plan says."""

from __future__ import annotations

from dataclasses import replace

from gpext.estimators.dense_training import train_dense
from gpext.estimators.plan import Plan
from gpext.estimators.sparse_training import train_on_sample, train_sparse
from gpext.estimators.task import Settings, Task, Trained, inducing_points_of
from gpext.inference.result import without_inference_warnings


def train(task: Task, plan: Plan, settings: Settings) -> Trained:
    """Train a model as planned.

    Raises:
        ValueError: data that the likelihood cannot take.
    """
    if not plan.is_sparse:
        points = None if plan.inducing is None else inducing_points_of(task, plan.inducing, settings.seed)
        rules = task.rules if plan.neighbours is None else task.rules.cheap
        return train_dense(replace(task, points=points, neighbours=plan.neighbours, rules=rules), settings)
    if plan.sample is not None:
        return train_on_sample(task, plan, plan.sample, settings)
    return train_sparse(task, plan, settings)


def try_out(task: Task, settings: Settings) -> Trained:
    """Train a model of all data roughly, which decides about another one, or is a part of its predictions if it can be.

    Raises:
        ValueError: data that the likelihood cannot take.
    """
    with without_inference_warnings():
        return train_dense(task, settings.rough)
