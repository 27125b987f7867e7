"""Columns that training has left out although they matter.

Training begins on few rows, or with few inducing points. Where these do not tell that a column matters its lengthscale
grows, and at long lengthscales the objective is flat: all rows no longer bring it back. So training looks again: with
all long lengthscales shortened at once the derivatives say which columns want to be in the model, and those are kept
short if the objective is better by it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from gpext.kernels.columns import stationary_kernels
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models import LatentGP
from gpext.training.full_batch import BREAKDOWNS

_FAR, _NEAR = 4.0, 2.0  # times the shortest lengthscale: longer ones leave a column out, and what they are shortened to


def bring_back(
    objective: LatentMarginalLogLikelihood, value: float, tolerance: float
) -> tuple[float, list[int]] | None:
    """Shorten lengthscales of columns that want to be in a trained model; return the objective and these columns.

    None, with all as it was, where there is no such column or the objective a datum does not gain the tolerance; so it
    is after Ctrl-C. It takes one evaluation with its gradient, and another one where columns want to be in the model,
    which is in eval mode afterwards.

    Args:
        objective: of a trained model.
        value: of the objective a datum there.
        tolerance: of its gain.
    """
    model = objective.model
    (x,) = model.train_inputs
    found: tuple[float, list[int]] | None = None
    for kernel, columns in _several(model, x.size(-1)):
        trained = kernel.lengthscale.detach().clone()
        least = trained.min()
        far = trained > _FAR * least
        if not bool(far.any()):
            continue
        undo = _remembered(model, kernel)
        try:
            kernel.lengthscale = torch.where(far, _NEAR * least, trained)
            there = _evaluated(objective, kernel)
            wanted = torch.zeros_like(far) if there is None else far & (there[1] < 0)
            kernel.lengthscale = torch.where(wanted, _NEAR * least, trained)
            there = _evaluated(objective, kernel) if bool(wanted.any()) else None
        except KeyboardInterrupt:
            undo()
            raise
        finally:
            objective.eval()
        if there is None or not there[0] > value + tolerance:
            undo()
            continue
        value = there[0]
        found = value, [*(found[1] if found else []), *columns[wanted.flatten().cpu()].tolist()]
    return found


def _remembered(model: LatentGP, kernel: Kernel) -> Callable[[], None]:
    """Return what gives a kernel its lengthscales, and the model its sites and neighbours, as they are now."""
    strategy, raw = model.variational_strategy, kernel.raw_lengthscale.detach().clone()
    sites, choice = strategy.sites, strategy.neighbours
    neighbours = (None, None) if choice is None else (choice.scale, choice.chosen)

    def undo() -> None:
        with torch.no_grad():
            kernel.raw_lengthscale.copy_(raw)
        if choice is not None:
            choice.scale, choice.chosen = neighbours
        if sites is not None:
            strategy.start_from(sites)

    return undo


def _several(model: torch.nn.Module, num_columns: int) -> list[tuple[Kernel, Tensor]]:
    """Return the kernels that have a lengthscale for each of several columns, one latent's, and these columns."""
    kernels = [(kernel, columns) for _, kernel, columns in stationary_kernels(model, num_columns)]
    return [(k, columns.cpu()) for k, columns in kernels if k.lengthscale.numel() == len(columns) > 1]


def _evaluated(objective: LatentMarginalLogLikelihood, kernel: Kernel) -> tuple[float, Tensor] | None:
    """Return the objective and its derivatives in lengthscales, up to positive factors; None where it breaks down."""
    model = objective.train().model
    model.variational_strategy.choose_neighbours()
    try:
        value = objective(model(*model.train_inputs), model.train_targets).sum()
        (slope,) = torch.autograd.grad(value, kernel.raw_lengthscale)
    except BREAKDOWNS:
        return None
    return float(value.detach()), slope
