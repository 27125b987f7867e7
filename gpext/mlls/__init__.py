"""Objectives: gpytorch marginal log likelihoods."""

from gpext.mlls.augmented_elbo import AugmentedELBO

__all__ = ["AugmentedELBO"]
