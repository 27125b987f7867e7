"""Objectives: gpytorch marginal log likelihoods."""

from gpext.mlls.augmented_elbo import AugmentedELBO
from gpext.mlls.latent_marginal_log_likelihood import LatentMarginalLogLikelihood
from gpext.mlls.unbiased_marginal_log_likelihood import UnbiasedMarginalLogLikelihood

__all__ = ["AugmentedELBO", "LatentMarginalLogLikelihood", "UnbiasedMarginalLogLikelihood"]
