"""Training by minibatches: closed-form steps in q(u) with Adam for the rest, or any gpytorch objective; resumable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gpytorch
import torch
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.variational import NaturalVariationalDistribution
from torch import Tensor

from gpext.inference import LikelihoodTerm
from gpext.likelihoods import LatentLikelihood
from gpext.parallel import Ranks
from gpext.training.checkpoint import Checkpoint
from gpext.training.full_batch import BREAKDOWNS, hyperparameters
from gpext.training.position import PositionSchema, load_optimizers, position
from gpext.training.registered_priors import add_log_prior
from gpext.training.result import FitResult, FitStatus, Run
from gpext.variational import FactorCache, Inputs, Prepared, SiteVariationalStrategy, UpdateOptions, places, take_inputs

Rate = float | Callable[[int], float]

_EPOCHS = 50
_PATIENCE = 5, 100  # epochs and steps, at least, that are compared with as many before to tell whether they gained
_WRITE, _STOP, _INTERRUPT = 1, 2, 3  # requests of a rank after a step
_TOGETHER = 2048  # data whose kernel is evaluated at once
_NATURAL_RATE = 0.1  # gpytorch's documented step for NGD on an objective that need not be conjugate


def steady(step: int) -> float:
    """Return the factor of step sizes that do not fall: 1."""
    return 1.0


class SiteStepper:
    """q(u) in closed form at every step; Adam for the rest at every `interval`-th, from the same kernel evaluation.

    In between, K_zz and the whitened data stay as they are, and a step costs a fifth.
    """

    objective = float("nan")  # per datum, as of the last step that computed it

    def __init__(
        self,
        mll: MarginalLogLikelihood,
        strategy: SiteVariationalStrategy,
        likelihood: LatentLikelihood,
        num_data: int,
        *,
        rate: Rate,
        learning_rate: float,
        bound: LikelihoodTerm,
        gradient: LikelihoodTerm,
        interval: int = 1,
        decay: Callable[[int], float] = steady,
        share: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.interval = interval
        self.decay = decay  # of the learning rate
        self.strategy, self.likelihood, self.num_data = strategy, likelihood, num_data
        self.share = num_data if share is None else share  # those of this rank
        self.ranks = Ranks.alone() if ranks is None else ranks
        self.rate, self.bound, self.gradient = rate, bound, gradient
        self._mll, self._parameters = mll, hyperparameters(mll)
        self._log_prior = add_log_prior(mll, 1 / num_data, gradient=False)  # a datum, at the last step of these
        self._good = [p.detach().clone() for p in self._parameters]
        self._ahead: FactorCache[list[Prepared]] = FactorCache()
        self._depends: list[Tensor | float] = []  # on which these depend
        self.optimizers = [torch.optim.Adam(self._parameters, lr=learning_rate)] if self._parameters else []

    def step(self, x: Inputs, y: Tensor, batches: Minibatches) -> float:
        """Take a step on the next minibatch of x and y; return the last computed objective per datum, before a step."""
        number = batches.num_drawn
        position = batches.advance()
        rate = self.rate(number) if callable(self.rate) else self.rate
        try:
            if number % self.interval == 0:  # the hyperparameters move, too
                value = self._update(x, y, batches.of_epoch(position, position + 1).to(places(x).device), rate)
            else:
                data = self.ranks.together(partial(self._prepared, x, y, batches, position))
                options = UpdateOptions(self.bound, rate, self.num_data, self.share)
                known = self.strategy.update_prepared(data, self.likelihood, options, self.ranks, self.gradient)
                assert known is not None  # as it was asked for
                value = float(known.sum()) + self._log_prior
        except BREAKDOWNS:
            self._restore()
            raise
        if number % self.interval == 0:
            self._good = [p.detach().clone() for p in self._parameters]
            for optimizer in self.optimizers:
                with shortened(optimizer, self.decay(number)):
                    optimizer.step()
        self.objective = value
        return self.objective

    def _update(self, x: Inputs, y: Tensor, index: Tensor, rate: float) -> float:
        """Move q(u), and leave the derivatives of the objective in the `.grad` of the hyperparameters."""
        for parameter in self._parameters:
            parameter.grad = None
        bound = self.strategy.update_unchecked(
            take_inputs(x, index),
            self.likelihood.take(y, index),
            self.likelihood,
            UpdateOptions(self.bound, rate, self.num_data, self.share),
            self.gradient,
            self.ranks,
        )
        self._log_prior = add_log_prior(self._mll, 1 / self.num_data, gradient=True)
        return float(bound.sum()) + self._log_prior

    def _prepared(self, x: Inputs, y: Tensor, batches: Minibatches, position: int) -> Prepared:
        """Return the quantities of the last minibatch, at `position` of its epoch, that do not depend on q(u).

        They are computed for a few thousand data at once, those of the steps until the hyperparameters move again, and
        kept while the hyperparameters stay as they are. The choice of the data depends on the number of the step
        alone, so that a resumed run continues bit for bit.
        """
        size, after = batches.batch_size, (batches.num_drawn - 1) % self.interval  # since hyperparameters moved
        if after == 1 or not self._depends:
            self._depends = [*self.strategy.prior_key(), *self.likelihood.parameters()]
        start = max(position - after + 1, 0)  # of the steps in q(u) alone, in this epoch
        together = max(_TOGETHER // size, 1)
        first = position - (position - start) % together
        key = [*self._depends, batches.num_drawn - position + first]
        prepared = self._ahead.get(key)
        if prepared is None:
            stop = min(position - after + self.interval, batches.per_epoch)
            index = batches.of_epoch(first, min(first + together, stop)).to(places(x).device)
            targets = self.likelihood.take(y, index)
            data = self.strategy.prepare(take_inputs(x, index), targets, self.likelihood, self.bound)
            prepared = data.split(size, self.likelihood)
            self._ahead.put(key, prepared)
        return prepared[position - first]

    @torch.no_grad()
    def _restore(self) -> None:
        """Restore the last parameters at which a step could be taken."""
        for parameter, good in zip(self._parameters, self._good, strict=True):
            parameter.copy_(good)


def hyperparameter_interval(batch_size: int, num_data: int) -> int:
    """Return the number of steps in q(u) for each step in the hyperparameters.

    Hyperparameters move once per 10000 data, but at least five times an epoch, and at most 20 steps apart. Their step
    costs three to five in q(u), and on the benchmark's data sets more frequent ones learn no more per second.
    """
    return max(1, min(20, 10_000 // batch_size, num_data // (5 * batch_size)))


class ObjectiveStepper:
    """Any gpytorch objective by Adam, and by NGD where q(u) has natural parameters."""

    objective = float("nan")

    def __init__(self, mll: MarginalLogLikelihood, num_data: int, *, learning_rate: float) -> None:
        self.mll, self.num_data = mll, num_data
        self.share, self.ranks = num_data, Ranks.alone()
        distributions = [m for m in mll.modules() if isinstance(m, NaturalVariationalDistribution)]
        natural = [p for module in distributions for p in module.parameters()]
        chosen = {id(p) for p in natural}
        rest = [p for p in mll.parameters() if p.requires_grad and id(p) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(rest, lr=learning_rate)] if rest else []
        if natural:
            self.optimizers.append(gpytorch.optim.NGD(natural, num_data=num_data, lr=_NATURAL_RATE))

    def step(self, x: Inputs, y: Tensor, batches: Minibatches) -> float:
        """Take a step on the next minibatch of x and y and return the objective per datum before it."""
        assert isinstance(x, Tensor)  # `fit` refuses a design
        index = batches.draw().to(x.device)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        likelihood = self.mll.likelihood
        if isinstance(likelihood, LatentLikelihood) and likelihood.num_latents is not None:
            targets = likelihood.take(y, index)
        else:
            targets = y[index] if y.size(0) == self.num_data else y[..., index]
        loss = -self.mll(self.mll.model(x[..., index, :]), targets).sum()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.objective = -loss.item()
        return self.objective


def fit_minibatches(
    run: Run,
    stepper: SiteStepper | ObjectiveStepper,
    x: Inputs,
    y: Tensor,
    *,
    batch_size: int,
    tolerance: float,
    generator: torch.Generator,
    state: dict[str, Any] | None,
    checkpoint: Checkpoint | None = None,
    begin: Callable[[], tuple[FitStatus, str] | None] | None = None,
) -> FitResult:
    """Step through epochs until the mean objective of an epoch has stopped rising.

    Args:
        run: the call of `fit`.
        stepper: takes the steps.
        x: inputs.
        y: targets.
        batch_size: over all ranks.
        tolerance: as in `fit`.
        generator: of the shuffling.
        state: to resume from, or None.
        checkpoint: to resume from, and to write; it is first written after the first minibatch.
        begin: trains before the first minibatch, and returns how that has ended, and a note; not called where a state
            or a checkpoint comes from later.
    """
    batch_size = min(batch_size, stepper.num_data)
    schema = PositionSchema(stepper.optimizers)
    if state is not None:
        given = state
        stepper.ranks.together(lambda: schema.check(given, "state"))
    known = None if checkpoint is None else checkpoint.read(schema)
    own = max(round(batch_size * stepper.share / stepper.num_data), 1)
    batches = Minibatches(stepper.share, own, generator)
    per_epoch = stepper.num_data // batch_size  # of all ranks together
    patience = _patience(per_epoch)
    if known is not None:
        state, trace = known
        run.trace.extend(trace)
    if state is not None:
        batches.load_state_dict(state["batches"])
        load_optimizers(stepper.optimizers, state["optimizers"])
        stepper.objective = state["objective"]

    def here() -> dict[str, Any]:
        return position(batches.state_dict(), stepper.optimizers, stepper.objective)

    def has_converged() -> bool:
        """Return whether an epoch has just ended, and the last few gained nothing that noise does not hide."""
        steps = run.trace[num_begun:]
        if len(steps) % per_epoch or len(steps) < 2 * patience * per_epoch:
            return False
        recent = torch.tensor(steps[-2 * patience * per_epoch :], dtype=torch.float64, device="cpu")
        epochs = recent.view(2, patience, per_epoch).mean(-1)
        before, after = epochs.mean(-1)
        noise = (epochs.var(-1).sum() / patience).sqrt()
        return bool(after - before < tolerance + noise)

    def wished(value: float) -> int:
        """Report a step to this rank's callback and return this rank's request."""
        stops = run.step(value)
        if run.interrupted():
            return _INTERRUPT
        return _STOP if stops else _WRITE if checkpoint is not None and checkpoint.is_due else 0

    status, note = FitStatus.MAX_STEPS, ""
    if begin is not None and batches.num_drawn == 0:
        try:
            begun, note = begin() or (status, "")
        except KeyboardInterrupt:
            begun = FitStatus.INTERRUPTED
        if begun in (FitStatus.STOPPED, FitStatus.INTERRUPTED) or not run.steps_left(1 + len(run.trace)):
            return run.finish(begun, note, state=here())
        note = f"the sample at the start broke down: {note}" if begun is FitStatus.BREAKDOWN else ""
    num_begun = max(len(run.trace) - batches.num_drawn, 0)  # steps before the first minibatch
    try:
        if has_converged():  # where the checkpoint was written
            status = FitStatus.CONVERGED
        else:
            for _ in range(run.steps_left(num_begun + _EPOCHS * per_epoch)):
                value = stepper.step(x, y, batches)
                wish = stepper.ranks.most(partial(wished, value))
                if wish == _INTERRUPT:
                    status = FitStatus.INTERRUPTED
                    break
                if wish == _STOP:
                    status = FitStatus.STOPPED
                    break
                if has_converged():
                    status = FitStatus.CONVERGED
                    break
                if wish == _WRITE and checkpoint is not None:
                    checkpoint.write(here(), run.trace)
    except KeyboardInterrupt:
        if stepper.ranks.size > 1:  # pressed twice; other ranks may be in another step
            raise
        status = FitStatus.INTERRUPTED
    except BREAKDOWNS as error:
        status, note = FitStatus.BREAKDOWN, str(error)
    if checkpoint is not None:
        checkpoint.write(here(), run.trace)
        if status is FitStatus.MAX_STEPS:
            note = "the steps of the checkpoint count: give a larger max_steps"
    recent = run.trace[num_begun:][-per_epoch:]
    return run.finish(status, note, sum(recent) / len(recent) if recent else float("nan"), here())


def default_rate(share: float) -> float:
    """Return the step in q(u) for minibatches of this share of the data: 1 for all of them, five shares if few."""
    return 5 * share / (1 + 4 * share)


def decay(step: int, per_epoch: int) -> float:
    """Return the factor of step sizes at a step: 1 for the first five epochs (or 100 steps), then falling as 1 / step.

    Both the noise that minibatches leave in q(u), and that in the hyperparameters, are averaged out at the end.
    """
    return min(1.0, _patience(per_epoch) * per_epoch / (step + 1))


def _patience(per_epoch: int) -> int:
    """Return the number of epochs that are compared with as many before."""
    return max(_PATIENCE[0], math.ceil(_PATIENCE[1] / per_epoch))


@contextmanager
def shortened(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rates of an optimiser for one step; its state keeps the undiminished ones."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


class Minibatches:
    """Endless minibatches of indices, a new permutation per epoch, without an incomplete last batch; resumable."""

    def __init__(self, num_data: int, batch_size: int, generator: torch.Generator) -> None:
        self.num_data, self.batch_size, self.generator = num_data, batch_size, generator
        self.per_epoch = num_data // batch_size
        self.num_drawn = 0
        self._start_epoch()

    def draw(self) -> Tensor:
        """Return the indices (batch_size,) of the next minibatch."""
        position = self.advance()
        return self.of_epoch(position, position + 1)

    def advance(self) -> int:
        """Advance to the next minibatch and return its number in its epoch."""
        position = self.num_drawn % self.per_epoch
        if position == 0 and self.num_drawn > 0:
            self._start_epoch()
        self.num_drawn += 1
        return position

    def of_epoch(self, start: int, stop: int) -> Tensor:
        """Return the indices of the minibatches from number `start` to before `stop` of this epoch."""
        return self._order[start * self.batch_size : stop * self.batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to resume from here."""
        return {"generator": self._epoch_state, "num_drawn": self.num_drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved position."""
        self.generator.set_state(state["generator"])
        self._start_epoch()
        self.num_drawn = state["num_drawn"]

    def _start_epoch(self) -> None:
        self._epoch_state = self.generator.get_state()
        self._order = torch.randperm(self.num_data, generator=self.generator, device="cpu")
