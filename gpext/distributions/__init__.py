"""Distributions for approximate inference, as torch (and, if it is installed, Pyro) distributions."""

from gpext.distributions.categorical import Categorical, CompoundCategorical, OrderedCategorical
from gpext.distributions.circular.compound_von_mises import CompoundVonMises
from gpext.distributions.circular.distribution import Arc, CircularDistribution
from gpext.distributions.circular.von_mises import VonMises
from gpext.distributions.independent import Independent
from gpext.distributions.laplace_inversion.radial_transform import InversionError, RadialTransform
from gpext.distributions.laplace_inversion.scale_mixture import ScaleMixture
from gpext.distributions.mixing.gamma import Gamma
from gpext.distributions.mixing.generalized_inverse_gaussian import GeneralizedInverseGaussian
from gpext.distributions.mixing.inverse_gaussian import InverseGaussian
from gpext.distributions.mixing.polya_gamma import PolyaGamma
from gpext.distributions.mixing.scaled import Scaled
from gpext.distributions.noise.matern32 import Matern32
from gpext.distributions.noise.radial_noise import RadialNoise, log_normalizer
from gpext.distributions.positive import PositiveDistribution
from gpext.distributions.predictive.batch_mixture import BatchMixture
from gpext.distributions.predictive.compound import AdditiveNoisePredictive, CompoundDistribution
from gpext.distributions.predictive.compound_beta import CompoundBeta
from gpext.distributions.predictive.compound_dirichlet import CompoundDirichlet
from gpext.distributions.predictive.compound_joint import CompoundJointDistribution
from gpext.distributions.predictive.compound_location_scale import CompoundLocationScale
from gpext.distributions.predictive.compound_multinomial import CompoundMultinomial
from gpext.distributions.predictive.latent_mixture import LatentMixture
from gpext.distributions.predictive.latent_normal import LatentNormal, MultitaskLatentNormal
from gpext.distributions.predictive.mixture import Mixture
from gpext.distributions.predictive.normal_plus_laplace import CompoundLaplace
from gpext.distributions.predictive.normal_plus_student_t import CompoundStudentT
from gpext.distributions.predictive.simplex_region import SimplexRegion
from gpext.distributions.survival_times import GeneralizedPareto, LogLogistic
from gpext.distributions.tails import log_cdf, log_interval, log_survival, log_tail
from gpext.distributions.truncated import Truncated, ZeroInflated
from gpext.distributions.tweedie import Tweedie
from gpext.distributions.with_cdf import Bernoulli, Beta, NegativeBinomial, Poisson, StudentT, with_cdf

__all__ = [
    "AdditiveNoisePredictive",
    "Arc",
    "BatchMixture",
    "Bernoulli",
    "Beta",
    "Categorical",
    "CircularDistribution",
    "CompoundBeta",
    "CompoundCategorical",
    "CompoundDirichlet",
    "CompoundDistribution",
    "CompoundJointDistribution",
    "CompoundLaplace",
    "CompoundLocationScale",
    "CompoundMultinomial",
    "CompoundStudentT",
    "CompoundVonMises",
    "Gamma",
    "GeneralizedInverseGaussian",
    "GeneralizedPareto",
    "Independent",
    "InverseGaussian",
    "InversionError",
    "LatentMixture",
    "LatentNormal",
    "LogLogistic",
    "Matern32",
    "Mixture",
    "MultitaskLatentNormal",
    "NegativeBinomial",
    "OrderedCategorical",
    "Poisson",
    "PolyaGamma",
    "PositiveDistribution",
    "RadialNoise",
    "RadialTransform",
    "ScaleMixture",
    "Scaled",
    "SimplexRegion",
    "StudentT",
    "Truncated",
    "Tweedie",
    "VonMises",
    "ZeroInflated",
    "log_cdf",
    "log_interval",
    "log_normalizer",
    "log_survival",
    "log_tail",
    "with_cdf",
]
