"""Training by L-BFGS: the collapsed bound on growing subsets of the data, or any gpytorch objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.variational import NaturalVariationalDistribution
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpext.inference import LikelihoodTerm
from gpext.inference.result import without_inference_warnings
from gpext.optim import Curvature, minimize_lbfgs
from gpext.parallel import Ranks
from gpext.training.latent_inference import LatentInference
from gpext.training.mean_and_root import MeanAndRoot
from gpext.training.reach import Reach
from gpext.training.registered_priors import add_log_prior
from gpext.training.result import FitResult, FitStatus, Run
from gpext.training.site_data import SiteData
from gpext.variational import CollapsedBound, number_of, places

MAX_STEPS = 200
BREAKDOWNS = (torch.linalg.LinAlgError, NotPSDError, NanError, FloatingPointError)  # of the numbers, not of the program
_RESTARTS = 10
_CHOICES = 3  # of nearest neighbours by the lengthscales that training has found
_WORTHWHILE = 0.05  # of KL / size, the gain of a step below which a subset is left
_WORTHWHILE_IN_SAMPLE = 0.003  # the same for the whole sample that minibatches begin with
_SAMPLE = 16_000  # data that suffice to begin with: their kernel matrix takes 26 MB at 200 inducing points
_AHEAD = 10  # times the first subset: the closed-form q(u) of this many data costs as much as five iterations there

_CURE = "rescale the data, or set hyperparameters nearer to them"


def subset_sizes(num_data: int, num_inducing: int) -> list[int]:
    """Return the numbers of data to train on in turn: 1000 (or five per inducing point), times about four, all."""
    smallest = _smallest_subset(num_inducing)
    if num_data <= 2 * smallest:
        return [num_data]
    num_subsets = max(round(math.log(num_data / smallest, 4)), 1)
    return [round(smallest * (num_data / smallest) ** (i / num_subsets)) for i in range(num_subsets)] + [num_data]


def _smallest_subset(num_inducing: int) -> int:
    return max(5 * num_inducing, 1000)


def fit_collapsed(
    run: Run,
    sites: SiteData,
    num_data: int,
    *,
    bound: LikelihoodTerm,
    tolerance: float,
    generator: torch.Generator,
    ranks: Ranks,
) -> FitResult:
    """Maximise the collapsed bound of growing subsets of the data, then of all; q(u) is that of all."""
    sizes = subset_sizes(num_data, sites.strategy.inducing_points.size(-2))
    shuffled = sites.take(_order(sites, generator))
    return run.finish(*_learn(run, shuffled, sizes, num_data, bound=bound, tolerance=tolerance, ranks=ranks))


def begin_on_sample(
    run: Run,
    sites: SiteData,
    num_data: int,
    *,
    bound: LikelihoodTerm,
    tolerance: float,
    generator: torch.Generator,
    ranks: Ranks,
) -> tuple[FitStatus, str] | None:
    """Learn on growing subsets of a sample of the data; return how it ended, and a note, or None if they are too few.

    The sample has at most 16000 data, or 20 per inducing point, so that its time and memory do not depend on N. q(u)
    becomes that of all the data, of which the sample is a minibatch: each of its data counts N / size times.
    """
    if not has_sample(sites, num_data):
        return None
    num_inducing = sites.strategy.inducing_points.size(-2)
    sizes = subset_sizes(min(num_data, max(_SAMPLE, 20 * num_inducing)), num_inducing)
    sample = sites.take(_order(sites, generator)[: math.ceil(sizes[-1] * number_of(sites.x) / num_data)])
    status, note, _ = _learn(
        run, sample, sizes, num_data, bound=bound, tolerance=tolerance, ranks=ranks, of_sample=True
    )
    return status, note


def has_sample(sites: SiteData, num_data: int) -> bool:
    """Return whether there are as many data as the smallest subset has, so that minibatches begin on a sample."""
    return num_data >= _smallest_subset(sites.strategy.inducing_points.size(-2))


def _order(sites: SiteData, generator: torch.Generator) -> Tensor:
    """Return the places of this rank's data in random order, on their device."""
    return torch.randperm(number_of(sites.x), generator=generator, device="cpu").to(places(sites.x).device)


def _learn(
    run: Run,
    sites: SiteData,
    sizes: list[int],
    num_data: int,
    *,
    bound: LikelihoodTerm,
    tolerance: float,
    ranks: Ranks,
    of_sample: bool = False,
) -> tuple[FitStatus, str, float | None]:
    """Maximise the collapsed bound of the first `size` data for each size in turn; return status, note and bound.

    Subsets are left early, so that most progress is made where a step is cheap: all but the last, and that of a sample,
    too, though later. A step moves the hyperparameters and the sites; the first of each size moves the sites alone. The
    very first step is followed by one of that kind for ten times as many data, which gives a model that predicts before
    hyperparameters are learned, and has no effect on later steps. Each rank has its share of a size.
    """
    share = number_of(sites.x) / sizes[-1]  # of each size, that this rank has
    status, objective = FitStatus.MAX_STEPS, float("nan")

    def stage_of(size: int, *, is_last: bool = False) -> _Stage:
        subset = sites.take(slice(math.ceil(size * share)))
        collapsed = CollapsedBound(sites.strategy, sites.likelihood, subset.x, subset.y, bound=bound, ranks=ranks)
        worthwhile = _WORTHWHILE if not is_last else _WORTHWHILE_IN_SAMPLE if of_sample else None
        return _Stage(run, collapsed, ranks, worthwhile=worthwhile, is_last=is_last)

    def weight(stage: _Stage) -> float:
        """Return how often each of the data counts in the q(u) that remains."""
        return num_data / stage.size if of_sample else 1.0

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
                    max_restarts=_RESTARTS if stage.is_last and not of_sample else 0,
                )
                status = FitStatus[outcome.name]
            done = stage.is_last or stage.stopped or not run.steps_left(MAX_STEPS)
            if done:
                objective = stage.per_datum(stage.collapsed.settle(tolerance=0.1 * tolerance))
                stage.collapsed.commit(weight=weight(stage))
        except BREAKDOWNS as error:
            if run.trace and not learns:
                continue  # learned hyperparameters may suit more data
            return FitStatus.BREAKDOWN, str(error), None  # all stays as it was after the last step
        except KeyboardInterrupt:
            if ranks.size > 1 or not stage.begun:  # other ranks may be in another step
                raise
            stage.collapsed.forget()
            objective = stage.per_datum(stage.collapsed.evaluate(gradient=False))  # at the best hyperparameters
            stage.collapsed.commit(weight=weight(stage))
            return FitStatus.INTERRUPTED, "", objective
        if done:
            break
    if stage.stopped:
        status = FitStatus.STOPPED
    elif not run.steps_left(MAX_STEPS):
        status = FitStatus.MAX_STEPS
    elif status is FitStatus.STOPPED:  # a sample is left early
        status = FitStatus.CONVERGED
    return status, "", objective


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

    def __init__(
        self, run: Run, collapsed: CollapsedBound, ranks: Ranks, *, worthwhile: float | None, is_last: bool
    ) -> None:
        self.run, self.collapsed, self.ranks, self.is_last = run, collapsed, ranks, is_last
        self.worthwhile = worthwhile  # None trains to the end
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
        return self.stopped or (self.worthwhile is not None and gain < self.worthwhile * price)


def fit_objective(
    run: Run,
    x: Tensor,
    y: Tensor,
    tolerance: float,
    curvature: Curvature,
    ended: FitStatus | None = None,
    start_note: str = "",
) -> FitResult:
    """Maximise any gpytorch objective over all its parameters, unless training has ended before, on subsets."""
    with torch.no_grad():
        run.mll.model(x)  # the very first call initialises q(u)
    status = maximise(run, x, y, tolerance, curvature) if ended is None else ended
    # The best point may be one that a line search had evaluated; and there may have been nothing to train.
    status, value, note = LatentInference(run.mll).ending(x, y, status)
    return run.finish(status, "; ".join(filter(None, [start_note, note])), value)


def maximise(
    run: Run, x: Tensor, y: Tensor, tolerance: float, curvature: Curvature, max_restarts: int = _RESTARTS
) -> FitStatus:
    """Maximise an objective by L-BFGS, and return how it ended; the parameters are the best ones, also after Ctrl-C.

    The curvature of the objective of other data, or neighbours, makes the first steps Newton's.
    """
    try:
        with _loss_of(run.mll, x, y, tolerance) as loss:
            for _ in range(_CHOICES):
                outcome = minimize_lbfgs(
                    loss.evaluate,
                    loss.parameters,
                    max_steps=run.steps_left(MAX_STEPS),
                    tolerance=tolerance,
                    callback=lambda value: run.step(-value),
                    on_best=loss.keep,
                    max_restarts=max_restarts,
                    curvature=curvature,
                )
                status = FitStatus[outcome.name]
                ended = status is not FitStatus.CONVERGED or not run.steps_left(MAX_STEPS)
                if ended or not loss.inference.choose_neighbours():
                    break
        return status
    except KeyboardInterrupt:
        return FitStatus.INTERRUPTED


def measure_curvature(
    mll: MarginalLogLikelihood, x: Tensor, y: Tensor, tolerance: float, curvature: Curvature
) -> FitStatus | None:
    """Learn the curvature of an objective at its parameters, where they end, too; return how Ctrl-C has ended it."""
    try:
        with _loss_of(mll, x, y, tolerance) as loss:
            curvature.measure(loss.evaluate, loss.parameters, loss.keep)
    except KeyboardInterrupt:
        return FitStatus.INTERRUPTED
    return None


class _Loss:
    """An objective to be maximised, with the sign changed, as a function of its parameters."""

    def __init__(self, mll: MarginalLogLikelihood, x: Tensor, y: Tensor) -> None:
        self.mll, self.x, self.y = mll, x, y
        distributions = [m for m in mll.modules() if isinstance(m, NaturalVariationalDistribution)]
        self._moments = [MeanAndRoot(distribution) for distribution in distributions]
        natural = {id(p) for distribution in distributions for p in distribution.parameters()}
        rest = [p for p in mll.parameters() if p.requires_grad and id(p) not in natural]
        self.parameters = [*rest, *(leaf for moment in self._moments for leaf in moment.leaves)]
        self.inference, self._reach = LatentInference(mll), Reach(mll)

    def commit(self) -> None:
        """Give q(u) the moments among the parameters."""
        for moment in self._moments:
            moment.commit()

    def keep(self) -> None:
        """Remember the state beside the parameters as the best one."""
        self.inference.keep()
        self._reach.keep()

    def evaluate(self) -> Tensor:
        """Return the loss, and leave its derivatives in the parameters' `.grad`."""
        self._reach.check()
        self.inference.start()
        self.commit()
        try:
            with without_inference_warnings():  # only the inference at the end of training matters
                loss = -self.mll(self.mll.model(self.x), self.y).sum()
            loss.backward()
        except (NotPSDError, NanError) as error:  # from which the line search steps back
            raise torch.linalg.LinAlgError(str(error)) from error
        for moment in self._moments:
            moment.collect()
        return loss.detach()


@contextmanager
def _loss_of(mll: MarginalLogLikelihood, x: Tensor, y: Tensor, tolerance: float) -> Iterator[_Loss]:
    """Yield the loss, inferred as roughly as this tolerance allows, and leave rules and q(u) as its parameters say."""
    loss = _Loss(mll, x, y)
    try:
        loss.inference.begin(tolerance)
        yield loss
    finally:
        loss.commit()
        loss.inference.restore()


def hyperparameters(mll: MarginalLogLikelihood) -> list[Tensor]:
    """Return the trainable parameters of the model and the likelihood except those of q(u), each once."""
    parameters = [*mll.model.hyperparameters(), *mll.likelihood.parameters()]
    return list({id(p): p for p in parameters if p.requires_grad}.values())
