"""Training of a LatentGP that begins on random subsets of its data: a quarter, then a half; with neighbours fewer.

An evaluation of the log evidence of N data takes O(N^3) operations, of a half 1/8, of a quarter 1/64. With neighbours
it takes little more than O(N), and a quarter nearly a quarter: there an eighth comes first, and then about a third. The
evidence of all data is another function, maximised from where that of a part was highest: its maxima are those of a
training without subsets. Which of several is found may differ. Both are alike, a datum: the curvature that the steps on
one have shown is where those on the next begin. Where parameters are known from another training, the first subset
tells the curvature alone, by differences of its gradient along each of them.
"""

from __future__ import annotations

import math

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpext.bounds import num_latents
from gpext.likelihoods import LatentLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models.latent_gp import restricted_to
from gpext.optim import Curvature
from gpext.sites import GaussianSites, JointSites
from gpext.training.full_batch import BREAKDOWNS, maximise, measure_curvature
from gpext.training.result import FitStatus, Run

_MOST = 400  # data that are all used from the first step
_LEAST = 150  # of the data of a subset
_ROUGHER = 10  # times the tolerance, on a subset
_ROUGH = 1e-3  # the least tolerance there
_MOST_PARAMETERS = 100  # along each of which a gradient is compared


def check_subsets(mll: MarginalLogLikelihood, x: Tensor, y: Tensor, option: str) -> None:
    """Raise unless the objective can be trained on subsets of its data, as an option of `fit` asks.

    Raises:
        TypeError: it is not that of a LatentGP, or its likelihood holds numbers of all data.
        ValueError: the data are not those of the model.
    """
    if not isinstance(mll, LatentMarginalLogLikelihood):
        raise TypeError(
            f"{option} is served with a LatentMarginalLogLikelihood, of a gpext.models.LatentGP; got "
            f"{type(mll).__qualname__}: leave it out, or give initial='data'."
        )
    if isinstance(mll.likelihood, FixedNoiseGaussianLikelihood):
        raise TypeError(
            f"{option} cannot take a part of the noise that a {type(mll.likelihood).__qualname__} holds: leave it out, "
            "or use a gpytorch GaussianLikelihood in gpext.likelihoods.Weighted."
        )
    (known,) = mll.model.train_inputs
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    for name, given, own in (("inputs", x, known), ("targets", y, mll.model.train_targets)):
        if given.shape != own.shape or not bool((given == own).all()):
            raise ValueError(
                f"{name} must be those of the model, of shape {tuple(own.shape)}, with {option}; got others, "
                f"of shape {tuple(given.shape)}. Call model.set_train_data() to train on them."
            )


def subset_sizes(num_data: int, *, with_neighbours: bool = False) -> list[int]:
    """Return the numbers of data of the subsets; none for up to 400 data.

    They are a quarter (or 150) and a half; with neighbours an eighth (or 150) and the geometric mean of that and all.
    """
    if num_data <= _MOST:
        return []
    if not with_neighbours:
        return [max(num_data // 4, _LEAST), num_data // 2]
    first = max(num_data // 8, _LEAST)
    return [first, math.isqrt(first * num_data)]


def draw_subsets(
    mll: LatentMarginalLogLikelihood, generator: torch.Generator, *, moves: bool = True
) -> tuple[list[Tensor], str]:
    """Return the indices of random subsets, each of which has the one before, and a clause that names their sizes.

    If no parameter moves on them, it is one subset, whose curvature is of use, or none where it tells no curvature.
    """
    targets = mll.model.train_targets
    is_own = isinstance(mll.likelihood, LatentLikelihood)
    num_data = (mll.likelihood.datum_shape(targets) if is_own else targets.shape)[-1]
    sizes = subset_sizes(num_data, with_neighbours=mll.model.variational_strategy.neighbours is not None)
    if not sizes:
        return [], f"no subset of {num_data} data: at most {_MOST} are all used from the first step"
    order = torch.randperm(num_data, generator=generator, device="cpu").to(targets.device)
    if not moves and not _tells_curvature(mll):
        return [], f"without a curvature, of more than {_MOST_PARAMETERS} parameters or of several latent functions"
    if not moves:
        return [order[: sizes[0]]], f"with the curvature of {sizes[0]} random data of {num_data}"
    return [order[:size] for size in sizes], f"begun on {sizes[0]}, then {sizes[1]} random data of {num_data}"


def begin_on_subsets(
    run: Run, subsets: list[Tensor], tolerance: float, curvature: Curvature
) -> tuple[FitStatus | None, str]:
    """Maximise the evidence of subsets of the data in turn; return how training has ended there, or None, and a note.

    Inference begins at the sites of the subset before: the other data have none, and are first predicted from it. A
    subset whose evidence breaks down is left, which the note says: that of more data may not.
    """
    if not subsets:
        return None, ""
    notes = []
    strategy = run.mll.model.variational_strategy
    num_data = strategy.num_data
    sites: GaussianSites | JointSites | None = None
    for index in subsets:
        with restricted_to(run.mll.model, index) as (x, y):
            if sites is not None:
                strategy.start_from(sites.take(index))
            try:
                status = maximise(run, x, y, max(_ROUGHER * tolerance, _ROUGH), curvature, max_restarts=0)
                if status is FitStatus.CONVERGED and curvature.root is None and _tells_curvature(run.mll):
                    status = measure_curvature(run.mll, x, y, tolerance, curvature) or status
            except BREAKDOWNS as error:
                notes.append(f"the evidence of {len(index)} data broke down: {str(error).rstrip('.')}")
                continue
            if strategy.sites is not None:  # an objective in closed form infers none
                sites = strategy.sites.among(index, num_data)
        if status in (FitStatus.STOPPED, FitStatus.INTERRUPTED):
            return status, "; ".join(notes)
    if sites is not None:
        strategy.start_from(sites)
    return None, "; ".join(notes)


def measure_on_subset(
    run: Run, subsets: list[Tensor], tolerance: float, curvature: Curvature
) -> tuple[FitStatus | None, str]:
    """Learn the curvature of the evidence of a subset, if there is one, at the parameters given.

    Return how training has ended there, or None, and a note.
    """
    if not subsets:
        return None, ""
    (index,) = subsets
    strategy = run.mll.model.variational_strategy
    sites = strategy.sites
    with restricted_to(run.mll.model, index) as (x, y):
        if sites is not None:
            strategy.start_from(sites.take(index))
        try:
            ended, why = measure_curvature(run.mll, x, y, tolerance, curvature), "their evidence breaks down nearby"
        except BREAKDOWNS as error:
            ended, why = None, str(error).rstrip(".")
    is_known = ended is not None or curvature.root is not None
    return ended, "" if is_known else f"the curvature of {len(index)} data is not known: {why}"


def _tells_curvature(mll: LatentMarginalLogLikelihood) -> bool:
    """Return whether the gradient of a subset may be compared along each parameter: there are few, of one latent.

    Of several latents, as of eleven classes, a subset has too few data each: training took 1.6 times as long by it.
    """
    number = sum(p.numel() for p in mll.parameters() if p.requires_grad)
    return number <= _MOST_PARAMETERS and num_latents(mll.likelihood) is None
