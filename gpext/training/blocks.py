r"""Training of a nearest-neighbour model by blocks of its data, at a cost of a step that does not depend on N.

    log p(y) = sum_b log p(y_b | y_<b)  ~  sum_b [log Z(y_b, y_h(b)) - log Z(y_h(b))]

Vecchia's approximation by blocks of responses [Vecchia 1988; Stein, Chi & Welty 2004], whose terms are evidences of the
model's own rule under the neighbour prior of these data alone. Blocks are regions of space in random order, and h(b)
are the data of earlier blocks within a margin of b. Where an evidence is exact and all data are neighbours, so is the
sum, once margins hold all earlier blocks.

A step of Adam draws one of B blocks, without replacement within an epoch, and takes the gradient of B / N times its
term, whose mean over blocks is the sum per datum. Step sizes are constant in the first half and fall as 1 / step in
the second, which averages out the noise of blocks. Blocks and neighbours are those of the lengthscales at the start,
then of those at the half: the objective is smooth in between. Sites of a block are kept as the start of its next visit.

Of several ranks, which all have all data, each takes another block at every step, with 1 / R of the data that a step is
to have, and the mean of their gradients is the step's.
"""

from __future__ import annotations

from functools import partial

import torch
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpext.inference.result import without_inference_warnings
from gpext.linalg.regions import regions
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models.latent_gp import restricted_to
from gpext.parallel import Ranks
from gpext.sites import GaussianSites, JointSites
from gpext.training.full_batch import BREAKDOWNS, hyperparameters
from gpext.training.minibatch import Minibatches, shortened
from gpext.training.registered_priors import add_log_prior
from gpext.training.result import FitResult, FitStatus, Run
from gpext.training.subsets import check_subsets

MARGIN = 10.0  # typical distances of a block's data, as in `predict_by_regions`
_STEPS = 200


def trains_by_blocks(mll: MarginalLogLikelihood) -> bool:
    """Return whether minibatches of an objective are blocks: that of a LatentGP with neighbours."""
    return isinstance(mll, LatentMarginalLogLikelihood) and mll.model.variational_strategy.neighbours is not None


def check_blocks(mll: LatentMarginalLogLikelihood, x: Tensor, y: Tensor, initial: str, *, goes_on: bool) -> None:
    """Raise unless the objective can be trained by blocks.

    Raises:
        TypeError, ValueError: as :func:`check_subsets`; subsets at the start, a state or a checkpoint.
    """
    check_subsets(mll, x, y, "a batch_size")
    if initial in ("subset", "curvature"):
        raise ValueError(f"{initial=} begins the full batch: leave it out, or leave out the batch_size.")
    if goes_on:
        raise ValueError(
            "training by blocks cannot be resumed: leave out state and checkpoint. Another call of fit goes on from "
            "the parameters at which this one ends."
        )


class Blocks:
    """The blocks of a model's data by its lengthscales at present, in random order, and their terms.

    Args:
        mll: of a LatentGP with neighbours; those are chosen by the present lengthscales from now on.
        size: the largest number of data of a block.
        margin: in typical distances of a block's data.
        generator: of the order, on the CPU.
    """

    def __init__(self, mll: LatentMarginalLogLikelihood, size: int, margin: float, generator: torch.Generator) -> None:
        self.mll, self.margin = mll, margin
        (x,) = mll.model.train_inputs
        choice = mll.model.variational_strategy.neighbours
        choice.rescale(mll.model, x)
        self._points = choice.scaled(x)
        found = list(regions(self._points, self._points[:0], size))
        order = torch.randperm(len(found), generator=generator, device="cpu").tolist()
        self._regions = [found[i] for i in order]
        self._place = torch.empty(len(x), dtype=torch.long, device=x.device)  # in the order, of the block of each datum
        for place, region in enumerate(self._regions):
            self._place[region.points] = place
        self._starts: dict[tuple[int, bool], GaussianSites | JointSites] = {}

    def __len__(self) -> int:
        return len(self._regions)

    def log_evidence(self, place: int) -> Tensor:
        """Return log Z(y_b, y_h) - log Z(y_h) of the block at a place of the order, differentiable once.

        Raises:
            NotPSDError, NanError: as the objective.
            NotImplementedError: the model has added losses.
        """
        region = self._regions[place]
        near = region.with_margin(self._points, self.margin)
        earlier = near[self._place[near] < place]
        value = self._part(torch.cat([region.points, earlier]), (place, True))
        return value - self._part(earlier, (place, False)) if len(earlier) else value

    def _part(self, index: Tensor, key: tuple[int, bool]) -> Tensor:
        """Return the log evidence of the data at `index`, inferred from the sites of the last time."""
        model, start = self.mll.model, self._starts.get(key)
        with restricted_to(model, index) as (x, y):
            if start is not None:
                model.variational_strategy.start_from(start)
            value = self.mll.log_evidence(model(x), y)
            if any(True for _ in model.added_loss_terms()):  # which the prior may have set
                raise NotImplementedError("added losses are not served by blocks: leave out the batch_size.")
            self._starts[key] = model.variational_strategy.sites
        return value


class BlockStepper:
    """Adam along the gradient of one block's share of the objective, or of the mean over a block of each rank."""

    def __init__(self, mll: LatentMarginalLogLikelihood, learning_rate: float, ranks: Ranks | None = None) -> None:
        self.mll, self.ranks = mll, Ranks.alone() if ranks is None else ranks
        self._num_data = mll.model.train_inputs[0].size(-2)
        self._parameters = hyperparameters(mll)
        self._good = [p.detach().clone() for p in self._parameters]
        self._adam = torch.optim.Adam(self._parameters, lr=learning_rate) if self._parameters else None

    def differentiate(self, blocks: Blocks, place: int) -> float:
        """Leave the gradient of the negative objective, as the blocks estimate it, in `.grad`; return its value."""
        value, *gradient = self.ranks.sum(
            lambda: self._of_block(blocks, place), [torch.zeros((), dtype=torch.float64), *self._parameters]
        )
        for parameter, each in zip(self._parameters, gradient, strict=True):
            parameter.grad = each / self.ranks.size
        return float(value) / self.ranks.size + add_log_prior(self.mll, 1 / self._num_data, gradient=True)

    def _of_block(self, blocks: Blocks, place: int) -> list[Tensor]:
        """Return the share of a block in the objective, and the derivatives of its negative."""
        for parameter in self._parameters:
            parameter.grad = None
        with without_inference_warnings():  # only inference with the trained parameters matters
            value = len(blocks) / self._num_data * blocks.log_evidence(place)
        if value.requires_grad:
            (-value).backward()
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        if not all(bool(each.isfinite().all()) for each in gradient):
            raise FloatingPointError("the gradient of the evidence of a block is not finite")
        return [value.detach().double().cpu(), *gradient]

    def step(self, blocks: Blocks, place: int, factor: float) -> float:
        """Take a step, its size multiplied by a factor, and return the objective before it.

        Where the evidence breaks down, parameters are the last ones that had one.
        """
        try:
            value = self.differentiate(blocks, place)
        except BREAKDOWNS:
            with torch.no_grad():
                for parameter, good in zip(self._parameters, self._good, strict=True):
                    parameter.copy_(good)
            raise
        self._good = [p.detach().clone() for p in self._parameters]
        if self._adam is not None:
            with shortened(self._adam, factor):
                self._adam.step()
        return value


def fit_blocks(
    run: Run,
    *,
    batch_size: int,
    learning_rate: float,
    generator: torch.Generator,
    ranks: Ranks,
    margin: float = MARGIN,
) -> FitResult:
    """Take 200 steps, or as many as the run may, one block of each rank; the objective is the mean of the second half.

    Data and sites of the model are its own again whatever happens, and neighbours those of the trained lengthscales.
    """
    model = run.mll.model
    stepper, num_steps = BlockStepper(run.mll, learning_rate, ranks), run.steps_left(_STEPS)
    half, note = num_steps // 2, ""
    size = -(-batch_size // ranks.size)
    endings = (FitStatus.MAX_STEPS, FitStatus.STOPPED, FitStatus.INTERRUPTED)
    status = FitStatus.MAX_STEPS

    def wish(value: float) -> int:
        """Record a step, and return the place among the endings of what this rank wants."""
        stops = run.step(value)
        return 2 if run.interrupted() else int(stops)

    try:
        for first, last in ((0, half), (half, num_steps)):
            if first == last:
                continue
            blocks = Blocks(run.mll, size, margin, generator)
            note = f"{len(blocks)} blocks of at most {size} data, with margins of {margin:g} typical distances"
            order = Minibatches(len(blocks), 1, generator)
            for number in range(first, last):
                places = [int(order.draw()) for _ in range(ranks.size)]
                value = stepper.step(blocks, places[ranks.rank], min(1.0, max(half, 1) / (number + 1)))
                status = endings[ranks.most(partial(wish, value))]
                if status is not FitStatus.MAX_STEPS:
                    break
            if status is not FitStatus.MAX_STEPS:
                break
    except KeyboardInterrupt:
        if ranks.size > 1:  # pressed twice; other ranks may be in another step
            raise
        status = FitStatus.INTERRUPTED
    except BREAKDOWNS as error:
        status, note = FitStatus.BREAKDOWN, "; ".join(filter(None, [note, str(error).rstrip(".")]))
    finally:
        model.variational_strategy.neighbours.rescale(model, model.train_inputs[0])
    recent = run.trace[half:] or run.trace
    return run.finish(status, note, sum(recent) / len(recent) if recent else float("nan"))
