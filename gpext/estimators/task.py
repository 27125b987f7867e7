"""One model to train, and how: what the trainings of the estimators share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from gpytorch.kernels import Kernel
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpext.estimators.models import DenseGP, SparseGP
from gpext.inference import Rule
from gpext.likelihoods import LatentLikelihood
from gpext.sites import GaussianSites, JointSites
from gpext.training import FitResult, fit
from gpext.variational import kmeans_inducing_points

_ROUGH = 0.01  # nats a datum, the tolerance of a training from which another one starts
Initial = Literal["data", "subset", "curvature"]


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


def random_rows(task: Task, size: int, seed: int) -> Task:
    """Return the task of so many random rows."""
    index = torch.randperm(len(task.inputs), generator=torch.Generator().manual_seed(seed))[:size]
    own = isinstance(task.likelihood, LatentLikelihood)
    targets = task.likelihood.take(task.targets, index) if own else task.targets[index]
    return replace(task, inputs=task.inputs[index], targets=targets)


def inducing_points_of(task: Task, size: int, seed: int) -> Tensor:
    """Return inducing points (M, d): given ones, or centres of the inputs, or some of these if there are categories."""
    if task.points is not None:
        return task.points
    size = min(size, len(torch.unique(task.inputs[:20_000], dim=0)))
    return kmeans_inducing_points(task.inputs, size, seed=seed, num_iterations=0 if task.has_categories else 10)


def fit_task(
    objective: MarginalLogLikelihood,
    task: Task,
    settings: Settings,
    batch_size: int | None = None,
    initial: Initial = "data",
) -> FitResult:
    """Train on the rows of a task by :func:`gpext.fit` as the settings say."""
    return fit(
        objective,
        task.inputs,
        task.targets,
        batch_size=batch_size,
        max_steps=settings.max_steps,
        tolerance=settings.tolerance,
        generator=torch.Generator().manual_seed(settings.seed),
        progress=settings.progress,
        initial=initial,
    )
