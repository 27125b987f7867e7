"""Distributions with what approximate inference asks of them, as torch (and Pyro, where installed) distributions."""

from gpext.distributions.batch_mixture import BatchMixture
from gpext.distributions.compound import AdditiveNoisePredictive, CompoundDistribution
from gpext.distributions.matern32 import Matern32
from gpext.distributions.mixture import Mixture
from gpext.distributions.radial_noise import RadialNoise, log_normalizer
from gpext.distributions.with_cdf import Bernoulli, NegativeBinomial, Poisson, StudentT, with_cdf

__all__ = [
    "AdditiveNoisePredictive",
    "BatchMixture",
    "Bernoulli",
    "CompoundDistribution",
    "Matern32",
    "Mixture",
    "NegativeBinomial",
    "Poisson",
    "RadialNoise",
    "StudentT",
    "log_normalizer",
    "with_cdf",
]
