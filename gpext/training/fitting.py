"""One call that trains, `fit(mll, x, y)`; :mod:`gpext.training` describes how, for each kind of objective."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.variational import (
    IndependentMultitaskVariationalStrategy,
    LMCVariationalStrategy,
    _VariationalStrategy,
)
from torch import Tensor

from gpext.designs import Design
from gpext.optim import Curvature
from gpext.parallel import Ranks, check_ranks, described, interrupts
from gpext.threads import factor_flops, threads_for
from gpext.training.arguments import (
    check_number,
    check_one_value,
    check_options,
    checked_data,
    number_of_inputs,
)
from gpext.training.blocks import check_blocks, fit_blocks, trains_by_blocks
from gpext.training.checkpoint import Checkpoint
from gpext.training.full_batch import BREAKDOWNS, begin_on_sample, fit_collapsed, fit_objective, has_sample
from gpext.training.initial_values import described_values, initialise_from_data, rows_of_all
from gpext.training.minibatch import (
    ObjectiveStepper,
    Rate,
    SiteStepper,
    decay,
    default_rate,
    fit_minibatches,
    hyperparameter_interval,
    steady,
)
from gpext.training.result import Callback, FitResult, FitStatus, Run
from gpext.training.site_data import SiteData
from gpext.training.subsets import begin_on_subsets, check_subsets, draw_subsets, measure_on_subset
from gpext.variational import number_of


@torch.inference_mode(False)
@torch.enable_grad()
def fit(
    mll: MarginalLogLikelihood,
    x: Tensor,
    y: Tensor,
    *,
    design: Design | None = None,
    task_indices: Tensor | None = None,
    batch_size: int | None = None,
    max_steps: int | None = None,
    learning_rate: float = 0.05,
    rate: Rate | None = None,
    tolerance: float = 1e-4,
    hyperparameters: Literal["augmented", "exact"] = "exact",
    generator: torch.Generator | None = None,
    state: dict[str, Any] | None = None,
    progress: bool = True,
    callback: Callback | None = None,
    ranks: Ranks | None = None,
    checkpoint: str | Path | None = None,
    initial: Literal["given", "data", "subset", "curvature"] = "data",
) -> FitResult:
    """Train a model and its likelihood on data, in place; the model is in eval mode afterwards.

    Where torch.distributed is initialised, every rank gives the data it holds, and all end with the same model, that of
    all the data: a site strategy's sums over data are added up over ranks, and training starts from the parameters of
    rank 0.

    The full batch of a site strategy begins with q(u) alone, which moves in closed form at the hyperparameters given:
    to that of a thousand data (or five per inducing point) in the first step, and of ten times as many in the second.
    This costs as much as five L-BFGS iterations on the thousand, and where noise is high it is often a good model
    already. What follows is learned on subsets that grow from the thousand, and does not depend on it: until they have
    grown, q(u) is that of fewer data again. Up to twice the thousand there are no subsets, and no such step.

    Minibatches of a site strategy begin likewise on a random sample of 16000 data (or 20 per inducing point): L-BFGS
    learns on subsets of it that grow from the thousand, and is left when a step gains little. q(u) becomes that of the
    sample, and minibatches of all the data follow. Their step sizes are constant for five epochs (or 100 steps) and
    then fall as 1 / step, which averages their noise out. With fewer data than the smallest subset there is no sample,
    and step sizes stay constant. Time and memory of the sample do not depend on N.

    While a LatentGP is trained on the full batch, its rule infers no more exactly than the tolerance of the objective
    asks for: KL, CAVI and EP, whose evidence errs by the square of their tolerance, to 1e-3 at most (KL to a root mean
    square of 3e-3); Laplace to 1e-6.
    The inference at the end, of which the result tells, is by the rule as it is.

    Minibatches of a LatentGP with neighbours are blocks, regions of space of at most `batch_size` data. A step infers
    one block and the data of earlier blocks near it, and costs the same for any N; neighbours are chosen anew by the
    lengthscales at the start, at the half and at the end. `tolerance` ends nothing there: all steps are taken. Of
    several ranks each has all data, and takes a block of its own at every step, of `batch_size` divided by their
    number.

    Args:
        mll: a gpytorch objective holding the likelihood and the model.
        x: inputs (N, d), (..., N, d), or (N,) for d = 1; (P, d) with a design.
        y: targets (N,), (..., N), or (N, T) for a multitask model.
        design: A (N, P), a :class:`gpext.designs.Design`, if datum i depends on (A f)_i of the values f at P inputs x:
            comparisons, sums. For site strategies; a LatentGP is made with its own. Objectives and predictions of data
            take `design(model(x))` in eval mode: in train mode gpytorch's strategies return variances alone.
        task_indices: (N,), whole numbers, if a model with gpytorch's LMCVariationalStrategy around a
            SiteVariationalStrategy has observed one task at each input; without it all of them, y (N, T).
        batch_size: None for the full batch, or the size of minibatches, over all ranks, of which each draws its share
            from what it holds; see the table in :mod:`gpext.training`.
        max_steps: maximum number of steps, those on the sample included; by default 200 L-BFGS iterations, 200
            blocks, and 50 epochs of other minibatches.
        learning_rate: of Adam at the first minibatch; a `state` brings its own.
        rate: step size rho of the closed-form update of q(u): a number, or a function of the step (0, 1, ...), e.g.
            :class:`gpext.optim.RobbinsMonro`. By default 5 r / (1 + 4 r) with r = B / N, which then
            falls as described: 1 for the full batch, at first the average over a fifth of an epoch for a small one.
        tolerance: converged when the objective per datum gains less than this in three successive L-BFGS iterations, or
            in five epochs (or 100 steps) of minibatches over the same number before, or less than the standard error of
            that difference of means.
        hyperparameters: for an AugmentedELBO, which bound trains the kernel's and the likelihood's parameters: the
            exact ELBO or the augmented one (docs/evidence/hyperparameters.md compares them). Minibatches take its
            gradients at the q(u) that the augmented bound gives; the full batch moves q(u) on the same bound, too.
        generator: source of the shuffling and of subsets, on the CPU; seeded with 0 by default.
        state: `FitResult.state_dict` of an earlier fit by minibatches, to resume it: bit for bit once minibatches have
            begun; of a fit that ended on the sample, training on the sample begins again from the parameters there.
        progress: show a bar on a terminal, or lines in the log "gpext".
        callback: called as callback(step, objective per datum) after every step, with q(u) up to date; returns True to
            stop, all ranks if one does.
        ranks: the processes that train together: by default torch.distributed's default process group, if there is
            one; `Ranks.alone()` trains each process by itself.
        checkpoint: with minibatches, a directory to write to every ten seconds, but not before the time of twenty
            writes has passed, and at the end; first after the first minibatch. If it holds a checkpoint, training
            resumes from there as if it had never stopped, so that the same call restarts a killed run. A checkpoint
            that is damaged, or of another model, other data, batch size or learning rate, is refused.
        initial: "data" initialises lengthscales that still have gpytorch's default, log 2, from the distances between
            the inputs: with many columns no two inputs are near each other at log 2, and training ends where it began;
            see :func:`gpext.training.initialise_from_data`. The message names them. "given" leaves all as it is.
            "subset" does as "data" does, and trains a LatentGP of more than 400 data on a random quarter of them first
            (of at least 150), then on a half, each to 10 times the tolerance (at least 0.001), which takes 1/64 and
            1/8 of the time of a step on all data; with neighbours on an eighth, then on about a third. All data
            follow, to the same optimum if there is one alone. Steps on subsets count, and are in the trace; whatever
            happens there, the model has its own data again. The message says how many data it began on. "curvature",
            for parameters that another training has found, moves nothing on a subset: the first of them tells the
            second derivatives there, by P + 1 gradients for up to 100 parameters and one latent function, and the
            first steps on all data are Newton's. So does "subset" where its first steps have not told them.

    Returns:
        The result, also where numbers overflow or a covariance is not positive definite: its status says how training
        has ended, and the parameters stay at the last good step. Ctrl-C ends training early, on all ranks, and still
        returns one.

    Raises:
        TypeError, ValueError: bad data or options, also those of another rank, ranks whose models or options differ, or
            an objective whose num_data is another number; nothing has changed then.
        gpext.parallel.RankError: a rank cannot be reached.

    Example:
        >>> import gpytorch, torch, gpext
        >>> class Model(gpext.models.LatentGP):
        ...     def __init__(self, x, y, likelihood):
        ...         super().__init__(x, y, likelihood)
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 6, 30, dtype=torch.float64)
        >>> y = torch.poisson((1 + torch.sin(x)).exp(), generator=torch.Generator().manual_seed(0))
        >>> model = Model(x, y, gpext.likelihoods.PoissonLikelihood()).double()
        >>> mll = gpext.mlls.LatentMarginalLogLikelihood(model.likelihood, model)
        >>> gpext.fit(mll, x, y, progress=False).status
        <FitStatus.CONVERGED: 'converged'>
    """
    check_ranks(ranks)
    ranks = Ranks() if ranks is None else ranks
    by_blocks = batch_size is not None and trains_by_blocks(mll)

    def checked() -> tuple[SiteData | None, Tensor]:
        goes_on = state is not None or checkpoint is not None
        check_options(mll, batch_size, max_steps, learning_rate, tolerance, hyperparameters, goes_on=goes_on)
        found = checked_data(mll, x, y, design, task_indices, batch_size, hyperparameters)
        if initial not in ("given", "data", "subset", "curvature"):
            raise ValueError(f"initial must be 'given', 'data', 'subset' or 'curvature'; got {initial!r}.")
        if initial in ("subset", "curvature"):
            check_subsets(mll, x, y, f"{initial=}")
        if by_blocks:
            check_blocks(mll, x, y, initial, goes_on=goes_on)
        if found[0] is None and ranks.size > 1 and not by_blocks:
            raise ValueError(
                "only models with a SiteVariationalStrategy, under an AugmentedELBO or a VariationalELBO, and a "
                "LatentGP with neighbours by minibatches, train over several ranks: give "
                "ranks=gpext.parallel.Ranks.alone() to train on each by itself."
            )
        return found

    sites, x = ranks.together(checked)
    if by_blocks:
        ranks.require_alike([x.detach().double(), y.detach().double()])
    # Tensors from which the data were computed are not trained: the first backward pass would free their graph.
    x, y = x.detach(), y.detach()
    share = number_of_inputs(x) if sites is None else number_of(sites.x)
    given = [name for name, value in (("state", state), ("checkpoint", checkpoint)) if value is not None]
    options = f"{batch_size=}", f"{max_steps=}", f"{learning_rate=}", f"{tolerance=}", f"{hyperparameters=}"
    num_data = _join(mll, ranks, share, *options, f"{given=}", f"{initial=}")
    flops = _flops(mll, x, share, batch_size)
    start = ""
    if initial in ("data", "subset"):
        rows = x if by_blocks else rows_of_all(x, ranks)
        with threads_for(flops):
            start = ranks.together(lambda: described_values(initialise_from_data(mll, rows)))
        ranks.broadcast_([*mll.parameters(), *mll.buffers()])  # features of the same rows differ by rounding
    generator = generator if generator is not None else torch.Generator().manual_seed(0)
    subsets: list[Tensor] = []
    if initial in ("subset", "curvature"):
        subsets, of_sizes = draw_subsets(mll, generator, moves=initial == "subset")
        start = "; ".join(filter(None, [start, of_sizes]))
    mll.train()
    if sites is not None and ranks.size == 1 and sites.strategy.sees_its_batch(x):
        if design is not None:
            raise ValueError(
                "the prior at an input depends on the other inputs of its batch, as after BatchNorm in train mode; "
                "such layers cannot be trained with a design: leave them out."
            )
        sites = None
    if sites is None:
        check_one_value(mll)
    with interrupts(ranks) as interrupted, threads_for(flops):
        run = Run(mll, x, max_steps, progress and ranks.rank == 0, callback, interrupted, start)
        try:
            if batch_size is None:
                if sites is None:
                    curvature = Curvature()
                    begin_on = begin_on_subsets if initial == "subset" else measure_on_subset
                    begun = begin_on(run, subsets, tolerance, curvature)
                    return fit_objective(run, x, y, tolerance, curvature, *begun)
                return fit_collapsed(
                    run,
                    sites,
                    num_data,
                    bound=hyperparameters,
                    tolerance=tolerance,
                    generator=generator,
                    ranks=ranks,
                )
            if by_blocks:
                return fit_blocks(
                    run, batch_size=batch_size, learning_rate=learning_rate, generator=generator, ranks=ranks
                )
            settings = {"batch_size": batch_size, "learning_rate": learning_rate}
            stepper: SiteStepper | ObjectiveStepper
            begin = None
            if sites is None:
                stepper = ObjectiveStepper(mll, num_data, learning_rate=learning_rate)
            else:
                begin = partial(
                    begin_on_sample,
                    run,
                    sites,
                    num_data,
                    bound=hyperparameters,
                    tolerance=tolerance,
                    generator=generator,
                    ranks=ranks,
                )
                # Few data have no sample to begin on: their hyperparameters have all the way to go.
                per_epoch = num_data // min(batch_size, num_data)
                slowing = partial(decay, per_epoch=per_epoch) if has_sample(sites, num_data) else steady
                full_rate = default_rate(min(1.0, batch_size / num_data))
                rate = rate if rate is not None else lambda step: full_rate * slowing(step)
                stepper = SiteStepper(
                    mll,
                    sites.strategy,
                    sites.likelihood,
                    num_data,
                    rate=rate,
                    learning_rate=learning_rate,
                    bound=sites.bound,
                    gradient=hyperparameters,
                    interval=hyperparameter_interval(batch_size, num_data),
                    decay=slowing,
                    share=share,
                    ranks=ranks,
                )
            data = (x, y) if sites is None else sites.tensors
            return fit_minibatches(
                run,
                stepper,
                x if sites is None else sites.x,
                y if sites is None else sites.y,
                batch_size=batch_size,
                tolerance=tolerance,
                generator=generator,
                state=state,
                checkpoint=None if checkpoint is None else Checkpoint(checkpoint, mll, ranks, data, settings),
                begin=begin,
            )
        except KeyboardInterrupt:
            return run.finish(FitStatus.INTERRUPTED)
        except BREAKDOWNS as error:
            return run.finish(FitStatus.BREAKDOWN, str(error))


def _join(mll: MarginalLogLikelihood, ranks: Ranks, share: int, *options: str) -> int:
    """Return N, the number of data of all ranks, once they agree and have the parameters and buffers of rank 0.

    Raises:
        ValueError: they do not agree, or an objective has another number of data; nothing has changed then.
    """
    num_data = share
    if ranks.size > 1:
        ranks.require_same("model", *described(mll))
        ranks.require_same("options", *options)
        number = torch.tensor(float(share), dtype=torch.float64, device=next(mll.parameters()).device)
        num_data = int(ranks.sum(lambda: [number], [number])[0])
    ranks.together(lambda: check_number(mll, share, num_data))
    ranks.broadcast_([*mll.parameters(), *mll.buffers()])
    return num_data


def _flops(mll: MarginalLogLikelihood, x: Tensor, num_data: int, batch_size: int | None) -> float:
    """Return the flops of the largest factor of a step: of the data, or of M inducing points with as many rows.

    The quadrature of a datum counts like 50 inducing points.
    """
    rows = num_data if batch_size is None else min(batch_size, num_data)
    shells = IndependentMultitaskVariationalStrategy | LMCVariationalStrategy  # their base strategy has the points
    strategies = [part for part in mll.modules() if isinstance(part, _VariationalStrategy)]
    ranks = [part.inducing_points.size(-2) for part in strategies if not isinstance(part, shells)]
    rank = max([50, *ranks]) if ranks else rows
    return factor_flops(rank, rows=max(rows, rank), number=x.shape[:-2].numel())
