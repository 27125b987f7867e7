"""Variational strategies for gpytorch's ApproximateGP, and the bounds that eliminate their q(u)."""

from gpext.variational.batch_checks import check_batch, check_columns, check_dtype
from gpext.variational.collapsed_bound import CollapsedBound
from gpext.variational.design_inputs import DesignInputs, Inputs, number_of, places, take_inputs
from gpext.variational.inducing_points import greedy_inducing_points, kmeans_inducing_points
from gpext.variational.latent_variational_strategy import LatentVariationalStrategy
from gpext.variational.natural_step import UpdateOptions
from gpext.variational.prior_blocks import FactorCache, Prepared
from gpext.variational.site_variational_strategy import SiteVariationalStrategy

__all__ = [
    "CollapsedBound",
    "DesignInputs",
    "FactorCache",
    "Inputs",
    "LatentVariationalStrategy",
    "Prepared",
    "SiteVariationalStrategy",
    "UpdateOptions",
    "check_batch",
    "check_columns",
    "check_dtype",
    "greedy_inducing_points",
    "kmeans_inducing_points",
    "number_of",
    "places",
    "take_inputs",
]
