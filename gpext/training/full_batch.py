"""Training by L-BFGS: the collapsed bound on growing subsets of the data, or any gpytorch objective."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

import torch
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.variational import NaturalVariationalDistribution
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpext.inference import InferenceWarning, LikelihoodTerm
from gpext.optim import minimize_lbfgs
from gpext.parallel import Ranks
from gpext.training.latent_inference import LatentInference
from gpext.training.mean_and_root import MeanAndRoot
from gpext.training.reach import Reach
from gpext.training.registered_priors import add_log_prior
from gpext.training.result import FitResult, FitStatus, Run
from gpext.training.site_data import SiteData
from gpext.variational import CollapsedBound, number_of

MAX_STEPS = 200
BREAKDOWNS = (torch.linalg.LinAlgError, NotPSDError, NanError, FloatingPointError)  # of the numbers, not of the program
_RESTARTS = 10
_WORTHWHILE = 0.05
_AHEAD = 10  # times the first subset: the closed-form q(u) of this many data costs as much as five iterations there

_CURE = "rescale the data, or set hyperparameters nearer to them"


def subset_sizes(num_data: int, num_inducing: int) -> list[int]:
    """Return the numbers of data to train on in turn: 1000 (or five per inducing point), times about four, all."""
    smallest = max(5 * num_inducing, 1000)
    if num_data <= 2 * smallest:
        return [num_data]
    num_subsets = max(round(math.log(num_data / smallest, 4)), 1)
    return [round(smallest * (num_data / smallest) ** (i / num_subsets)) for i in range(num_subsets)] + [num_data]


def fit_collapsed(
    run: Run,
    sites: SiteData,
    sizes: list[int],
    *,
    bound: LikelihoodTerm,
    tolerance: float,
    ranks: Ranks,
) -> FitResult:
    """Maximise the collapsed bound of the first `size` data for each size in turn; q(u) is that of the last.

    All but the last are left early, so that most progress is made where a step is cheap. A step moves the
    hyperparameters and the sites; the first of each size moves the sites alone. The very first step is followed by one
    of that kind for ten times as many data, which gives a model that predicts before hyperparameters are learned, and
    has no effect on later steps. Each rank has its share of a size.
    """
    held = number_of(sites.x)
    status, objective = FitStatus.MAX_STEPS, float("nan")

    def stage_of(size: int, *, is_last: bool = False) -> _Stage:
        own = slice(math.ceil(size * held / sizes[-1]))
        subset = sites.take(own)
        collapsed = CollapsedBound(sites.strategy, sites.likelihood, subset.x, subset.y, bound=bound, ranks=ranks)
        return _Stage(run, collapsed, ranks, is_last=is_last)

    for stage, learns in _stages(sizes, stage_of):
        try:
            stage.begin()
            if learns and not stage.stopped and run.steps_left(MAX_STEPS):
                outcome = minimize_lbfgs(
                    stage.loss,
                    hyperparameters(run.mll),
                    max_steps=run.steps_left(MAX_STEPS),
                    tolerance=tolerance,
                    callback=stage.step,
                    max_restarts=_RESTARTS if stage.is_last else 0,
                )
                status = FitStatus[outcome.name]
            done = stage.is_last or stage.stopped or not run.steps_left(MAX_STEPS)
            if done:
                objective = stage.per_datum(stage.collapsed.settle(tolerance=0.1 * tolerance))
                stage.collapsed.commit()
        except BREAKDOWNS as error:
            if run.trace and not learns:
                continue  # learned hyperparameters may suit more data
            return run.finish(FitStatus.BREAKDOWN, str(error))  # all stays as it was after the last step
        except KeyboardInterrupt:
            if ranks.size > 1 or not stage.begun:  # other ranks may be in another step
                raise
            stage.collapsed.forget()
            objective = stage.per_datum(stage.collapsed.evaluate(gradient=False))  # at the best hyperparameters
            stage.collapsed.commit()
            return run.finish(FitStatus.INTERRUPTED, objective=objective)
        if done:
            break
    if stage.stopped or not run.steps_left(MAX_STEPS):
        status = FitStatus.STOPPED if stage.stopped else FitStatus.MAX_STEPS
    return run.finish(status, objective=objective)


def _stages(sizes: list[int], stage_of: Callable[..., _Stage]) -> Iterator[tuple[_Stage, bool]]:
    """Yield the stages in turn, and whether hyperparameters are learned there, or q(u) alone."""
    *smaller, last = sizes
    if smaller:
        first = stage_of(smaller[0])
        yield first, False
        yield stage_of(min(_AHEAD * smaller[0], last)), False
        yield first, True
        yield from ((stage_of(size), True) for size in smaller[1:])
    yield stage_of(last, is_last=True), True


class _Stage:
    """The collapsed bound of a subset of the data as an objective of L-BFGS."""

    def __init__(self, run: Run, collapsed: CollapsedBound, ranks: Ranks, *, is_last: bool) -> None:
        self.run, self.collapsed, self.ranks, self.is_last = run, collapsed, ranks, is_last
        self.size = collapsed.num_data
        self.stopped = False  # by the user's callback
        self._last: float | None = None  # no step yet

    @property
    def begun(self) -> bool:
        """Whether a step was taken."""
        return self._last is not None

    def begin(self) -> None:
        """Find sites, unless there are some, and move them at the current hyperparameters."""
        if not self.begun:
            value = self.collapsed.evaluate(gradient=False)
            if not bool(value.isfinite().all()):
                raise FloatingPointError(f"the bound is {float(value.sum())} at the hyperparameters given; {_CURE}.")
            self.step()

    def per_datum(self, bound: Tensor, *, gradient: bool = False) -> float:
        """Return a bound of these data and the log densities of registered priors, divided by their number."""
        return float(bound.sum()) / self.size + add_log_prior(self.run.mll, 1 / self.size, gradient=gradient)

    def loss(self) -> float:
        return -self.per_datum(self.collapsed.evaluate(), gradient=True)

    def step(self, loss: float | None = None) -> bool:
        """Move the sites, report, and return whether to end this stage.

        A larger subset lowers KL / size, the price of this one's few data: once a step gains only a small part of that,
        training moves to the next subset.
        """
        value = self.per_datum(self.collapsed.refresh())
        self.collapsed.commit()
        self.stopped = self.ranks.most(lambda: int(self.run.step(value))) > 0
        if self.ranks.any(self.run.interrupted()):
            raise KeyboardInterrupt
        price = float(self.collapsed.divergence.sum()) / self.size
        gain, self._last = math.inf if self._last is None else value - self._last, value
        return self.stopped or (not self.is_last and gain < _WORTHWHILE * price)


def fit_objective(run: Run, x: Tensor, y: Tensor, tolerance: float) -> FitResult:
    """Maximise any gpytorch objective over all its parameters."""
    mll = run.mll
    with torch.no_grad():
        mll.model(x)  # the very first call initialises q(u)
    distributions = [m for m in mll.modules() if isinstance(m, NaturalVariationalDistribution)]
    moments = [MeanAndRoot(distribution) for distribution in distributions]
    natural = {id(p) for distribution in distributions for p in distribution.parameters()}

    def commit() -> None:
        for moment in moments:
            moment.commit()

    def objective() -> Tensor:
        reach.check()
        commit()
        try:
            with warnings.catch_warnings():  # only the inference at the end of training matters
                warnings.simplefilter("ignore", InferenceWarning)
                loss = -mll(mll.model(x), y).sum()
            loss.backward()
        except (NotPSDError, NanError) as error:  # from which the line search steps back
            raise torch.linalg.LinAlgError(str(error)) from error
        for moment in moments:
            moment.collect()
        return loss.detach()

    inference, reach = LatentInference(mll), Reach(mll)

    def keep() -> None:
        inference.keep()
        reach.keep()

    rest = [p for p in mll.parameters() if p.requires_grad and id(p) not in natural]
    try:
        outcome = minimize_lbfgs(
            objective,
            [*rest, *(leaf for moment in moments for leaf in moment.leaves)],
            max_steps=run.steps_left(MAX_STEPS),
            tolerance=tolerance,
            callback=lambda loss: run.step(-loss),
            on_best=keep,
            max_restarts=_RESTARTS,
        )
        status = FitStatus[outcome.name]
    except KeyboardInterrupt:
        status = FitStatus.INTERRUPTED
    finally:
        commit()
        inference.restore()
    # The best point may be one that a line search had evaluated; and there may have been nothing to train.
    status, value, note = inference.ending(x, y, status)
    return run.finish(status, note, value)


def hyperparameters(mll: MarginalLogLikelihood) -> list[Tensor]:
    """Return the trainable parameters of the model and the likelihood except those of q(u), each once."""
    parameters = [*mll.model.hyperparameters(), *mll.likelihood.parameters()]
    return list({id(p): p for p in parameters if p.requires_grad}.values())
