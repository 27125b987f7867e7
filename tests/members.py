"""The likelihoods for which every law is tested, each with an independent density, targets in its support and p(w)."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import gpytorch
import mpmath
import numpy as np
import torch
from scipy import special, stats

from gpext import likelihoods

F64 = torch.float64


def tensor(*values):
    return torch.tensor(values, dtype=F64)


class PowerPhi(torch.nn.Module):
    """(1 + r)^-(1 + a), a learnable phi that can be pickled."""

    def __init__(self):
        super().__init__()
        self.raw_power = torch.nn.Parameter(torch.tensor(0.3))

    @property
    def power(self):
        return 1 + torch.nn.functional.softplus(self.raw_power)

    def forward(self, r):
        return (1 + r) ** -self.power


def pseudo_huber_phi(r):
    return torch.exp(1 - torch.sqrt(1 + r))


def log_sech(r):
    c = torch.sqrt(r)
    return -(c + torch.log1p(torch.exp(-2 * c)) - math.log(2))


def zero(y):
    return torch.zeros_like(y)


def quarter(y):
    return torch.full_like(y, 0.25)


def half_sign(y):
    return y - 0.5


def minus_log_2(y):
    return torch.full_like(y, -math.log(2))


def bernoulli(f):
    return torch.distributions.Bernoulli(logits=f)


POWER = 1 + math.log1p(math.exp(np.float32(0.3)))
STUDENT = (4.5, 0.3)  # degrees of freedom, squared scale
LAPLACE_NOISE, MATERN_NOISE, TOTAL_COUNT, DISPERSION = 0.4, 0.7, 2.3, 0.6


def student_t(kind=likelihoods.StudentTLikelihood, **kwargs):
    likelihood = kind(**kwargs).double()
    likelihood.deg_free, likelihood.noise = tensor(*STUDENT)  # gpytorch rounds a float to float32
    return likelihood


def laplace(kind=likelihoods.LaplaceLikelihood, **kwargs):
    likelihood = kind(**kwargs).double()
    likelihood.noise = tensor(LAPLACE_NOISE)
    return likelihood


def matern32(**kwargs):
    likelihood = likelihoods.Matern32Likelihood(**kwargs).double()
    likelihood.noise = MATERN_NOISE
    return likelihood


def negative_binomial(**kwargs):
    likelihood = likelihoods.NegativeBinomialLogitLikelihood(**kwargs).double()
    likelihood.total_count = TOTAL_COUNT
    return likelihood


def negative_binomial_log(**kwargs):
    likelihood = likelihoods.NegativeBinomialLogLikelihood(**kwargs).double()
    likelihood.dispersion = tensor(DISPERSION)
    return likelihood


def pseudo_huber():
    return likelihoods.SuperGaussianLikelihood(pseudo_huber_phi).double()


def learnable():
    return likelihoods.SuperGaussianLikelihood(PowerPhi()).double()


def logit_by_hand():
    return likelihoods.SuperGaussianLikelihood(
        log_phi=log_sech,
        potential=half_sign,
        alpha=zero,
        beta=zero,
        gamma=quarter,
        log_constant=minus_log_2,
        conditional=bernoulli,
    ).double()


def levy(w, y):
    return np.exp(-0.25 / w) / (2 * math.sqrt(math.pi) * w**1.5)


def polya_gamma(w, count):
    """The density of 2 PG(count, 0) by its series [Polson, Scott & Windle 2013], in 40 digits."""
    with mpmath.workdps(40):
        b, x = mpmath.mpf(count), mpmath.mpf(w) / 2
        total = 0
        for n in range(400):
            a = 2 * n + b
            log_size = mpmath.loggamma(n + b) - mpmath.loggamma(n + 1) - a**2 / (8 * x)
            term = (-1) ** n * a * mpmath.exp(log_size)
            total += term
            if n > 3 and abs(term) < mpmath.mpf(10) ** -38:
                break
        value = total * 2 ** (b - 1) / mpmath.gamma(b) / mpmath.sqrt(2 * mpmath.pi * x**3)
        return float(value) / 2


def inverted(phi):
    """The density whose Laplace transform is phi, by numerical inversion."""
    return lambda w, y: float(mpmath.invertlaplace(phi, w, method="talbot"))


@dataclass(frozen=True)
class Member:
    """One likelihood in float64 at parameters that are not the defaults."""

    make: Callable  # () -> likelihood
    support: str  # "real", "binary", "count"
    log_density: Callable  # (y, f) floats -> log p(y | f), from scipy, sharing no code with gpext
    mixing: Callable  # (w, y) -> p(w), of phi's own w
    log_w_range: tuple = (-40.0, 90.0, 0.05)  # where p(w) has mass, and the step that resolves it
    vectorised: bool = True
    reach: float = 50.0  # log |y - f| up to which phi((y - f)^2) does not underflow

    def targets(self, *shape, seed=0):
        """Targets in the support, (*shape), float64."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(*shape, generator=generator, dtype=F64)
        if self.support == "real":
            return 1.5 * noise
        if self.support == "binary":
            return (noise > 0).to(F64)
        return (3 * noise.abs()).floor()

    @functools.cached_property
    def likelihood(self):
        return self.make().requires_grad_(False)

    def __hash__(self):
        return id(self)


def _bernoulli(y, f):
    return float(special.log_expit((2 * y - 1) * f))


def _negative_binomial(y, f):
    return _negative_binomial_of(TOTAL_COUNT, y, f)


def _negative_binomial_of(r, y, logit):
    binomial = special.gammaln(y + r) - special.gammaln(r) - special.gammaln(y + 1)
    return float(binomial + y * special.log_expit(logit) + r * special.log_expit(-logit))


def _negative_binomial_log(y, f):
    return _negative_binomial_of(1 / DISPERSION, y, f + math.log(DISPERSION))


MEMBERS = {
    "student_t": Member(
        student_t,
        "real",
        lambda y, f: stats.t.logpdf(y, STUDENT[0], f, math.sqrt(STUDENT[1])),
        lambda w, y: stats.gamma.pdf(w, (STUDENT[0] + 1) / 2, scale=1 / STUDENT[0]),
    ),
    "laplace": Member(
        laplace,
        "real",
        lambda y, f: stats.laplace.logpdf(y, f, math.sqrt(LAPLACE_NOISE)),
        levy,
    ),
    "matern32": Member(
        matern32,
        "real",
        lambda y, f: (
            math.log(math.sqrt(3 / MATERN_NOISE) / 4)
            + math.log1p(math.sqrt(3 / MATERN_NOISE) * abs(y - f))
            - math.sqrt(3 / MATERN_NOISE) * abs(y - f)
        ),
        lambda w, y: stats.invgamma.pdf(w, 1.5, scale=0.75),
    ),
    "bernoulli_logit": Member(
        likelihoods.BernoulliLogitLikelihood,
        "binary",
        _bernoulli,
        lambda w, y: polya_gamma(w, 1),
        log_w_range=(-5.0, 3.2, 0.1),
        vectorised=False,
    ),
    "bayesian_svm": Member(
        likelihoods.BayesianSVMLikelihood,
        "binary",
        lambda y, f: -2 * max(0.0, 1 - (2 * y - 1) * f),
        levy,
    ),
    "negative_binomial": Member(
        negative_binomial,
        "count",
        _negative_binomial,
        lambda w, y: polya_gamma(w, y + TOTAL_COUNT),
        log_w_range=(-5.0, 3.6, 0.1),
        vectorised=False,
    ),
    "negative_binomial_log": Member(
        negative_binomial_log,
        "count",
        _negative_binomial_log,
        lambda w, y: polya_gamma(w, y + 1 / DISPERSION),
        log_w_range=(-5.0, 3.6, 0.1),
        vectorised=False,
    ),
    "pseudo_huber": Member(  # its noise density is e / (2 K_1(1)) exp(-sqrt(1 + x^2))
        pseudo_huber,
        "real",
        lambda y, f: -math.log(2 * special.k1(1)) - math.sqrt(1 + (y - f) ** 2),
        inverted(lambda s: mpmath.exp(1 - mpmath.sqrt(1 + s))),
        log_w_range=(-5.0, 4.0, 0.1),
        vectorised=False,
        reach=6.5,
    ),
    "learnable": Member(
        learnable,
        "real",
        lambda y, f: -float(special.betaln(0.5, POWER - 0.5)) - POWER * math.log1p((y - f) ** 2),
        inverted(lambda s: (1 + s) ** -POWER),
        log_w_range=(-12.0, 4.0, 0.1),
        vectorised=False,
    ),
    "logit_by_hand": Member(
        logit_by_hand,
        "binary",
        _bernoulli,
        lambda w, y: polya_gamma(w, 1),
        log_w_range=(-5.0, 3.2, 0.1),
        vectorised=False,
    ),
}


def rbf_prior(x, *, lengthscale=0.7, outputscale=1.3, mean=0.0, dtype=F64):
    """A Gaussian process prior at x (..., N, d) with jitter 1e-6, and its kernel and mean."""
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).to(dtype)
    kernel.outputscale, kernel.base_kernel.lengthscale = outputscale, lengthscale
    mean_module = gpytorch.means.ConstantMean().to(dtype)
    mean_module.initialize(constant=torch.tensor(mean, dtype=dtype))
    return gpytorch.distributions.MultivariateNormal(mean_module(x), kernel(x).add_jitter(1e-6)), kernel, mean_module
