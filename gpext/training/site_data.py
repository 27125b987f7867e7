"""The site strategy that an objective trains in closed form, and the data as that strategy takes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpytorch.mlls import MarginalLogLikelihood, VariationalELBO
from gpytorch.variational import IndependentMultitaskVariationalStrategy, LMCVariationalStrategy
from torch import Tensor

from gpext.designs import Design
from gpext.inference import LikelihoodTerm
from gpext.likelihoods import LatentLikelihood, LinearMixing
from gpext.mlls import AugmentedELBO
from gpext.variational import (
    DesignInputs,
    Inputs,
    SiteVariationalStrategy,
    check_batch,
    check_columns,
    check_dtype,
    take_inputs,
)


@dataclass(frozen=True)
class SiteData:
    """A site strategy and its data, outside the graph."""

    strategy: SiteVariationalStrategy
    likelihood: LatentLikelihood
    bound: LikelihoodTerm  # whose sites
    x: Inputs  # (..., N, d), or those of a design
    y: Tensor  # (..., N), or what the likelihood takes

    @property
    def tensors(self) -> list[Tensor]:
        """The numbers that the data consist of."""
        if isinstance(self.x, DesignInputs):
            design = self.x.design
            return [self.x.x, design.rows, design.columns, design.weights, self.y]
        return [self.x, self.y]

    def take(self, index: Tensor | slice) -> SiteData:
        """Return the data at `index`."""
        return replace(self, x=take_inputs(self.x, index), y=self.likelihood.take(self.y, index))


def has_sites(mll: MarginalLogLikelihood) -> bool:
    """Return whether a site strategy is to be trained in closed form."""
    return _base_strategy(mll) is not None


def site_data(
    mll: MarginalLogLikelihood, x: Tensor, y: Tensor, design: Design | None, task_indices: Tensor | None
) -> SiteData | None:
    """Return the data as the site strategy takes them that is to be trained in closed form, or None without one.

    Args:
        mll: the objective.
        x: inputs (..., N, d), or (..., P, d) with a design.
        y: targets (..., N), or (N, T) for a multitask model.
        design: A (N, P), or None.
        task_indices: of the data of an LMC (N,), if one task was observed at each input.

    Raises:
        TypeError, ValueError: the model or the likelihood cannot take the data.
    """
    strategy = _base_strategy(mll)
    if strategy is None:
        return None
    check_dtype(x, strategy.inducing_points)
    check_columns(x, strategy.inducing_points)
    shell, likelihood = mll.model.variational_strategy, mll.likelihood
    if isinstance(shell, LMCVariationalStrategy):
        likelihood = LinearMixing(likelihood, shell.lmc_coefficients, task_indices, jitter=shell.jitter_val)
        y = likelihood.join(y)
    elif task_indices is not None:
        raise ValueError("task_indices are of a model with gpytorch's LMCVariationalStrategy; this one has none.")
    elif isinstance(shell, IndependentMultitaskVariationalStrategy) and likelihood.num_latents is None:
        y = y.mT  # else its tasks are the latents of a datum
    strategy.check_latents(likelihood)
    x, y = x.detach(), y.detach()
    likelihood.check(y)
    inputs = x if design is None else DesignInputs(x, design)
    check_batch(inputs, likelihood.datum_shape(y))
    bound: LikelihoodTerm = "augmented" if isinstance(mll, AugmentedELBO) else "exact"
    return SiteData(strategy, likelihood, bound, inputs, y)


def _base_strategy(mll: MarginalLogLikelihood) -> SiteVariationalStrategy | None:
    """Return the site strategy to train, if there is one.

    That of an LMC is trained on the exact ELBO: an augmented bound is that of each task by itself.
    """
    exact = type(mll) is VariationalELBO and isinstance(mll.likelihood, LatentLikelihood)
    if not (isinstance(mll, AugmentedELBO) or exact) or mll.beta != 1:
        return None
    strategy = mll.model.variational_strategy
    mixes = (
        isinstance(strategy, LMCVariationalStrategy)
        and exact
        and mll.likelihood.num_latents is None
        and strategy.lmc_coefficients.dim() == 2
    )
    if isinstance(strategy, IndependentMultitaskVariationalStrategy) or mixes:
        strategy = strategy.base_variational_strategy
    return strategy if isinstance(strategy, SiteVariationalStrategy) else None
