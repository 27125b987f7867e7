"""One call that trains: `fit(mll, x, y)`.

What it does follows from the objective and the model:

objective, model                          full batch (`batch_size=None`)        minibatches
AugmentedELBO, SiteVariationalStrategy    L-BFGS on the collapsed bound,        closed-form q(u) steps and Adam
                                          on growing subsets of the data
any other gpytorch mll                    L-BFGS                                Adam, and NGD for a natural q(u)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Literal

import gpytorch
import torch
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.variational import IndependentMultitaskVariationalStrategy, NaturalVariationalDistribution
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor
from tqdm.auto import tqdm

from gpext.mlls import AugmentedELBO
from gpext.optim import minimize_lbfgs
from gpext.variational import CollapsedBound, SiteVariationalStrategy


class FitStatus(Enum):
    """How training ended; the value says what to do about it."""

    CONVERGED = "converged"
    MAX_STEPS = "stopped at max_steps; call fit again to go on"
    STOPPED = "stopped by the callback"
    STALLED = "the line search found no better point; the objective is as good as its rounding allows"
    INTERRUPTED = "interrupted; the parameters are those of the best (L-BFGS) or last (minibatch) step"
    BREAKDOWN = "a covariance was not positive definite; the parameters are those of the last good step"


@dataclass(frozen=True)
class FitResult:
    """The outcome of :func:`fit`.

    Attributes:
        status: how it ended.
        objective: the bound or log likelihood per datum at the end (mean over the last epoch for minibatches).
        num_steps: L-BFGS iterations or minibatch steps.
        seconds: time spent.
        trace: the objective per datum after each step, (num_steps,); of a subset while training on one.
        message: one sentence on how it went.
        state_dict: pass it as `state` to another `fit` to go on where this one ended (minibatches; picklable).
    """

    status: FitStatus
    objective: float
    num_steps: int
    seconds: float
    trace: Tensor
    message: str
    state_dict: dict[str, Any] = field(repr=False)


def fit(
    mll: MarginalLogLikelihood,
    x: Tensor,
    y: Tensor,
    *,
    batch_size: int | None = None,
    max_steps: int | None = None,
    learning_rate: float = 0.03,
    rate: float | Callable[[int], float] | None = None,
    tolerance: float = 1e-5,
    hyperparameters: Literal["augmented", "exact"] = "augmented",
    generator: torch.Generator | None = None,
    state: dict[str, Any] | None = None,
    progress: bool = True,
    callback: Callable[[int, float], bool | None] | None = None,
) -> FitResult:
    """Train a model and its likelihood on data, in place.

    Args:
        mll: a gpytorch objective holding the likelihood and the model.
        x: inputs (N, d) or (..., N, d).
        y: targets (N,), (..., N), or (N, T) for a multitask model.
        batch_size: None for the full batch.
        max_steps: most L-BFGS iterations (default 200) or minibatch steps (default 50 epochs).
        learning_rate: of Adam, minibatches only.
        rate: step size of the closed-form q(u) update: a number, or a function of the step (0, 1, ...), e.g.
            :class:`RobbinsMonro`. Default: min(0.5, 20 batch_size / N).
        tolerance: converged when the objective per datum gains less than this in three successive L-BFGS iterations, or
            in five epochs of minibatches.
        hyperparameters: gradients from the augmented bound, or from the exact ELBO at the same q(u) (minibatches only).
        generator: source of the shuffling.
        state: `FitResult.state_dict` of an earlier fit to resume.
        progress: show a progress bar on a terminal.
        callback: called as callback(step, objective per datum) after every step, with q(u) up to date; returns True to
            stop.

    Returns:
        The result; Ctrl-C ends training early and still returns one.

    Raises:
        TypeError, ValueError: bad data or options; nothing has changed then.
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}.")
    strategy = _site_strategy(mll)
    if strategy is None and hyperparameters == "exact":
        raise ValueError("hyperparameters='exact' is for AugmentedELBO with a SiteVariationalStrategy.")
    _check_data(x, y)
    mll.train()
    run = _Run(mll, max_steps, progress, callback)
    generator = generator if generator is not None else torch.Generator().manual_seed(0)
    if strategy is not None:
        targets = y.mT if _is_multitask(mll) else y
        if batch_size is None:
            return _fit_collapsed(strategy, x, targets, tolerance, generator, run)
        stepper = _SiteStepper(strategy, mll.likelihood, y.size(0 if _is_multitask(mll) else -1), learning_rate)
        stepper.rate = rate if rate is not None else min(0.5, 20 * batch_size / stepper.num_data)
        stepper.gradient = hyperparameters
        return _fit_minibatches(stepper, x, targets, batch_size, tolerance, generator, state, run)
    if batch_size is None:
        return _fit_full_batch(x, y, tolerance, run)
    return _fit_minibatches(
        _StockStepper(mll, len(y), learning_rate), x, y, batch_size, tolerance, generator, state, run
    )


class _Run:
    """The clock, the trace and the progress bar of one call."""

    def __init__(
        self,
        mll: MarginalLogLikelihood,
        max_steps: int | None,
        progress: bool,
        callback: Callable[[int, float], bool | None] | None,
    ) -> None:
        self.mll, self.max_steps, self.callback = mll, max_steps, callback
        self.trace: list[float] = []
        self.started = time.perf_counter()
        self.bar = tqdm(desc="fit", disable=None if progress else True, leave=False)

    def step(self, value: float) -> bool:
        self.trace.append(value)
        self.bar.update()
        self.bar.set_postfix(objective=f"{value:.4f}", refresh=False)
        return self.callback is not None and bool(self.callback(len(self.trace), value))

    def finish(
        self, status: FitStatus, note: str = "", objective: float | None = None, state: dict[str, Any] | None = None
    ) -> FitResult:
        self.bar.close()
        self.mll.eval()
        seconds = time.perf_counter() - self.started
        objective = objective if objective is not None else self.trace[-1] if self.trace else float("nan")
        message = f"{len(self.trace)} steps in {seconds:.1f} s: {status.value}" + (f" ({note})" if note else "") + "."
        return FitResult(status, objective, len(self.trace), seconds, torch.tensor(self.trace), message, state or {})


def _fit_collapsed(
    strategy: SiteVariationalStrategy, x: Tensor, y: Tensor, tolerance: float, generator: torch.Generator, run: _Run
) -> FitResult:
    """L-BFGS on the collapsed bound of growing subsets: most of the way is made where a step is cheap."""
    likelihood, num_data = run.mll.likelihood, y.size(-1)
    parameters = _hyperparameters(run.mll)
    order = torch.randperm(num_data, generator=generator).to(x.device)
    x, y = x[..., order, :], y[..., order]
    status, note = FitStatus.CONVERGED, ""
    try:
        for size in _stage_sizes(num_data, strategy.inducing_points.size(-2)):
            bound = CollapsedBound(strategy, likelihood, x[..., :size, :], y[..., :size])
            last = size == num_data
            outcome = minimize_lbfgs(
                partial(_negative_mean, bound, size),
                parameters,
                max_steps=max((run.max_steps or 200) - len(run.trace), 1),
                tolerance=tolerance if last else max(tolerance, _SUBSET_TOLERANCE),
                callback=partial(_after_iteration, bound, run),
            )
            status = FitStatus[outcome.name]
            if not last and status in (FitStatus.MAX_STEPS, FitStatus.STOPPED):
                note = f"on a subset of {size} data"
                break
        objective = float(bound.evaluate(gradient=False).sum()) / size
        bound.commit()
    except KeyboardInterrupt:
        return run.finish(FitStatus.INTERRUPTED)
    return run.finish(status, note, objective)


_SUBSET_TOLERANCE = 2e-3  # nats per datum and step: below it a larger subset teaches more than another step


def _stage_sizes(num_data: int, num_inducing: int) -> list[int]:
    """Subset sizes: from ten data an inducing point, four times as many each time, then all."""
    sizes = []
    size = max(10 * num_inducing, 1000)
    while 2 * size < num_data:
        sizes.append(size)
        size *= 4
    return [*sizes, num_data]


def _negative_mean(bound: CollapsedBound, size: int) -> Tensor:
    return -bound.evaluate().sum() / size


def _after_iteration(bound: CollapsedBound, run: _Run, loss: float) -> bool:
    bound.commit()
    return run.step(-loss)


def _fit_full_batch(x: Tensor, y: Tensor, tolerance: float, run: _Run) -> FitResult:
    """L-BFGS on the negative of any gpytorch objective."""
    mll = run.mll

    def objective() -> Tensor:
        try:
            loss = -mll(mll.model(x), y).sum()
            loss.backward()
        except (NotPSDError, NanError) as error:
            raise torch.linalg.LinAlgError(str(error)) from error
        return loss.detach()

    try:
        outcome = minimize_lbfgs(
            objective,
            [p for p in mll.parameters() if p.requires_grad],
            max_steps=run.max_steps or 200,
            tolerance=tolerance,
            callback=lambda loss: run.step(-loss),
        )
    except KeyboardInterrupt:
        return run.finish(FitStatus.INTERRUPTED)
    return run.finish(FitStatus[outcome.name])


class _StockStepper:
    """One minibatch step on any gpytorch objective: Adam, and NGD where q(u) has natural parameters."""

    def __init__(self, mll: MarginalLogLikelihood, num_data: int, learning_rate: float) -> None:
        self.mll, self.num_data = mll, num_data
        natural = [
            p
            for module in mll.modules()
            if isinstance(module, NaturalVariationalDistribution)
            for p in module.parameters()
        ]
        chosen = {id(p) for p in natural}
        rest = [p for p in mll.parameters() if p.requires_grad and id(p) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(rest, lr=learning_rate)] if rest else []
        if natural:
            self.optimizers.append(gpytorch.optim.NGD(natural, num_data=num_data, lr=0.1))

    def step(self, x: Tensor, y: Tensor, index: int) -> float:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = -self.mll(self.mll.model(x), y).sum()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return -loss.item()


class _SiteStepper:
    """One minibatch step with q(u) in closed form, its hyperparameter gradients from the same kernel evaluation."""

    rate: float | Callable[[int], float] = 0.1
    gradient: Literal["augmented", "exact"] = "augmented"

    def __init__(self, strategy: SiteVariationalStrategy, likelihood: Any, num_data: int, learning_rate: float) -> None:
        self.strategy, self.likelihood, self.num_data = strategy, likelihood, num_data
        parameters = [*strategy.model.hyperparameters(), *likelihood.parameters()]
        parameters = [p for p in parameters if p.requires_grad]
        self.optimizers = [torch.optim.Adam(parameters, lr=learning_rate)] if parameters else []

    def step(self, x: Tensor, y: Tensor, index: int) -> float:
        rate = self.rate(index) if callable(self.rate) else self.rate
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        value = self.strategy.update(x, y, self.likelihood, rate, self.num_data, gradient=self.gradient)
        for optimizer in self.optimizers:
            optimizer.step()
        assert value is not None  # a gradient was asked for
        return float(value.sum())


def _fit_minibatches(
    stepper: _StockStepper | _SiteStepper,
    x: Tensor,
    y: Tensor,
    batch_size: int,
    tolerance: float,
    generator: torch.Generator,
    state: dict[str, Any] | None,
    run: _Run,
) -> FitResult:
    num_data = stepper.num_data
    batches = Minibatches(num_data, min(batch_size, num_data), generator)
    if state is not None:
        batches.load_state_dict(state["batches"])
        for optimizer, saved in zip(stepper.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    max_steps = run.max_steps or 50 * batches.per_epoch
    status, note = FitStatus.MAX_STEPS, ""
    epochs: list[float] = []
    current: list[float] = []
    along_tasks = y.dim() > 1 and x.dim() == 2 and isinstance(stepper, _StockStepper)
    try:
        for _ in range(max_steps):
            index = batches.draw().to(x.device)
            targets = y[index] if along_tasks else y[..., index]
            current.append(stepper.step(x[..., index, :], targets, batches.num_drawn - 1))
            if run.step(current[-1]):
                status = FitStatus.STOPPED
                break
            if len(current) == batches.per_epoch:
                epochs.append(sum(current) / len(current))
                current = []
                if len(epochs) > _PATIENCE and max(epochs[-_PATIENCE:]) - max(epochs[:-_PATIENCE]) < tolerance:
                    status = FitStatus.CONVERGED
                    break
    except KeyboardInterrupt:
        status = FitStatus.INTERRUPTED
    except (torch.linalg.LinAlgError, NotPSDError) as error:
        status, note = FitStatus.BREAKDOWN, str(error)
    saved = {
        "batches": batches.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in stepper.optimizers],
    }
    recent = run.trace[-batches.per_epoch :]
    return run.finish(status, note, sum(recent) / max(len(recent), 1), saved)


_PATIENCE = 5  # epochs without a gain before minibatch training is called converged: their means are noisy


class Minibatches:
    """Endless minibatches of indices, a fresh permutation an epoch, the incomplete last one dropped; resumable."""

    def __init__(self, num_data: int, batch_size: int, generator: torch.Generator) -> None:
        self.num_data, self.batch_size, self.generator = num_data, batch_size, generator
        self.per_epoch = num_data // batch_size
        self.num_drawn = 0
        self._start_epoch()

    def _start_epoch(self) -> None:
        self._epoch_state = self.generator.get_state()
        self._order = torch.randperm(self.num_data, generator=self.generator)

    def draw(self) -> Tensor:
        """Return the indices (batch_size,) of the next minibatch."""
        position = self.num_drawn % self.per_epoch
        if position == 0 and self.num_drawn > 0:
            self._start_epoch()
        self.num_drawn += 1
        return self._order[position * self.batch_size : (position + 1) * self.batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to go on from here."""
        return {"generator": self._epoch_state, "num_drawn": self.num_drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position."""
        self.generator.set_state(state["generator"])
        self._start_epoch()
        self.num_drawn = state["num_drawn"]


def _site_strategy(mll: MarginalLogLikelihood) -> SiteVariationalStrategy | None:
    """Return the site strategy behind an AugmentedELBO, if there is one."""
    if not isinstance(mll, AugmentedELBO):
        return None
    strategy = mll.model.variational_strategy
    if isinstance(strategy, IndependentMultitaskVariationalStrategy):
        strategy = strategy.base_variational_strategy
    return strategy if isinstance(strategy, SiteVariationalStrategy) else None


def _is_multitask(mll: MarginalLogLikelihood) -> bool:
    return isinstance(mll.model.variational_strategy, IndependentMultitaskVariationalStrategy)


def _hyperparameters(mll: MarginalLogLikelihood) -> list[Tensor]:
    parameters = [*mll.model.hyperparameters(), *mll.likelihood.parameters()]
    return list({id(p): p for p in parameters if p.requires_grad}.values())


def _check_data(x: Tensor, y: Tensor) -> None:
    if x.dim() < 1 or y.dim() < 1 or y.numel() == 0:
        raise ValueError(
            f"expected inputs (..., N, d) and targets (..., N); got {tuple(x.shape)} and {tuple(y.shape)}."
        )
    if x.size(-2 if x.dim() > 1 else 0) not in (y.size(-1), y.size(0)):
        raise ValueError(f"inputs and targets must be equally many; got {tuple(x.shape)} and {tuple(y.shape)}.")
    for name, tensor in (("inputs", x), ("targets", y)):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            index = tuple((~tensor.isfinite()).nonzero()[0].tolist())
            raise ValueError(f"{name} must be finite; got {tensor[index].item()} at index {index}.")
