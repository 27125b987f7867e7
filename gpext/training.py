"""One call that trains: `fit(mll, x, y)`.

What it does follows from the objective and the model:

objective, model                          full batch (`batch_size=None`)        minibatches
AugmentedELBO, SiteVariationalStrategy    L-BFGS on the collapsed bound,        closed-form q(u) steps, Adam for the rest
                                          on growing subsets of the data
any other gpytorch mll                    L-BFGS                                Adam, and NGD for a natural q(u)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import gpytorch
import torch
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.variational import IndependentMultitaskVariationalStrategy
from torch import Tensor
from tqdm.auto import tqdm

from gpext.mlls import AugmentedELBO
from gpext.optim import Outcome, minimize_lbfgs
from gpext.variational import CollapsedBound, SiteVariationalStrategy, check_batch


class FitStatus(Enum):
    """How training ended; the value says what to do about it."""

    CONVERGED = "converged"
    MAX_STEPS = "stopped at max_steps; call fit again to go on"
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
    callback: Callable[[int, float], None] | None = None,
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
            from one epoch to the next.
        hyperparameters: gradients from the augmented bound, or from the exact ELBO at the same q(u) (minibatches only).
        generator: source of the shuffling.
        state: `FitResult.state_dict` of an earlier fit to resume.
        progress: show a progress bar on a terminal.
        callback: called as callback(step, objective per datum) after every step, with q(u) up to date.

    Returns:
        The result; Ctrl-C ends training early and still returns one.

    Raises:
        TypeError, ValueError: bad data or options; nothing has changed then.
    """
    strategy = _site_strategy(mll)
    targets = y.mT if strategy is not None and y.dim() == 2 and _is_multitask(mll) else y
    check_batch(x, targets if strategy is not None else y.transpose(0, -1) if y.dim() > x.dim() - 1 else y)
    if batch_size is not None and not 1 <= batch_size:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}.")
    mll.train()
    run = _Run(max_steps, progress, callback)
    if batch_size is None:
        if strategy is not None and isinstance(mll, AugmentedELBO):
            return _fit_collapsed(mll, strategy, x, targets, tolerance, generator, run)
        return _fit_full_batch(mll, x, y, tolerance, run)
    raise NotImplementedError
