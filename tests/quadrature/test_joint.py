"""Integrals over several correlated latents, against closed forms and one-dimensional integrals."""

import math

import pytest
import torch

from gpext.quadrature import QuadratureWarning, SecondOrder, joint_expectation, log_joint_expectation

F64 = torch.float64


def problem(latents, size=4, *, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(latents, size, generator=generator, dtype=F64)
    factor = scale * torch.randn(size, latents, latents, generator=generator, dtype=F64)
    covariance = factor @ factor.mT + 0.1 * torch.eye(latents, dtype=F64)
    return mean, covariance.movedim(0, -1)


def gaussian(width, centre):
    """l = log N(f | centre, width^2 I), whose integral is known."""

    def function(f):
        gap = (f - centre) / width
        return -0.5 * gap.square().sum(-2) - f.size(-2) * math.log(width * math.sqrt(2 * math.pi))

    def expand(f):
        unit = torch.eye(f.size(-2), dtype=F64).unsqueeze(-1).expand(*f.shape[:-2], -1, -1, f.size(-1))
        return SecondOrder(function(f), (centre - f) / width**2, unit / width**2)

    return function, expand


@pytest.mark.parametrize("latents", [1, 2, 3, 5])
@pytest.mark.parametrize("width", [1e-4, 0.3, 100.0])
def test_a_gaussian_factor_of_any_width(latents, width):
    mean, covariance = problem(latents)
    centre = mean + 1.5
    value = log_joint_expectation(*gaussian(width, centre), mean, covariance)
    total = covariance.movedim(-1, 0) + width**2 * torch.eye(latents, dtype=F64)
    expected = torch.distributions.MultivariateNormal(mean.T, total).log_prob(centre.T)
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8 if latents < 4 else 1e-3)


def test_derivatives_are_those_of_the_integral():
    mean, covariance = (t.requires_grad_() for t in problem(2))
    centre = mean.detach() + 0.4
    value = log_joint_expectation(*gaussian(0.5, centre), mean, covariance)
    total = covariance.movedim(-1, 0) + 0.25 * torch.eye(2, dtype=F64)
    expected = torch.distributions.MultivariateNormal(mean.T, total).log_prob(centre.T)
    for ours, theirs in zip(
        torch.autograd.grad(value.sum(), [mean, covariance]),
        torch.autograd.grad(expected.sum(), [mean, covariance]),
        strict=True,
    ):
        if ours.dim() == 3:  # of a symmetric matrix only the symmetric part counts
            ours, theirs = ours + ours.transpose(0, 1), theirs + theirs.transpose(0, 1)
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8)


def test_a_singular_covariance_is_a_point_or_a_line():
    mean, _ = problem(2, 1)
    direction = torch.tensor([1.0, 2.0], dtype=F64)
    line = (direction.unsqueeze(-1) * direction).unsqueeze(-1)
    function, expand = gaussian(0.7, mean + 1)
    on_line = log_joint_expectation(function, expand, mean, line)
    total = line[..., 0] + 0.49 * torch.eye(2, dtype=F64)
    expected = torch.distributions.MultivariateNormal(mean[:, 0], total).log_prob(mean[:, 0] + 1)
    assert on_line.item() == pytest.approx(expected.item(), abs=1e-8)
    at_point = log_joint_expectation(function, expand, mean, torch.zeros_like(line))
    assert at_point.item() == pytest.approx(function(mean).item(), abs=1e-8)
    with pytest.raises(ValueError, match=r"not positive semidefinite, first at index \(0,\)"):
        log_joint_expectation(function, expand, mean, -line)


@pytest.mark.parametrize("latents", [1, 2, 3])
def test_expectations_of_functions(latents):
    mean, covariance = problem(latents)
    total = covariance.sum((0, 1))  # variance of the sum
    value = joint_expectation(lambda f: f.sum(-2).cos(), mean, covariance)
    torch.testing.assert_close(value, mean.sum(0).cos() * (-0.5 * total).exp(), rtol=1e-9, atol=1e-9)
    vector = joint_expectation(lambda f: f.square(), mean, covariance)
    torch.testing.assert_close(vector, mean.square() + covariance.diagonal().T, rtol=1e-9, atol=1e-9)


def test_sobol_points_say_their_error():
    mean, covariance = problem(5, scale=0.2)
    value = joint_expectation(lambda f: f.sum(-2).cos(), mean, covariance)
    expected = mean.sum(0).cos() * (-0.5 * covariance.sum((0, 1))).exp()
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-3)
    with pytest.warns(QuadratureWarning, match="relative error of up to about"):
        joint_expectation(lambda f: (6 * f.sum(-2)).exp(), mean, covariance)


def test_an_integral_that_is_not_finite_is_told():
    mean, covariance = torch.full((2, 1), 1000.0, dtype=F64), torch.eye(2, dtype=F64).unsqueeze(-1)

    def function(f):
        return -f.exp().sum(-2)

    def expand(f):
        return SecondOrder(function(f), -f.exp(), torch.diag_embed(f.exp().mT).movedim(-3, -1))

    with pytest.warns(QuadratureWarning, match="is not finite"):
        assert log_joint_expectation(function, expand, mean, covariance).item() == -math.inf
