"""Likelihoods without the curvature that Laplace and Taylor need are recognised, and no others."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

from gpext.inference import Laplace, Status, Taylor
from gpext.inference.expansion import expand
from gpext.likelihoods import (
    BayesianSVMLikelihood,
    Censored,
    LaplaceLikelihood,
    LogLogisticLikelihood,
    OrdinalLogitLikelihood,
    OrdinalProbitLikelihood,
    StudentTLikelihood,
    SuperGaussianLikelihood,
    Weighted,
)
from tests.members import F64

N = 6


def prior(mean):
    x = torch.arange(N, dtype=F64)
    return MultivariateNormal(torch.full((N,), mean, dtype=F64), torch.exp(-0.5 * (x - x[:, None]).square()))


@pytest.mark.parametrize("kind", [OrdinalLogitLikelihood, OrdinalProbitLikelihood])
@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_cutpoints_far_from_zero_are_those_near_it(kind, shift):
    y = torch.tensor([2.0, 1.0, 0.0, 0.0, 1.0, 2.0], dtype=F64)
    near, far = kind(3).double(), kind(3).double()
    far.cutpoints = near.cutpoints.detach() + shift
    expected = Laplace().infer(prior(0.0), near, y).log_evidence
    for first in (y, y.flip(0) * 0, 2 - y):
        assert Laplace().infer(prior(shift), far, first).log_evidence.isfinite()
    torch.testing.assert_close(Laplace().infer(prior(shift), far, y).log_evidence, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [LaplaceLikelihood, BayesianSVMLikelihood])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_kinks_have_none(kind, label):
    with pytest.raises(TypeError, match="no second derivative"):
        Laplace().infer(prior(0.0), kind().double(), torch.full((N,), label, dtype=F64))


def test_noise_of_each_datum_is_of_each_datum():
    """All rules agree on the evidence of Gaussian noise with fixed variances; kinks are found there, too."""
    x = torch.linspace(0, 3, 6, dtype=F64)
    K = torch.exp(-0.5 * (x - x.unsqueeze(-1)).square()) + 1e-6 * torch.eye(6, dtype=F64)
    prior, noise, y = MultivariateNormal(torch.zeros_like(x), K), 0.1 + 0.2 * x, x.sin()
    expected = MultivariateNormal(torch.zeros_like(x), K + noise.diag()).log_prob(y)
    fixed = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    for rule in (Laplace(), Taylor()):
        result = rule.infer(prior, fixed, y)
        torch.testing.assert_close(result.log_evidence, expected)
        assert bool(result.log_loo.isfinite().all())

    class LaplaceNoise(gpytorch.likelihoods.Likelihood):
        def forward(self, f):
            return torch.distributions.Laplace(f, noise)

    with pytest.raises(TypeError, match="no second derivative"):
        Laplace().infer(prior, LaplaceNoise(), y)


@pytest.mark.parametrize("target", [1e9, 1e12])
def test_a_target_far_off_hides_no_curvature(target):
    """The slopes there are more than 1e8 times the curvature, which is the same everywhere."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 2.0
    result = Laplace().infer(prior(0.0), likelihood, torch.full((N,), target, dtype=F64))
    K = prior(0.0).covariance_matrix
    expected = K @ torch.linalg.solve(K + 2 * torch.eye(N, dtype=F64), torch.full((N,), target, dtype=F64))
    torch.testing.assert_close(result.posterior.mean, expected, rtol=1e-9, atol=0)


def test_a_narrow_bend_far_from_zero_is_found():
    """Log p of a log-logistic time falls with two slopes but for a bend as narrow as 1 / shape, about its logarithm."""
    times = torch.full((N, 2), 1e-4, dtype=F64)
    likelihood = Censored(LogLogisticLikelihood()).double()
    likelihood.likelihood.initialize(shape=80.0)
    result = Laplace().infer(prior(0.0), likelihood, times)
    assert result.status is Status.CONVERGED
    with pytest.raises(TypeError, match="no second derivative"):
        Laplace().infer(prior(0.0), Weighted(LaplaceLikelihood().double()), torch.ones(N, 2, dtype=F64))


HEAVY = {
    "student_t": (StudentTLikelihood, torch.tensor([0.0, 3.0], dtype=F64)),
    "weighted": (lambda: Weighted(StudentTLikelihood()), torch.tensor([[0.0, 0.5], [3.0, 4.0]], dtype=F64)),
    "automatic": (lambda: SuperGaussianLikelihood(lambda r: (1 + r) ** -1.5), torch.tensor([0.0, 3.0], dtype=F64)),
}


@pytest.mark.parametrize("name", HEAVY)
def test_where_a_log_density_curves_upwards_its_cautious_quadratic_is_below_it(name):
    make, y = HEAVY[name]
    likelihood = make().double()
    for distance in (4.0, 30.0, 1e4):  # from the target, in which the curvature has changed its sign
        f = y.reshape(2, -1)[:, 0] + distance
        with torch.no_grad():
            at = expand(likelihood, y, f)
            assert bool((at.sites.precision < 0).all())
            assert bool((at.cautious.precision > 0).all())
            for move in (-2 * distance, -distance, -0.1, 0.1, distance, 1e6):
                quadratic = at.log_prob + at.gradient * move - 0.5 * at.cautious.precision * move**2
                assert bool((likelihood.log_prob(y, f + move) >= quadratic - 1e-9 * quadratic.abs()).all())
        torch.testing.assert_close(at.cautious.shift, at.gradient + at.cautious.precision * f)
