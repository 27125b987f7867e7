"""The site strategy that an objective trains in closed form, and the data as that strategy takes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpytorch.mlls import MarginalLogLikelihood, VariationalELBO
from gpytorch.variational import IndependentMultitaskVariationalStrategy
from torch import Tensor

from gpext.designs import Design
from gpext.inference import LikelihoodTerm
from gpext.likelihoods import LatentLikelihood
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
    return _site_strategy(mll) is not None


def site_data(mll: MarginalLogLikelihood, x: Tensor, y: Tensor, design: Design | None) -> SiteData | None:
    """Return the data as the site strategy takes them that is to be trained in closed form, or None without one.

    Args:
        mll: the objective.
        x: inputs (..., N, d), or (..., P, d) with a design.
        y: targets (..., N), or (N, T) for a multitask model.
        design: A (N, P), or None.

    Raises:
        TypeError, ValueError: the model or the likelihood cannot take the data.
    """
    found = _site_strategy(mll)
    if found is None:
        return None
    strategy, multitask = found
    check_dtype(x, strategy.inducing_points)
    check_columns(x, strategy.inducing_points)
    strategy.check_latents(mll.likelihood)
    x, y = x.detach(), y.detach()
    y = y.mT if multitask else y
    mll.likelihood.check(y)
    inputs = x if design is None else DesignInputs(x, design)
    check_batch(inputs, mll.likelihood.datum_shape(y))
    bound: LikelihoodTerm = "augmented" if isinstance(mll, AugmentedELBO) else "exact"
    return SiteData(strategy, mll.likelihood, bound, inputs, y)


def _site_strategy(mll: MarginalLogLikelihood) -> tuple[SiteVariationalStrategy, bool] | None:
    """Return the site strategy to train, if there is one, and whether it models several tasks."""
    exact = type(mll) is VariationalELBO and isinstance(mll.likelihood, LatentLikelihood)
    if not (isinstance(mll, AugmentedELBO) or exact) or mll.beta != 1:
        return None
    strategy = mll.model.variational_strategy
    together = isinstance(strategy, IndependentMultitaskVariationalStrategy)
    if together:
        strategy = strategy.base_variational_strategy
    if not isinstance(strategy, SiteVariationalStrategy):
        return None
    return strategy, together and mll.likelihood.num_latents is None  # else its tasks are the latents of a datum
