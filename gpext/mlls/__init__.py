"""Objectives: gpytorch marginal log likelihoods."""

from gpext.mlls.augmented_elbo import AugmentedELBO
from gpext.mlls.latent_marginal_log_likelihood import LatentMarginalLogLikelihood

__all__ = ["AugmentedELBO", "LatentMarginalLogLikelihood"]
