"""Training of a model of all data, or of neighbours: on a part first, and again where columns were left out.

Hyperparameters cost most where all data are used, and most of what is to be learned about them a part of the data can
tell: `gpext.fit` begins on subsets, unless a model of as many rows has been trained before.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from gpytorch.kernels import Kernel, ScaleKernel
from torch import Tensor

from gpext.estimators.gaussian_evidence import GaussianEvidence, has_closed_form
from gpext.estimators.left_out import bring_back
from gpext.estimators.models import DenseGP, hyperparameters_of, start_from
from gpext.estimators.rows import unweighted
from gpext.estimators.task import Initial, Settings, Task, Trained, fit_task, random_rows
from gpext.inference import KL, Status
from gpext.inference.result import without_inference_warnings
from gpext.likelihoods import Weighted
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.priors import register_priors
from gpext.training import FitResult, FitStatus
from gpext.training.full_batch import BREAKDOWNS
from gpext.training.subsets import subset_sizes

_SOME = 400  # rows that find a better model with little noise, if there is one
_MUCH = 0.1  # of the variance of standardised targets
_LARGE, _LITTLE_NOISE = 100.0, 1e-3  # outputscale and noise of a second start
_GAIN = 0.001  # nats a row, for which columns that were left out are brought back
_NO_SECOND_LOOK = (FitStatus.INTERRUPTED, FitStatus.BREAKDOWN, FitStatus.NO_POSTERIOR, FitStatus.STOPPED)


def train_dense(task: Task, settings: Settings) -> Trained:
    """Train on all data; under Gaussian noise again from elsewhere, where some of the rows find a larger evidence.

    From lengthscales of the distances between data, and as much noise as signal, no slope of the evidence may lead to a
    function of many columns with hardly any noise. If there is one, a few hundred rows find it in tenths of a second.
    Where rows that count as several have the same target, no noise at all has a large evidence, whatever the function:
    it is looked for only if noise has explained much.
    """
    is_rough = settings == settings.rough  # another training starts from it
    is_gaussian = task.has_default_kernel and has_closed_form(task.likelihood, task.rules.train)
    if is_rough or not (is_gaussian and _may_have_little_noise(task.likelihood)):
        return train_once(task, settings)
    likelihood, kernel = copy.deepcopy((task.likelihood, task.kernel))  # as they are before training
    trained = train_once(task, settings)
    noise = float(unweighted(trained.likelihood).noise.detach())
    if trained.result.status is FitStatus.INTERRUPTED or (_repeats(task) and noise < _MUCH):
        return trained
    _begin_without_noise(likelihood, kernel)
    elsewhere = replace(task, likelihood=likelihood, kernel=kernel, start=None, start_rows=_SOME)
    after_ctrl_c = replace(trained, result=_interrupted(trained.result, "from little noise"))
    try:
        start = _better_start(elsewhere, trained, settings)
    except KeyboardInterrupt:
        return after_ctrl_c
    if start is None:
        return trained
    again = train_once(replace(copy.deepcopy(elsewhere), start=start), settings)
    if again.result.status is FitStatus.BREAKDOWN:
        again = train_once(elsewhere, settings)
    before, after = trained.result.objective, again.result.objective
    if not after > before + settings.tolerance:
        return after_ctrl_c if again.result.status is FitStatus.INTERRUPTED else trained
    reason = f"trained a second time, from little noise: objective a row {before:.4f}, then {after:.4f}"
    return replace(again, reasons=(*again.reasons, reason))


def _may_have_little_noise(likelihood: Any) -> bool:
    """Return whether Gaussian noise is learnt, and may be as little as that of a second start."""
    noise = unweighted(likelihood).noise_covar
    constraint = noise.raw_noise_constraint
    is_within = float(constraint.lower_bound) < _LITTLE_NOISE < float(constraint.upper_bound)
    return noise.raw_noise.requires_grad and is_within


def _repeats(task: Task) -> bool:
    """Return whether some rows count as several with the same target."""
    return isinstance(task.likelihood, Weighted) and bool((task.targets[..., -1] >= 2).any())


def _begin_without_noise(likelihood: Any, kernel: Kernel) -> None:
    """Set hyperparameters to those of a function of large values and little noise."""
    unweighted(likelihood).noise = _LITTLE_NOISE
    for part in kernel.modules():
        if isinstance(part, ScaleKernel):
            part.outputscale = _LARGE


def _interrupted(result: FitResult, look: str) -> FitResult:
    message = f"interrupted: the model is as trained before a second look {look}"
    return replace(result, status=FitStatus.INTERRUPTED, message=message)


def _better_start(task: Task, trained: Trained, settings: Settings) -> dict[str, Tensor] | None:
    """Return what some rows learn from where the task begins, if all rows have a larger evidence there than by a model.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    part = replace(random_rows(task, _SOME, settings.seed), neighbours=None, points=None, sites=None)
    there = train_once(copy.deepcopy(part), settings.rough)
    if there.result.status is FitStatus.INTERRUPTED:
        raise KeyboardInterrupt
    start = hyperparameters_of(there.model, there.likelihood)
    objective = _objective_of(replace(copy.deepcopy(task), start=start)).train()
    model = objective.model
    try:
        with torch.no_grad():
            value = float(objective(model(*model.train_inputs), model.train_targets).sum())
    except BREAKDOWNS:  # of so little noise that the evidence of all rows has no digits there
        value = there.result.objective
    return start if value > trained.result.objective + settings.tolerance else None


def _objective_of(task: Task) -> LatentMarginalLogLikelihood:
    """Return the log evidence of a model of the task, where training begins."""
    model = DenseGP(
        task.inputs, task.targets, task.likelihood, task.rules.begin, task.kernel, task.neighbours, task.points
    ).to(task.inputs.dtype)
    objective = evidence_of(model)
    if task.priors:
        register_priors(objective)
    if task.start is not None:
        start_from(model, task.start)
    if task.sites is not None:
        model.variational_strategy.start_from(task.sites)
    return objective


def train_once(task: Task, settings: Settings) -> Trained:
    """Train on all data from one start, by the rule that training begins with and then by that which it ends with."""
    rules = task.rules
    objective = _objective_of(task)
    model = objective.model
    sizes = subset_sizes(len(task.inputs), with_neighbours=task.neighbours is not None)
    is_new = bool(sizes) and sizes[0] > task.start_rows  # a subset would tell more than the start knows
    known: Initial = "curvature" if sizes else "data"
    initial, reasons = "subset" if is_new else known, list[str]()

    def trained(settings: Settings, initial: Initial) -> FitResult:
        """Train, and once more where columns were left out that matter."""
        result = fit_task(objective, task, settings, initial=initial)
        if not task.has_default_kernel or result.status in _NO_SECOND_LOOK:
            return result
        try:
            found = bring_back(objective, result.objective, _GAIN)
        except KeyboardInterrupt:
            return _interrupted(result, "at its columns")
        if found is None:
            return result
        value, columns = found
        again = fit_task(objective, task, settings, initial=known)
        reasons.append(
            f"columns {', '.join(map(str, columns))} of the inputs, left out at first, were brought back: objective a "
            f"row {result.objective:.4f}, then {value:.4f}, and after training {again.objective:.4f}"
        )
        return again

    if rules.first is not None:
        with without_inference_warnings():  # the other rule may converge
            result = trained(settings.rough, initial)
        model.inference, initial = rules.train, known
        if result.status is FitStatus.INTERRUPTED:
            return Trained(model, task.likelihood, result, _conclude(model, task))
        result = fit_task(objective, task, settings, initial=initial)
    else:
        result = trained(settings, initial)
    return Trained(model, task.likelihood, result, (*reasons, *_conclude(model, task)))


def evidence_of(model: DenseGP) -> LatentMarginalLogLikelihood:
    """Return the log evidence of a model by its rule, in closed form where there is one."""
    is_exact = model.variational_strategy.neighbours is None
    closed = is_exact and has_closed_form(model.likelihood, model.inference)
    return (GaussianEvidence if closed else LatentMarginalLogLikelihood)(model.likelihood, model)


def _conclude(model: DenseGP, task: Task) -> tuple[str, ...]:
    """Infer by the last rule, or, where it does not converge, by another one; return a sentence if so."""
    ends = []
    others = (KL(), task.rules.train) if task.neighbours is None else (task.rules.train,)  # KL takes many factors
    for rule in (task.rules.last, *others):
        model.inference = rule
        with without_inference_warnings():
            result = model.result
        if result.status is Status.CONVERGED:
            break
        ends.append(result.message)
    return tuple(ends)
