"""The common parts of convergence benchmarks: the problem, the clock, the evaluation and the trace.

A method is a function ``run(problem, *, batch_size, budget, seed, dtype, max_steps=None, **options) -> Trace``. A
method that works on minibatches only defines a :class:`Learner` and passes it to :func:`train`; any other method uses a
:class:`Recorder` directly. The clock runs while a method is set up and trained and stops while it is evaluated.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any, Protocol

import torch
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from benchmarks.datasets import load
from benchmarks.scoring import conditional, log_predictive_density

LIKELIHOODS = ("laplace", "student_t", "matern32", "logit")


@dataclass(frozen=True)
class Initial:
    """Initial hyperparameters, the same for every method.

    Attributes:
        lengthscale: Of every input dimension.
        outputscale: Of the kernel.
        noise: Squared scale of a regression likelihood.
        deg_free: Of the Student-t.
    """

    lengthscale: float
    outputscale: float = 1.0
    noise: float = 0.1
    deg_free: float = 4.0


@dataclass(frozen=True)
class Problem:
    """Data, likelihood, inducing points and start of one convergence run; float64, a method casts to its own dtype.

    The model is the same for all: zero mean, ``outputscale * exp(-sum_d (x_d - x'_d)^2 / (2 lengthscale_d^2))``,
    fixed inducing points, all other hyperparameters learned.
    """

    dataset: str
    likelihood: str
    train_x: Tensor  # (N, d)
    train_y: Tensor  # (N,)
    test_x: Tensor  # (N*, d)
    test_y: Tensor  # (N*,)
    inducing_points: Tensor  # (M, d)
    initial: Initial


class Status(str, Enum):
    """The way in which a run ended."""

    FINISHED = "finished"
    NOT_POSITIVE_DEFINITE = "not positive definite"
    NOT_FINITE = "not finite"


@dataclass(frozen=True)
class Trace:
    """The course of one run; the lists have one entry for each evaluation.

    Attributes:
        status: How the run ended.
        message: The error behind a status other than ``FINISHED``.
        seconds: Training time so far.
        steps: Training steps so far.
        error: Share of wrong classes, or root mean squared error of the latent mean in standardised units.
        log_density: Mean test log density, standardised units.
        hyperparameters: At the last evaluation.
        num_steps: Steps taken in all.
        train_seconds: Training time in all.
    """

    status: Status = Status.FINISHED
    message: str = ""
    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    log_density: list[float] = field(default_factory=list)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    num_steps: int = 0
    train_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the trace in JSON's types."""
        return asdict(self) | {"status": self.status.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trace:
        """Return the trace of :meth:`as_dict`."""
        return cls(**{**values, "status": Status(values["status"])})

    def seconds_to(self, log_density: float) -> float:
        """Return training time at the first evaluation that reached ``log_density``; infinite if none did."""
        reached = (t for t, value in zip(self.seconds, self.log_density, strict=True) if value >= log_density)
        return next(reached, math.inf)


class Predictor(Protocol):
    """The interface that an evaluation needs from a trained or half-trained model."""

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of ``f`` at each row of ``x`` (float64, any number of rows), without gradients."""

    def likelihood_parameters(self) -> dict[str, float]:
        """Return the keywords of :func:`benchmarks.scoring.conditional` at the current state."""

    def hyperparameters(self) -> dict[str, Any]:
        """Return the final state to record: floats and lists of floats."""


class Learner(Predictor, Protocol):
    """A predictor that learns from minibatches."""

    def step(self, x: Tensor, y: Tensor) -> None:
        """Do one training step on a minibatch in the learner's own dtype."""


class ScaledKernelParameters:
    """The parameters of a predictor with a gpytorch `likelihood` and a `model` with a ScaleKernel."""

    model: Any
    likelihood: Any

    def likelihood_parameters(self) -> dict[str, float]:
        """Return noise and degrees of freedom, where the likelihood has them."""
        names = ("noise", "deg_free")
        return {name: getattr(self.likelihood, name).item() for name in names if hasattr(self.likelihood, name)}

    def hyperparameters(self) -> dict[str, Any]:
        """Return kernel and likelihood parameters."""
        kernel = self.model.covar_module
        return {
            "outputscale": kernel.outputscale.item(),
            "lengthscale": kernel.base_kernel.lengthscale.detach().flatten().tolist(),
            **self.likelihood_parameters(),
        }


@dataclass(frozen=True)
class Method:
    """An entry of the registry.

    Attributes:
        run: ``run(problem, *, batch_size, budget, seed, dtype, max_steps=None, **options) -> Trace``.
        options: The method's defaults, as a user would leave them.
        grid: The options tried when the command line asks for tuned peers.
        learner: ``learner(problem, *, seed, dtype, **options) -> Learner``, for the step timer; None if the method has
            no minibatch step.
    """

    run: Callable[..., Trace]
    options: Mapping[str, float]
    grid: tuple[Mapping[str, float], ...] = ()
    learner: Callable[..., Learner] | None = None


@lru_cache(maxsize=8)
def make_problem(
    dataset: str, likelihood: str, *, seed: int, num_inducing: int = 200, max_train: int | None = None
) -> Problem:
    """Load the data and choose the inducing points by k-means from a k-means++ start.

    The lengthscale starts at ``sqrt(d)``, the typical distance of standardised points over ``sqrt(2)``.
    """
    data = load(dataset, seed=seed, max_train=max_train)
    if (likelihood == "logit") != (data.task == "binary"):
        raise ValueError(f"the likelihood {likelihood!r} does not fit {dataset!r}, which is a {data.task} task.")
    return Problem(
        dataset=dataset,
        likelihood=likelihood,
        train_x=data.train_x,
        train_y=data.train_y,
        test_x=data.test_x,
        test_y=data.test_y,
        inducing_points=choose_inducing_points(data.train_x, num_inducing, seed=seed),
        initial=Initial(lengthscale=math.sqrt(data.train_x.shape[-1])),
    )


def choose_inducing_points(x: Tensor, num_inducing: int, *, seed: int, max_rows: int = 20_000) -> Tensor:
    """Return the centres of a few k-means rounds from a k-means++ start, on the first ``max_rows`` rows."""
    from sklearn.cluster import KMeans

    means = KMeans(num_inducing, init="k-means++", n_init=1, max_iter=20, random_state=seed).fit(x[:max_rows].numpy())
    return torch.from_numpy(means.cluster_centers_).to(x)


def minibatches(num_data: int, batch_size: int, *, seed: int) -> Iterator[Tensor]:
    """Yield indices of endless minibatches: each epoch is a new permutation, its incomplete last batch dropped."""
    generator = torch.Generator().manual_seed(seed)
    batch_size = min(batch_size, num_data)
    while True:
        order = torch.randperm(num_data, generator=generator)
        yield from order[: num_data - num_data % batch_size].split(batch_size)


def evaluate(problem: Problem, predictor: Predictor, chunk: int = 4096) -> tuple[float, float]:
    """Return test error and mean test log density."""
    with torch.no_grad():
        parts = [predictor.latent(x) for x in problem.test_x.split(chunk)]
        mean, variance = (torch.cat(values).double() for values in zip(*parts, strict=True))
        density = conditional(problem.likelihood, **predictor.likelihood_parameters())
        log_density = log_predictive_density(density, problem.test_y, mean, variance).mean()
        if problem.likelihood == "logit":
            error = ((mean > 0) != (problem.test_y > 0.5)).double().mean()
        else:
            error = (mean - problem.test_y).square().mean().sqrt()
    return float(error), float(log_density)


class Recorder:
    """The clock of a run and its evaluations at about ``num_evaluations`` log-spaced times.

    Call :meth:`start`, then :meth:`advance` after each step until it returns False, then :meth:`trace`.
    """

    def __init__(
        self, problem: Problem, *, budget: float, max_steps: int | None = None, num_evaluations: int = 40
    ) -> None:
        self.problem = problem
        self.budget = budget
        self.max_steps = max_steps
        first = budget / 500
        ratio = (budget / first) ** (1 / max(num_evaluations - 2, 1))
        self._times = [first * ratio**k for k in range(num_evaluations - 1)]
        self._rows: list[tuple[float, int, float, float]] = []
        self._hyperparameters: dict[str, Any] = {}
        self._elapsed = 0.0
        self._started: float | None = None
        self._status, self._message = Status.FINISHED, ""
        self.num_steps = 0

    @property
    def elapsed(self) -> float:
        """Training seconds so far."""
        running = 0.0 if self._started is None else time.perf_counter() - self._started
        return self._elapsed + running

    @property
    def running(self) -> bool:
        """Whether the clock runs."""
        return self._started is not None

    def start(self) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock."""
        self._elapsed, self._started = self.elapsed, None

    def advance(self, predictor: Predictor, steps: int = 1) -> bool:
        """Count steps, evaluate if it is time to, and return whether to continue."""
        self.num_steps += steps
        elapsed = self.elapsed
        last = elapsed >= self.budget or (self.max_steps is not None and self.num_steps >= self.max_steps)
        if last or (self._times and elapsed >= self._times[0]):
            self.stop()
            self._times = [t for t in self._times if t > elapsed]
            finite = self.evaluate(predictor)
            last = last or not finite
            if not last:
                self.start()
        return not last

    def evaluate(self, predictor: Predictor) -> bool:
        """Add a row to the trace unless it is not finite; the clock should be stopped."""
        error, log_density = evaluate(self.problem, predictor)
        if not (math.isfinite(error) and math.isfinite(log_density)):
            self._status, self._message = Status.NOT_FINITE, f"test log density {log_density}, error {error}"
            return False
        self._rows.append((self.elapsed, self.num_steps, error, log_density))
        self._hyperparameters = predictor.hyperparameters()
        return True

    def fail(self, error: Exception) -> None:
        """Record a numerical breakdown; any other error is a mistake in the program and is raised again."""
        self.stop()
        if isinstance(error, NotPSDError | torch.linalg.LinAlgError):
            self._status = Status.NOT_POSITIVE_DEFINITE
        elif isinstance(error, NanError) or "nan" in str(error).lower():
            self._status = Status.NOT_FINITE
        else:
            raise error
        self._message = str(error)[:300]

    def trace(self) -> Trace:
        """Return the trace of the run so far."""
        return Trace(
            status=self._status,
            message=self._message,
            seconds=[row[0] for row in self._rows],
            steps=[row[1] for row in self._rows],
            error=[row[2] for row in self._rows],
            log_density=[row[3] for row in self._rows],
            hyperparameters=self._hyperparameters,
            num_steps=self.num_steps,
            train_seconds=self.elapsed,
        )


def train(
    problem: Problem,
    make_learner: Callable[[], Learner],
    *,
    batch_size: int,
    budget: float,
    seed: int,
    dtype: torch.dtype,
    max_steps: int | None = None,
) -> Trace:
    """Train a learner on minibatches for ``budget`` seconds (or ``max_steps`` steps) and record its course.

    The minibatches depend on the seed alone, so they are the same for every method.
    """
    x, y = problem.train_x.to(dtype), problem.train_y.to(dtype)
    recorder = Recorder(problem, budget=budget, max_steps=max_steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # jitter added to a Cholesky factor: left to the method
        try:
            recorder.start()
            learner = make_learner()
            recorder.stop()
            recorder.evaluate(learner)
            recorder.start()
            for index in minibatches(len(y), batch_size, seed=seed):
                learner.step(x[index], y[index])
                if not recorder.advance(learner):
                    break
        except (NotPSDError, NanError, RuntimeError, ValueError) as error:
            recorder.fail(error)
    return recorder.trace()
