"""Draws from posteriors: of latent values and of hyperparameters."""

from gpext.samplers.augmented_sgld import AugmentedSGLDSampler
from gpext.samplers.gibbs import GibbsSampler
from gpext.samplers.hyperposterior import HyperPosterior
from gpext.samplers.latent_draws import GibbsDraws
from gpext.samplers.metropolis import MetropolisHastings
from gpext.samplers.sgld import SGLDSampler
from gpext.samplers.status import SamplingStatus
from gpext.samplers.targets.log_posterior import LogPosterior

__all__ = [
    "AugmentedSGLDSampler",
    "GibbsDraws",
    "GibbsSampler",
    "HyperPosterior",
    "LogPosterior",
    "MetropolisHastings",
    "SGLDSampler",
    "SamplingStatus",
]
