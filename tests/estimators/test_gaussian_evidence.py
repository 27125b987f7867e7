"""The closed-form evidence of Gaussian noise: that of Laplace's rule, which is exact there, and its derivatives."""

import gpytorch
import pytest
import torch
from linear_operator import to_linear_operator
from linear_operator.utils.errors import NotPSDError

from gpext.estimators.gaussian_evidence import GaussianEvidence, has_closed_form
from gpext.estimators.models import DenseGP, default_kernel
from gpext.inference import CAVI, EP, Laplace
from gpext.likelihoods import StudentTLikelihood, Weighted
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.priors import noise_prior, register_priors

F64 = torch.float64


def problem(weighted):
    torch.manual_seed(0)
    x, y = torch.randn(20, 3, dtype=F64), torch.randn(20, dtype=F64)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(F64)
    likelihood.noise = 0.3
    if weighted:
        likelihood, y = Weighted(likelihood), torch.stack([y, torch.rand(20, dtype=F64) + 0.2], -1)
    return DenseGP(x, y, likelihood, Laplace(), default_kernel(3, 0)).to(F64), likelihood, x, y


@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_derivatives_are_those_of_laplaces_rule(weighted):
    model, likelihood, x, y = problem(weighted)
    found = []
    for kind in (GaussianEvidence, LatentMarginalLogLikelihood):
        objective = kind(likelihood, model)
        register_priors(objective, noise=noise_prior)
        objective.train()
        value = objective(model(x), y)
        found.append((value, *torch.autograd.grad(value, list(objective.parameters()))))
    for mine, reference in zip(*found, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-8, atol=1e-10)


def test_the_evidence_of_whole_weights_is_that_of_repeated_data():
    model, weighted, x, y = problem(weighted=True)
    times = torch.arange(20).remainder(3) + 1
    y[:, 1] = times
    model.set_train_data(targets=y)
    some_x, some_y = x.repeat_interleave(times, 0), y[:, 0].repeat_interleave(times)
    repeated = DenseGP(some_x, some_y, weighted.likelihood, Laplace(), model.covar_module).to(F64)
    mine = GaussianEvidence(weighted, model.train())(model(x), y)
    whole = GaussianEvidence(weighted.likelihood, repeated.train())(repeated(some_x), some_y)
    torch.testing.assert_close(len(x) * mine, len(some_y) * whole, rtol=1e-10, atol=0)


def test_a_covariance_that_is_not_positive_definite_is_reported():
    model, likelihood, _, y = problem(weighted=False)
    prior = gpytorch.distributions.MultivariateNormal(
        torch.zeros(20, dtype=F64), to_linear_operator(-torch.eye(20, dtype=F64))
    )
    with pytest.raises(NotPSDError, match="not positive definite"):
        GaussianEvidence(likelihood, model)(prior, y)


def test_it_serves_gaussian_noise_under_rules_that_are_exact_for_it():
    gaussian, student = gpytorch.likelihoods.GaussianLikelihood(), StudentTLikelihood()
    assert has_closed_form(gaussian, Laplace())
    assert has_closed_form(Weighted(gaussian), EP())
    assert not has_closed_form(student, Laplace())
    assert not has_closed_form(gaussian, CAVI())
    assert not has_closed_form(gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.ones(3)), Laplace())


def test_noise_below_the_rounding_errors_of_the_covariance_is_refused():
    x, y = torch.randn(20, 1, dtype=F64), torch.randn(20, dtype=F64)
    floor = gpytorch.constraints.GreaterThan(1e-8)
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=floor).to(F64)
    model = DenseGP(x, y, likelihood, Laplace(), default_kernel(1, 0)).to(F64)
    objective = GaussianEvidence(likelihood, model)
    likelihood.noise = 1e-7
    assert objective(model(x), y).isfinite()
    model.covar_module.outputscale = 1e9
    with pytest.raises(NotPSDError, match="less than the rounding errors"):
        objective(model(x), y)
