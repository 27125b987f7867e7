"""Posteriors far from the prior mean, where log p(y | f) overflows or has e^40 times the mode's curvature."""

import math

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from scipy.optimize import brentq

from gpext.inference import EP, KL, Laplace, Status
from gpext.inference.local_modes import local_modes
from gpext.inference.problem import Problem
from gpext.likelihoods import MultivariatePoissonLikelihood, PoissonLikelihood
from tests.latent_cases import CASES
from tests.members import F64

COUNTS = torch.tensor([2.0, 0.0, 1.0, 5.0, 3.0], dtype=F64)
MEANS = [40.0, 100.0, 800.0, 1e4]


def exact_laplace(mean, variance, counts):
    """Laplace's evidence of a single f that all counts share, by one-dimensional algebra."""
    n, total = len(counts), float(counts.sum())
    f = brentq(lambda f: total - n * math.exp(f) - (f - mean) / variance, -50.0, 50.0, xtol=1e-14, rtol=1e-14)
    log_p = total * f - n * math.exp(f) - float(torch.lgamma(counts + 1).sum())
    return log_p - 0.5 * (f - mean) ** 2 / variance - 0.5 * math.log1p(variance * n * math.exp(f))


def prior(mean, covariance):
    return MultivariateNormal(torch.full(covariance.shape[:-1], mean, dtype=F64), to_linear_operator(covariance))


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("variance", [1e-2, 1.0, 1e4])
def test_counts_at_a_distant_prior_mean(mean, variance):
    result = Laplace().infer(prior(mean, torch.full((5, 5), variance, dtype=F64)), PoissonLikelihood(), COUNTS)
    assert result.status is Status.CONVERGED
    assert float(result.log_evidence.detach()) == pytest.approx(exact_laplace(mean, variance, COUNTS), rel=1e-9)


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("rule", [KL(), EP()])
def test_other_rules_find_the_same_posterior(mean, rule):
    """Skewness makes the evidences differ by tenths, of thousands."""
    result = rule.infer(prior(mean, torch.ones(5, 5, dtype=F64)), PoissonLikelihood(), COUNTS)
    assert result.status is Status.CONVERGED
    assert float(result.log_evidence.detach()) == pytest.approx(exact_laplace(mean, 1.0, COUNTS), rel=1e-4)


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("variance", [1e-2, 1.0, 1e4])
def test_several_latents(mean, variance):
    """Two independent counts per datum have twice the log evidence of one."""
    covariance = torch.full((2, 5, 5), variance, dtype=F64)
    result = Laplace().infer(prior(mean, covariance), MultivariatePoissonLikelihood(2), COUNTS.repeat(2, 1).mT)
    assert result.status is Status.CONVERGED
    assert float(result.log_evidence.detach()) == pytest.approx(2 * exact_laplace(mean, variance, COUNTS), rel=1e-9)


def test_no_posterior_is_no_evidence():
    """A Cholesky factor with a pivot of zero would have a determinant of zero, and an evidence of plus infinity."""
    result = Laplace(max_steps=1).infer(prior(40.0, torch.ones(2, 2, dtype=F64)), PoissonLikelihood(), COUNTS[:2])
    assert float(result.trace[0]) == -math.inf
    assert float(result.log_evidence.detach()) == pytest.approx(exact_laplace(40.0, 1.0, COUNTS[:2]), rel=1e-9)
    assert bool((result.posterior.variance > 0).all())


@pytest.mark.parametrize("name", ["poisson", "bernoulli_logit", "student_t", "dirichlet", "multinomial", "von_mises"])
def test_modes_are_stationary(name):
    likelihood, make, targets = CASES[name].problem(12, outputscale=4.0, mean=0.5)
    problem = Problem.of(make(), likelihood, targets, 0.0)
    f = local_modes(problem).requires_grad_()
    log_density = likelihood.log_prob(targets, f).sum()
    log_density = log_density - 0.5 * ((f - problem.mean).square() / problem.prior.variance).sum()
    (slope,) = torch.autograd.grad(log_density, f)
    assert float(slope.abs().max()) < 0.02  # steps below a thousandth of a posterior standard deviation end it
