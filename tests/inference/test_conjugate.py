"""A likelihood that is Gaussian in f takes KL one step, whatever its class and its parameters."""

import math

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

from gpext.inference import EP, KL, Laplace, Status, Taylor
from gpext.inference.conjugate import exact_result
from gpext.inference.problem import Problem
from gpext.likelihoods import SuperGaussianLikelihood
from tests.latent_cases import CASES
from tests.members import F64

X = torch.linspace(0, 1, 20, dtype=F64)
K = torch.exp(-50 * (X - X.unsqueeze(-1)).square())


def gaussian(noise):
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.Positive()).double()
    likelihood.noise = noise
    return likelihood


class Scaled(gpytorch.likelihoods.Likelihood):
    """Gaussian in f by its formula alone."""

    def forward(self, f):
        return torch.distributions.Normal(3 * f - 1, torch.full_like(f, 0.2))


@pytest.mark.parametrize("size", [1.0, 1e6])
@pytest.mark.parametrize("noise", [0.1, 4e-4])
def test_one_step_at_any_scale(size, noise):
    covariance = K.clone().requires_grad_()
    likelihood, y = gaussian(noise), size * torch.cos(3 * X)
    result = KL().infer(MultivariateNormal(0 * X, to_linear_operator(covariance)), likelihood, y)
    assert (result.status, result.num_steps) == (Status.CONVERGED, 1)
    plain = K.clone().requires_grad_()
    other = gaussian(noise)
    exact = MultivariateNormal(0 * X, to_linear_operator(plain + other.noise * torch.eye(20, dtype=F64))).log_prob(y)
    torch.testing.assert_close(result.log_evidence, exact, rtol=1e-8, atol=1e-8)
    ours = torch.autograd.grad(result.log_evidence, (covariance, likelihood.raw_noise))
    theirs = torch.autograd.grad(exact, (plain, other.raw_noise))
    torch.testing.assert_close(ours[0] + ours[0].mT, theirs[0] + theirs[0].mT, rtol=1e-6, atol=1e-6 * size**2)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("likelihood", [Scaled(), SuperGaussianLikelihood(phi=lambda r: torch.exp(-r))])
def test_the_derivatives_say_so(likelihood):
    prior = MultivariateNormal(0 * X, to_linear_operator(K))
    result = KL().infer(prior, likelihood, torch.cos(3 * X))
    assert (result.status, result.num_steps) == (Status.CONVERGED, 1)
    torch.testing.assert_close(
        result.log_evidence, Laplace().infer(prior, likelihood, torch.cos(3 * X)).log_evidence, rtol=1e-10, atol=1e-9
    )


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if name not in ("stock_gaussian", "log_normal")])
@pytest.mark.parametrize("mean", [0.0, 300.0])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_no_other_likelihood_is_taken_for_one(name, mean, scale):
    """Also in the tails, and where the prior covers so small a part that most are parabolas to rounding and qualify."""
    likelihood, make, targets = CASES[name].problem(6, outputscale=scale, mean=mean)
    found = exact_result(Problem.of(make(), likelihood, targets, 0.0), "rule")
    if found is not None:
        assert scale == 1e-6
        laplace = Laplace().infer(make(), likelihood, targets)
        torch.testing.assert_close(found.log_evidence, laplace.log_evidence, rtol=1e-9, atol=1e-9)


def test_fixed_noise_of_each_datum():
    noise = torch.linspace(0.1, 2.0, 20, dtype=F64)
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    y = torch.cos(3 * X)
    result = KL().infer(MultivariateNormal(0 * X, to_linear_operator(K)), likelihood, y)
    exact = MultivariateNormal(0 * X, to_linear_operator(K + torch.diag(noise))).log_prob(y)
    torch.testing.assert_close(result.log_evidence, exact)


@pytest.mark.parametrize("rule", [KL(), EP(), Laplace(), Taylor()])
def test_an_evidence_beyond_float32_is_not_called_converged(rule):
    """That of y = 1e25 is e^(-1e50): its logarithm is finite in float64, but not in float32."""
    prior = MultivariateNormal(torch.zeros(2), to_linear_operator(torch.eye(2)))
    result = rule.infer(prior, gpytorch.likelihoods.GaussianLikelihood(), torch.tensor([1e25, 0.0]))
    assert result.log_evidence == -math.inf
    assert result.status is Status.NOT_FINITE
