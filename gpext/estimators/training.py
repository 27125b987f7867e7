"""Training of one model as its plan says: on a subset first, or with a growing number of inducing points.

Hyperparameters cost most where all data are used, and most of what is to be learned about them a part of the data can
tell: `gpext.fit` begins on subsets, unless a model of as many rows has been trained before. Inducing points are doubled
until the bound gains less than `WORTH` nats a datum by it, each time from the hyperparameters of a model of all of a
thousand rows. With many latents they are learned on a sample; q(u) of all
data, with more inducing points, follows in closed-form steps that begin at the sites of the sample's model.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.mlls import MarginalLogLikelihood, VariationalELBO
from torch import Tensor

from gpext.estimators.gaussian_evidence import GaussianEvidence, has_closed_form
from gpext.estimators.left_out import bring_back
from gpext.estimators.models import DenseGP, SparseGP, hyperparameters_of, start_from
from gpext.estimators.plan import Plan
from gpext.estimators.rows import unweighted
from gpext.inference import KL, InferenceWarning, Rule, Status
from gpext.likelihoods import LatentLikelihood, Weighted
from gpext.likelihoods.super_gaussian import AugmentedLikelihood
from gpext.mlls import AugmentedELBO, LatentMarginalLogLikelihood
from gpext.priors import register_priors
from gpext.sites import GaussianSites, JointSites
from gpext.training import FitResult, FitStatus, fit
from gpext.training.subsets import subset_sizes
from gpext.variational import CollapsedBound, kmeans_inducing_points

WORTH = 0.003  # nats a datum
_SETTLED = 10  # times the tolerance, for steps in q(u) alone that begin near its optimum
_NEARLY_ALL, _MUCH = 0.8, 0.1  # of the variance of standardised targets
_LARGE, _LITTLE_NOISE = 100.0, 1e-3  # outputscale and noise of a second start
_GAIN = 0.001  # nats a row, for which columns that were left out are brought back
_NO_SECOND_LOOK = (FitStatus.INTERRUPTED, FitStatus.BREAKDOWN, FitStatus.NO_POSTERIOR, FitStatus.STOPPED)
_PART = 1000  # rows whose hyperparameters those of inducing points begin with
Initial = Literal["data", "subset", "curvature"]

_ROUGH = 0.01  # nats a datum, the tolerance of a training from which another one starts


class Rules(NamedTuple):
    """Rules of inference of a model of all data.

    Attributes:
        train: by which the hyperparameters are learned.
        last: of the predictions.
        first: a cheaper one, by which training begins roughly; None for `train` alone. A bound may have hyperparameters
            that are better than all near them, and poor, where this one would not go.
    """

    train: Rule
    last: Rule
    first: Rule | None = None

    @property
    def begin(self) -> Rule:
        """The rule by which training begins."""
        return self.first or self.train

    @property
    def cheap(self) -> Rules:
        """The rules of a model to which the one it is trained by costs too much, where there is a cheaper one."""
        return self if self.first is None else Rules(self.first, self.first)


@dataclass(frozen=True)
class Task:
    """One model to train.

    Attributes:
        inputs: of the kernel (N, d), distinct rows.
        targets: as the likelihood takes them.
        likelihood: p(y | f), as initialised.
        kernel: of its own, to be trained.
        rules: of the full data.
        points: inducing points given by the user (M, d), or chosen for a model with neighbours.
        has_categories: whether inputs have codes of categories, so that inducing points are rows.
        priors: whether to add the priors of :mod:`gpext.priors` to parameters without any.
        start: hyperparameters by name to start from.
        start_rows: the number of rows that these were learnt from.
        sites: of a model of the same data, for the first inference.
        has_default_kernel: whether training may begin at other hyperparameters than the kernel's.
        neighbours: of each datum, of what `points` leave, if there are any; None for another prior.
    """

    inputs: Tensor
    targets: Tensor
    likelihood: Any
    kernel: Kernel
    rules: Rules
    points: Tensor | None = None
    has_categories: bool = False
    priors: bool = True
    start: dict[str, Tensor] | None = None
    start_rows: int = 0
    sites: GaussianSites | JointSites | None = None
    has_default_kernel: bool = False
    neighbours: int | None = None


@dataclass(frozen=True)
class Trained:
    """A trained model, in eval mode.

    Attributes:
        model: the process.
        likelihood: p(y | f).
        result: of the last training.
        reasons: what was decided while training.
    """

    model: DenseGP | SparseGP
    likelihood: Any
    result: FitResult
    reasons: tuple[str, ...] = ()

    @property
    def sites(self) -> GaussianSites | JointSites | None:
        """The sites of a model of all data; None of a sparse one."""
        return self.model.variational_strategy.sites if isinstance(self.model, DenseGP) else None

    @property
    def num_unknown(self) -> int:
        """The number of data of a model of all data whose leave-one-out log density is unknown; of a sparse one 0."""
        return int(self.model.result.log_loo.isnan().sum()) if isinstance(self.model, DenseGP) else 0

    @property
    def score(self) -> float:
        """The mean leave-one-out log density of a model of all data; of a sparse one its bound a datum.

        Unknown densities count as the least of the others; without any known one it is minus infinity.
        """
        if not isinstance(self.model, DenseGP):
            return self.result.objective
        log_loo = self.model.result.log_loo
        known = log_loo[~log_loo.isnan()]
        return float(log_loo.nan_to_num(nan=float(known.min())).mean()) if len(known) else -float("inf")


@dataclass(frozen=True)
class Settings:
    """Options of training, as the arguments of :func:`gpext.fit`."""

    max_steps: int | None
    tolerance: float
    seed: int
    progress: bool

    @property
    def rough(self) -> Settings:
        """Those of a training from which another one starts."""
        return replace(self, tolerance=max(self.tolerance, _ROUGH))


def train(task: Task, plan: Plan, settings: Settings) -> Trained:
    """Train a model as planned.

    Raises:
        ValueError: data that the likelihood cannot take.
    """
    if not plan.is_sparse:
        points = None if plan.inducing is None else _points(task, plan.inducing, settings.seed)
        rules = task.rules if plan.neighbours is None else task.rules.cheap
        return _train_dense(replace(task, points=points, neighbours=plan.neighbours, rules=rules), settings)
    if plan.sample is not None:
        return _train_on_sample(task, plan, plan.sample, settings)
    return _train_sparse(task, plan, settings)


def _train_dense(task: Task, settings: Settings) -> Trained:
    """Train on all data, a second time from elsewhere where Gaussian noise has explained too much of the targets.

    From lengthscales of the distances between data, and as much noise as signal, no slope of the evidence may lead to a
    function of many columns with hardly any noise: where noise has explained nearly all, or much although rows that
    occur several times have equal targets.
    """
    if not (task.has_default_kernel and has_closed_form(task.likelihood, task.rules.train)):
        return _train_once(task, settings)
    likelihood, kernel = copy.deepcopy((task.likelihood, task.kernel))  # as they are before training
    trained = _train_once(task, settings)
    noise = float(unweighted(trained.likelihood).noise.detach())
    if trained.result.status is FitStatus.INTERRUPTED or noise < (_MUCH if _repeats(task) else _NEARLY_ALL):
        return trained
    _begin_without_noise(likelihood, kernel)
    elsewhere = replace(task, likelihood=likelihood, kernel=kernel, start=None, start_rows=len(task.inputs))
    again = _train_once(elsewhere, settings)
    before, after = trained.result.objective, again.result.objective
    if not after > before + settings.tolerance:
        return trained
    reason = (
        f"trained a second time, from little noise, as noise had explained {noise:.2f} of the variance: objective a "
        f"row {before:.4f}, then {after:.4f}"
    )
    return replace(again, reasons=(*again.reasons, reason))


def _repeats(task: Task) -> bool:
    """Return whether some rows count as several with the same target."""
    return isinstance(task.likelihood, Weighted) and bool((task.targets[..., -1] >= 2).any())


def _begin_without_noise(likelihood: Any, kernel: Kernel) -> None:
    """Set hyperparameters to those of a function of large values and little noise."""
    unweighted(likelihood).noise = _LITTLE_NOISE
    for part in kernel.modules():
        if isinstance(part, ScaleKernel):
            part.outputscale = _LARGE


def _train_once(task: Task, settings: Settings) -> Trained:
    rules = task.rules
    model = DenseGP(
        task.inputs, task.targets, task.likelihood, rules.begin, task.kernel, task.neighbours, task.points
    ).to(task.inputs.dtype)
    objective = evidence_of(model)
    if task.priors:
        register_priors(objective)
    if task.start is not None:
        start_from(model, task.start)
    if task.sites is not None:
        model.variational_strategy.start_from(task.sites)
    sizes = subset_sizes(len(task.inputs), with_neighbours=task.neighbours is not None)
    is_new = bool(sizes) and sizes[0] > task.start_rows  # a subset would tell more than the start knows
    known: Initial = "curvature" if sizes else "data"
    initial, reasons = "subset" if is_new else known, list[str]()

    def trained(settings: Settings, initial: Initial) -> FitResult:
        """Train, and once more where columns were left out that matter."""
        result = _fit(objective, task.inputs, task.targets, task, settings, initial=initial)
        if not task.has_default_kernel or result.status in _NO_SECOND_LOOK:
            return result
        try:
            found = bring_back(objective, result.objective, _GAIN)
        except KeyboardInterrupt:
            message = "interrupted: the model is as trained before a second look at its columns"
            return replace(result, status=FitStatus.INTERRUPTED, message=message)
        if found is None:
            return result
        value, columns = found
        again = _fit(objective, task.inputs, task.targets, task, settings, initial=known)
        reasons.append(
            f"columns {', '.join(map(str, columns))} of the inputs, left out at first, were brought back: objective a "
            f"row {result.objective:.4f}, then {value:.4f}, and after training {again.objective:.4f}"
        )
        return again

    if rules.first is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InferenceWarning)  # the other rule may converge
            result = trained(settings.rough, initial)
        model.inference, initial = rules.train, known
        if result.status is FitStatus.INTERRUPTED:
            return Trained(model, task.likelihood, result, _conclude(model, task))
        result = _fit(objective, task.inputs, task.targets, task, settings, initial=initial)
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InferenceWarning)  # the outcome is in the report
            result = model.result
        if result.status is Status.CONVERGED:
            break
        ends.append(result.message)
    return tuple(ends)


def _random_rows(task: Task, size: int, seed: int) -> Task:
    """Return the task of so many random rows."""
    index = torch.randperm(len(task.inputs), generator=torch.Generator().manual_seed(seed))[:size]
    own = isinstance(task.likelihood, LatentLikelihood)
    targets = task.likelihood.take(task.targets, index) if own else task.targets[index]
    return replace(task, inputs=task.inputs[index], targets=targets)


def _train_on_sample(task: Task, plan: Plan, size: int, settings: Settings) -> Trained:
    """Learn the hyperparameters on `size` rows, then q(u) of all rows with the largest number of inducing points."""
    assert plan.inducing is not None
    first = _fit_sparse(_random_rows(task, size, settings.seed), plan.inducing, task.start, settings)
    if first.result.status is FitStatus.INTERRUPTED:
        return first
    assert isinstance(first.model, SparseGP)
    model = SparseGP(_points(task, plan.most, settings.seed), first.likelihood, first.model.covar_module)
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


def _train_sparse(task: Task, plan: Plan, settings: Settings) -> Trained:
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
    return _train_once(_random_rows(own, _PART, settings.seed), settings.rough)


def _fit_sparse(
    task: Task, size: int, values: dict[str, Tensor] | None, settings: Settings, batch_size: int | None = None
) -> Trained:
    """Train a model of this number of inducing points, from hyperparameters by name if there are any."""
    likelihood, kernel = copy.deepcopy((task.likelihood, task.kernel))
    model = SparseGP(_points(task, size, settings.seed), likelihood, kernel).to(task.inputs.dtype)
    if values is not None:
        start_from(model, values)
        start_from(likelihood, values)
    objective = _bound(likelihood, model, len(task.inputs))
    if task.priors:
        register_priors(objective)
    result = _fit(objective, task.inputs, task.targets, task, settings, batch_size)
    return Trained(model, likelihood, result)


def _bound(likelihood: Any, model: SparseGP, num_data: int) -> MarginalLogLikelihood:
    kind = AugmentedELBO if isinstance(likelihood, AugmentedLikelihood) else VariationalELBO
    return kind(likelihood, model, num_data=num_data)


def _points(task: Task, size: int, seed: int) -> Tensor:
    """Return inducing points (M, d): given ones, or centres of the inputs, or some of these if there are categories."""
    if task.points is not None:
        return task.points
    size = min(size, len(torch.unique(task.inputs[:20_000], dim=0)))
    return kmeans_inducing_points(task.inputs, size, seed=seed, num_iterations=0 if task.has_categories else 10)


def _fit(
    objective: MarginalLogLikelihood,
    x: Tensor,
    y: Tensor,
    task: Task,
    settings: Settings,
    batch_size: int | None = None,
    initial: Initial = "data",
) -> FitResult:
    return fit(
        objective,
        x,
        y,
        batch_size=batch_size,
        max_steps=settings.max_steps,
        tolerance=settings.tolerance,
        generator=torch.Generator().manual_seed(settings.seed),
        progress=settings.progress,
        initial=initial,
    )
