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
"""

from __future__ import annotations

import warnings

import torch
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpext.inference import InferenceWarning
from gpext.linalg.regions import regions
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models.latent_gp import restricted_to
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
        self._points = x / mll.model.variational_strategy.neighbours.rescale(mll.model, x).to(x)
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
    """Adam along the gradient of one block's share of the objective."""

    def __init__(self, mll: LatentMarginalLogLikelihood, learning_rate: float) -> None:
        self.mll = mll
        self._num_data = mll.model.train_inputs[0].size(-2)
        self._parameters = hyperparameters(mll)
        self._good = [p.detach().clone() for p in self._parameters]
        self._adam = torch.optim.Adam(self._parameters, lr=learning_rate) if self._parameters else None

    def differentiate(self, blocks: Blocks, place: int) -> float:
        """Leave the gradient of the negative objective, as one block estimates it, in `.grad`; return its value."""
        for parameter in self._parameters:
            parameter.grad = None
        with warnings.catch_warnings():  # only inference with the trained parameters matters
            warnings.simplefilter("ignore", InferenceWarning)
            value = len(blocks) / self._num_data * blocks.log_evidence(place)
        if value.requires_grad:
            (-value).backward()
        total = float(value.detach()) + add_log_prior(self.mll, 1 / self._num_data, gradient=True)
        if not all(bool(p.grad.isfinite().all()) for p in self._parameters if p.grad is not None):
            raise FloatingPointError("the gradient of the evidence of a block is not finite")
        return total

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
    margin: float = MARGIN,
) -> FitResult:
    """Take 200 steps, or as many as the run may, one block each; the objective is the mean of the second half.

    Data and sites of the model are its own again whatever happens, and neighbours those of the trained lengthscales.
    """
    model = run.mll.model
    stepper, num_steps = BlockStepper(run.mll, learning_rate), run.steps_left(_STEPS)
    half, note = num_steps // 2, ""
    status = FitStatus.MAX_STEPS
    try:
        for first, last in ((0, half), (half, num_steps)):
            if first == last:
                continue
            blocks = Blocks(run.mll, batch_size, margin, generator)
            note = f"{len(blocks)} blocks of at most {batch_size} data, with margins of {margin:g} typical distances"
            order = Minibatches(len(blocks), 1, generator)
            for number in range(first, last):
                value = stepper.step(blocks, int(order.draw()), min(1.0, max(half, 1) / (number + 1)))
                stops = run.step(value)
                if run.interrupted():
                    status = FitStatus.INTERRUPTED
                elif stops:
                    status = FitStatus.STOPPED
                if status is not FitStatus.MAX_STEPS:
                    break
            if status is not FitStatus.MAX_STEPS:
                break
    except KeyboardInterrupt:
        status = FitStatus.INTERRUPTED
    except BREAKDOWNS as error:
        status, note = FitStatus.BREAKDOWN, "; ".join(filter(None, [note, str(error).rstrip(".")]))
    finally:
        model.variational_strategy.neighbours.rescale(model, model.train_inputs[0])
    recent = run.trace[half:] or run.trace
    return run.finish(status, note, sum(recent) / len(recent) if recent else float("nan"))
