"""Likelihoods p(y | f): gpytorch `Likelihood` subclasses, one family a file."""

from gpext.likelihoods.bayesian_svm import BayesianSVMLikelihood
from gpext.likelihoods.bernoulli_logit import BernoulliLogitLikelihood
from gpext.likelihoods.beta import BetaLikelihood
from gpext.likelihoods.censored import Censored
from gpext.likelihoods.composed import ComposedLikelihood
from gpext.likelihoods.dirichlet import DirichletLikelihood
from gpext.likelihoods.exponential_family import ExponentialFamilyLikelihood
from gpext.likelihoods.gamma import GammaLikelihood
from gpext.likelihoods.generalized_pareto import GeneralizedParetoLikelihood
from gpext.likelihoods.heteroscedastic import (
    HeteroscedasticGaussianLikelihood,
    HeteroscedasticStudentTLikelihood,
)
from gpext.likelihoods.joint import JointLikelihood
from gpext.likelihoods.laplace import LaplaceLikelihood
from gpext.likelihoods.latent import LatentLikelihood
from gpext.likelihoods.linear_mixing import LinearMixing
from gpext.likelihoods.log_logistic import LogLogisticLikelihood
from gpext.likelihoods.log_normal import LogNormalLikelihood
from gpext.likelihoods.matern32 import Matern32Likelihood
from gpext.likelihoods.mixed import MixedLikelihood
from gpext.likelihoods.multinomial import MultinomialLogitLikelihood
from gpext.likelihoods.multivariate_poisson import MultivariatePoissonLikelihood
from gpext.likelihoods.negative_binomial_log import NegativeBinomialLogLikelihood
from gpext.likelihoods.negative_binomial_logit import NegativeBinomialLogitLikelihood
from gpext.likelihoods.noise_floor import NoiseFloor
from gpext.likelihoods.offset import Offset
from gpext.likelihoods.ordinal import OrdinalLogitLikelihood, OrdinalProbitLikelihood
from gpext.likelihoods.pairwise import PairwiseLogitLikelihood, PairwiseProbitLikelihood
from gpext.likelihoods.poisson import PoissonLikelihood
from gpext.likelihoods.stick_breaking import StickBreakingLikelihood
from gpext.likelihoods.student_t import StudentTLikelihood
from gpext.likelihoods.super_gaussian import AugmentedLikelihood, SuperGaussianLikelihood
from gpext.likelihoods.truncated import Truncated
from gpext.likelihoods.tweedie import TweedieLikelihood
from gpext.likelihoods.von_mises import VonMisesLikelihood
from gpext.likelihoods.weibull import WeibullLikelihood
from gpext.likelihoods.weighted import Weighted
from gpext.likelihoods.zero_inflated import Hurdle, ZeroInflated

__all__ = [
    "AugmentedLikelihood",
    "BayesianSVMLikelihood",
    "BernoulliLogitLikelihood",
    "BetaLikelihood",
    "Censored",
    "ComposedLikelihood",
    "DirichletLikelihood",
    "ExponentialFamilyLikelihood",
    "GammaLikelihood",
    "GeneralizedParetoLikelihood",
    "HeteroscedasticGaussianLikelihood",
    "HeteroscedasticStudentTLikelihood",
    "Hurdle",
    "JointLikelihood",
    "LaplaceLikelihood",
    "LatentLikelihood",
    "LinearMixing",
    "LogLogisticLikelihood",
    "LogNormalLikelihood",
    "Matern32Likelihood",
    "MixedLikelihood",
    "MultinomialLogitLikelihood",
    "MultivariatePoissonLikelihood",
    "NegativeBinomialLogLikelihood",
    "NegativeBinomialLogitLikelihood",
    "NoiseFloor",
    "Offset",
    "OrdinalLogitLikelihood",
    "OrdinalProbitLikelihood",
    "PairwiseLogitLikelihood",
    "PairwiseProbitLikelihood",
    "PoissonLikelihood",
    "StickBreakingLikelihood",
    "StudentTLikelihood",
    "SuperGaussianLikelihood",
    "Truncated",
    "TweedieLikelihood",
    "VonMisesLikelihood",
    "WeibullLikelihood",
    "Weighted",
    "ZeroInflated",
]
