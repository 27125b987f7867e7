"""Draws from posteriors: exact Gibbs sampling of augmented models, with hyperparameters."""

from gpext.samplers.draws import GibbsDraws, SamplingStatus
from gpext.samplers.gibbs import GibbsSampler

__all__ = ["GibbsDraws", "GibbsSampler", "SamplingStatus"]
