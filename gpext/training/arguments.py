"""Checks of the arguments of `gpext.fit`, before anything changes."""

from __future__ import annotations

import math
from typing import Any

from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood
from gpytorch.variational import (
    IndependentMultitaskVariationalStrategy,
    LMCVariationalStrategy,
    TrilNaturalVariationalDistribution,
)
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gpext.checks import check_finite, check_tensor, whole_number_or_none
from gpext.designs import Design
from gpext.likelihoods import LatentLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models import LatentGP
from gpext.training.site_data import SiteData, has_sites, site_data


def check_options(
    mll: MarginalLogLikelihood,
    batch_size: int | None,
    max_steps: int | None,
    learning_rate: float,
    tolerance: float,
    hyperparameters: str,
    *,
    goes_on: bool,
) -> None:
    """Raise for options that the objective cannot take.

    Raises:
        TypeError, ValueError: they are described.
    """
    if not isinstance(mll, MarginalLogLikelihood):
        raise TypeError(
            "expected an objective of gpytorch or of gpext.mlls, such as AugmentedELBO(likelihood, model, num_data); "
            f"got {type(mll).__qualname__}."
        )
    for name, count in (("batch_size", batch_size), ("max_steps", max_steps)):
        whole_number_or_none(name, count, 1)
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"learning_rate must be positive and finite; got {learning_rate}.")
    if math.isnan(tolerance):
        raise ValueError("tolerance must be a number; got nan. A negative one never counts as converged.")
    whole = isinstance(mll, ExactMarginalLogLikelihood) or (
        isinstance(mll, LatentMarginalLogLikelihood) and mll.model.variational_strategy.neighbours is None
    )
    if batch_size is not None and whole:
        raise ValueError(
            f"a {type(mll).__qualname__} takes all data at once: leave out the batch_size. Minibatches want an "
            "ApproximateGP, with a gpext.variational.SiteVariationalStrategy say, or a LatentGP with neighbours."
        )
    if batch_size is None and goes_on:
        raise ValueError("state and checkpoint resume training by minibatches: give the batch_size as well.")
    if hyperparameters not in ("augmented", "exact"):
        raise ValueError(f"hyperparameters must be 'augmented' or 'exact'; got {hyperparameters!r}.")
    if isinstance(mll.model, LatentGP) and not isinstance(mll, LatentMarginalLogLikelihood):
        raise TypeError(
            f"a LatentGP has no q(u) to train by {type(mll).__qualname__}: its objective is "
            "gpext.mlls.LatentMarginalLogLikelihood(likelihood, model)."
        )
    if batch_size is None and any(isinstance(m, TrilNaturalVariationalDistribution) for m in mll.modules()):
        raise ValueError(
            "L-BFGS cannot follow the natural gradients of a TrilNaturalVariationalDistribution: use a "
            "NaturalVariationalDistribution or a CholeskyVariationalDistribution, or give a batch_size."
        )


def checked_data(
    mll: MarginalLogLikelihood,
    x: Tensor,
    y: Tensor,
    design: Design | None,
    task_indices: Tensor | None,
    batch_size: int | None,
    hyperparameters: str,
) -> tuple[SiteData | None, Tensor]:
    """Return the data as a site strategy takes them, if it is to be trained, and the inputs as others do.

    Raises:
        TypeError, ValueError: bad data, or a design that is not served, before anything changes.
    """
    own = mll.model.design if isinstance(mll.model, LatentGP) else None
    if isinstance(mll.model, LatentGP) and design not in (None, own):
        raise ValueError(
            "a LatentGP is trained with the design that it was made with: leave the design out, or replace it by "
            "model.set_train_data(inputs, targets, strict=False, design=...)."
        )
    _check_data(mll.likelihood, x, y, own if design is None else design)
    if x.dim() == 1 and (batch_size is not None or has_sites(mll)):
        x = x.unsqueeze(-1)  # as gpytorch's models do; an ExactGP requires its own training inputs
    sites = site_data(mll, x, y, design, task_indices)
    if sites is None and design is not None and own is None:
        raise ValueError(
            "a design is served with a gpext.variational.SiteVariationalStrategy, under an AugmentedELBO or a "
            "VariationalELBO with a likelihood of gpext and beta = 1, and by a gpext.models.LatentGP(..., design=...)."
        )
    if sites is None and task_indices is not None:
        raise ValueError(
            "task_indices are served with gpytorch's LMCVariationalStrategy around a gpext.variational."
            "SiteVariationalStrategy, under a VariationalELBO with a likelihood of gpext and beta = 1."
        )
    if sites is not None and sites.bound == "exact" and hyperparameters != "exact":
        raise ValueError("a VariationalELBO is the exact ELBO: for hyperparameters='augmented' take an AugmentedELBO.")
    return sites, x


def check_number(mll: MarginalLogLikelihood, share: int, num_data: int) -> None:
    """Raise for an objective that weighs the data against KL(q(u) || p(u)) as if there were more, or fewer."""
    for part in mll.modules():
        if isinstance(part, _ApproximateMarginalLogLikelihood) and part.num_data not in (share, num_data):
            here = f", {share} of them here" if share != num_data else ""
            raise ValueError(
                f"the objective has num_data = {part.num_data}, and there are {num_data} data{here}. Make it with "
                "num_data=len(train_y); beta weighs the divergence otherwise."
            )


def check_one_value(mll: MarginalLogLikelihood) -> None:
    """Raise for an objective with an entry for each latent of a datum: their sum would count each datum repeatedly."""
    latents = mll.likelihood.num_latents if isinstance(mll.likelihood, LatentLikelihood) else None
    if latents in (None, 1) or not isinstance(mll, _ApproximateMarginalLogLikelihood):
        return
    strategy = mll.model.variational_strategy
    if not isinstance(strategy, IndependentMultitaskVariationalStrategy | LMCVariationalStrategy):
        name = type(mll).__qualname__
        raise ValueError(
            f"{type(mll.likelihood).__qualname__} has num_latents = {latents}, and {name} by itself does not add their "
            f"KL(q(u) || p(u)) up. Wrap the model's strategy: gpytorch.variational."
            f"IndependentMultitaskVariationalStrategy({type(strategy).__qualname__}(...), num_tasks={latents})."
        )


def number_of_inputs(x: Tensor) -> int:
    """Return the number of inputs (..., N, d) or (N,)."""
    return x.size(-2) if x.dim() > 1 else len(x)


def _check_data(likelihood: Any, x: Tensor, y: Tensor, design: Design | None) -> None:
    if isinstance(x, DataLoader | Dataset):
        raise TypeError(
            f"fit takes tensors of inputs and targets; got a {type(x).__name__}. Stack it, x, y = dataset[:] of a "
            "TensorDataset, or call SiteVariationalStrategy.update(x, y, likelihood, rate, num_data) batch by batch."
        )
    check_tensor("inputs", x)
    check_tensor("targets", y)
    if x.dim() < 1 or y.dim() < 1 or y.numel() == 0:
        raise ValueError(
            f"expected inputs (..., N, d) and targets (..., N); got {tuple(x.shape)} and {tuple(y.shape)}."
        )
    num_data = number_of_inputs(x) if design is None else design.num_data
    data = likelihood.datum_shape(y) if isinstance(likelihood, LatentLikelihood) else y.shape
    if data and num_data not in (data[-1], data[0]):  # the tasks of a multitask model come last
        raise ValueError(f"inputs and targets must be equally many; got {tuple(x.shape)} and {tuple(y.shape)}.")
    check_finite("inputs", x)
    if not isinstance(likelihood, LatentLikelihood):  # whose own check allows some to be infinite
        check_finite("targets", y)
