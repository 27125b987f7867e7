"""The result of `fit`, and the clock, trace and progress bar of one call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpext.progress import Progress
from gpext.training.diagnostics import constant_columns, diagnose, ends_at_noise_floor, trained_parameters

Callback = Callable[[int, float], bool | None]


class FitStatus(Enum):
    """The outcome of training; the value is a sentence with advice.

    Example:
        >>> FitStatus.CONVERGED.name
        'CONVERGED'
    """

    CONVERGED = "converged"
    MAX_STEPS = "stopped at max_steps; call fit again to continue"
    STOPPED = "stopped by the callback"
    STALLED = "no better point was found: the objective is as good as rounding allows, or breaks down beyond"
    INTERRUPTED = "interrupted; the parameters are those of the best (L-BFGS) or last (minibatch) step"
    BREAKDOWN = "a covariance or a value was lost to rounding or overflow; all is as it was after the last good step"
    NOISE_FLOOR = "ended with noise at its floor: these targets have none that could be told from rounding"
    INFERENCE_UNFINISHED = "training has converged, but not the inference at its end: predictions are approximate"
    NO_POSTERIOR = "no posterior was found at the parameters where training has ended; predictions mean nothing"


@dataclass(frozen=True)
class FitResult:
    """The outcome of :func:`gpext.fit`.

    Attributes:
        status: how it ended.
        objective: the objective per datum at the end: of a site strategy's full batch the bound that `hyperparameters`
            names, else the value of the mll; of minibatches its mean over the last epoch.
        num_steps: L-BFGS iterations and minibatch steps.
        seconds: time spent.
        trace: the objective per datum after each step, (num_steps,), float64; of a subset or a minibatch while training
            on one.
        message: one sentence on the outcome; it names parameters, each by its entries, that have grown or fallen a
            million times, have ended on a bound of their constraint, or have had a gradient of zero throughout.
        state_dict: pass it as `state` to another `fit` to resume where this one ended (minibatches; picklable).

    Example:
        >>> import gpytorch, torch
        >>> from gpext.training import fit
        >>> class Model(gpytorch.models.ExactGP):
        ...     def __init__(self, x, y):
        ...         super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        ...         self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 6, 20).double()
        >>> model = Model(x, torch.sin(x)).double()
        >>> mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        >>> result = fit(mll, x, torch.sin(x), max_steps=3, progress=False)
        >>> result.status.name, len(result.trace) > 0
        ('MAX_STEPS', True)
    """

    status: FitStatus
    objective: float
    num_steps: int
    seconds: float
    trace: Tensor
    message: str
    state_dict: dict[str, Any] = field(repr=False)


class Run:
    """One call of `fit`: counts and times its steps and reports them."""

    def __init__(
        self,
        mll: MarginalLogLikelihood,
        x: Tensor,
        max_steps: int | None,
        progress: bool,
        callback: Callback | None,
        interrupted: Callable[[], bool],  # whether this rank asks all to stop, see gpext.parallel.interrupts
        start: str = "",  # a clause on where it starts, for the message
    ) -> None:
        self.mll, self.max_steps, self.callback, self.interrupted = mll, max_steps, callback, interrupted
        self._start = start
        self.trace: list[float] = []
        self._started, self._at_start = time.perf_counter(), trained_parameters(mll)
        self._constant = constant_columns(x)
        self._bar = Progress("fit", shown=progress)

    def steps_left(self, default: int) -> int:
        """Return how many steps may still be taken; `default` in all if the user set no limit."""
        return max((default if self.max_steps is None else self.max_steps) - len(self.trace), 0)

    def step(self, value: float) -> bool:
        """Record a step and its objective; return whether the callback stops the run."""
        self.trace.append(value)
        self._bar.update(numbers={"objective": f"{value:.4f}"})
        return self.callback is not None and bool(self.callback(len(self.trace), value))

    def finish(
        self, status: FitStatus, note: str = "", objective: float | None = None, state: dict[str, Any] | None = None
    ) -> FitResult:
        """Close the bar, put the model into eval mode and return the result."""
        self._bar.close()
        self.mll.eval()
        seconds = time.perf_counter() - self._started
        if objective is None:
            objective = self.trace[-1] if self.trace else float("nan")
        # At the floor the objective has few digits, so that a line search may stall as well as converge.
        if status in (FitStatus.CONVERGED, FitStatus.STALLED) and ends_at_noise_floor(self.mll):
            status = FitStatus.NOISE_FLOOR
        note = "; ".join(filter(None, [self._start, note, diagnose(self.mll, self._at_start, self._constant)]))
        message = f"{len(self.trace)} steps in {seconds:.1f} s: {status.value}" + (f" ({note})" if note else "") + "."
        return FitResult(
            status,
            objective,
            len(self.trace),
            seconds,
            torch.tensor(self.trace, dtype=torch.float64, device="cpu"),
            message,
            state or {},
        )
