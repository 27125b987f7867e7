"""Condition a Gaussian process prior on Gaussian sites."""

from gpext.linalg.square_root import SquareRoot
from gpext.linalg.symmetric_products import lower_blocks, symmetric_matrix
from gpext.posteriors.block import BlockPosterior, condition_blocks
from gpext.posteriors.coupled import CoupledPosterior, condition_coupled
from gpext.posteriors.dense import DensePosterior, condition_dense
from gpext.posteriors.dense_prior import DensePrior
from gpext.posteriors.design_prior import DesignPrior, predict_latent
from gpext.posteriors.fast_covariance import fast_covariance
from gpext.posteriors.fixed_sites import FixedSites
from gpext.posteriors.inducing import (
    InducingPosterior,
    back_substitute,
    condition_inducing,
    factor_gradient,
    factorise,
    forward_solve,
    prior_gradients,
    project,
    squared_norms,
)
from gpext.posteriors.joint import JointPosterior, precision_blocks
from gpext.posteriors.low_rank import LowRankPosterior, LowRankPrior, condition_low_rank
from gpext.posteriors.low_rank_joint import LowRankJointPosterior, condition_low_rank_joint
from gpext.posteriors.matrix_free import MatrixFreePosterior, condition_matrix_free
from gpext.posteriors.neighbour import NeighbourPosterior, NeighbourPrior, condition_neighbours
from gpext.posteriors.neighbour_joint import NeighbourJointPosterior, condition_neighbours_joint
from gpext.posteriors.rough import RoughPosterior, condition_roughly

Posterior = DensePosterior | LowRankPosterior | NeighbourPosterior
Prior = DensePrior | LowRankPrior | DesignPrior | NeighbourPrior

__all__ = [
    "BlockPosterior",
    "CoupledPosterior",
    "DensePosterior",
    "DensePrior",
    "DesignPrior",
    "FixedSites",
    "InducingPosterior",
    "JointPosterior",
    "LowRankJointPosterior",
    "LowRankPosterior",
    "LowRankPrior",
    "MatrixFreePosterior",
    "NeighbourJointPosterior",
    "NeighbourPosterior",
    "NeighbourPrior",
    "Posterior",
    "Prior",
    "RoughPosterior",
    "SquareRoot",
    "back_substitute",
    "condition_blocks",
    "condition_coupled",
    "condition_dense",
    "condition_inducing",
    "condition_low_rank",
    "condition_low_rank_joint",
    "condition_matrix_free",
    "condition_neighbours",
    "condition_neighbours_joint",
    "condition_roughly",
    "factor_gradient",
    "factorise",
    "fast_covariance",
    "forward_solve",
    "lower_blocks",
    "precision_blocks",
    "predict_latent",
    "prior_gradients",
    "project",
    "squared_norms",
    "symmetric_matrix",
]
