"""Condition a Gaussian process prior on Gaussian sites."""

from gpext.posteriors.dense import DensePosterior, condition_dense
from gpext.posteriors.fixed_sites import FixedSites
from gpext.posteriors.inducing import (
    InducingPosterior,
    back_substitute,
    condition_inducing,
    cross_gradient,
    factor_gradient,
    factorise,
    inducing_gradient,
    project,
)

__all__ = [
    "DensePosterior",
    "FixedSites",
    "InducingPosterior",
    "back_substitute",
    "condition_dense",
    "condition_inducing",
    "cross_gradient",
    "factor_gradient",
    "factorise",
    "inducing_gradient",
    "project",
]
