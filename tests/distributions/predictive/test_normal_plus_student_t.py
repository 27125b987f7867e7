"""Sums of a Gaussian and a Student-t variable: against integrals over the Gaussian, and limits in closed form."""

import copy
import pickle

import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from torch.distributions import Normal

from gpext.distributions import AdditiveNoisePredictive, CompoundStudentT, StudentT
from gpext.distributions.predictive.normal_plus_student_t import NormalPlusStudentT
from gpext.likelihoods import StudentTLikelihood

F64 = torch.float64
MEAN, VARIANCE = torch.tensor([0.4, -1.0, 2.0], dtype=F64), torch.tensor([1.0, 1e-4, 0.25], dtype=F64)


def predictive_of(deg_free, noise, mean=MEAN, variance=VARIANCE):
    likelihood = StudentTLikelihood(deg_free_constraint=GreaterThan(0.1)).to(mean.dtype)
    likelihood.deg_free, likelihood.noise = deg_free, noise
    return likelihood, likelihood(MultivariateNormal(mean, torch.diag(variance)))


@pytest.mark.parametrize("deg_free", [0.4, 1.0, 2.1, 5.0, 40.0, 1e5])
@pytest.mark.parametrize("noise", [1e-6, 0.1, 100.0])
def test_against_integrals_over_the_gaussian(deg_free, noise):
    likelihood, predictive = predictive_of(deg_free, noise)
    assert isinstance(predictive, CompoundStudentT)
    by_quadrature = AdditiveNoisePredictive(likelihood.forward, MEAN, VARIANCE)
    scale = (VARIANCE + noise).sqrt()
    for shift in (-30.0, -2.0, 0.0, 0.3, 4.0):
        y = MEAN + shift * scale
        assert torch.allclose(predictive.cdf(y), by_quadrature.cdf(y), rtol=1e-10, atol=1e-14)
        assert torch.allclose(predictive.log_prob(y), by_quadrature.log_prob(y), rtol=1e-9, atol=1e-9)
    for q in (1e-6, 0.02, 0.5, 0.9):
        y = predictive.icdf(q)
        assert torch.allclose(by_quadrature.cdf(y), torch.full_like(y, q), rtol=1e-9, atol=0)
        mirrored = 2 * MEAN - predictive.icdf(1 - q)
        assert bool(((y - mirrored).abs() <= 1e-8 * (y.abs() + mirrored.abs() + scale)).all())


def test_without_a_gaussian_it_is_a_student_t_and_of_many_degrees_of_freedom_a_normal():
    y = torch.tensor([-3.0, 0.1, 5.0], dtype=F64)
    alone = NormalPlusStudentT(MEAN, torch.zeros_like(MEAN), torch.tensor(3.0, dtype=F64), torch.tensor(0.2, dtype=F64))
    exact = StudentT(torch.tensor(3.0, dtype=F64), MEAN, torch.tensor(0.2, dtype=F64))
    assert torch.allclose(alone.cdf(y), exact.cdf(y), rtol=1e-10)
    assert torch.allclose(alone.icdf(0.01), exact.icdf(torch.tensor(0.01, dtype=F64)), rtol=1e-10)
    for value in (y, MEAN):
        assert torch.allclose(alone.log_prob(value), exact.log_prob(value), rtol=1e-10)
    _, nearly = predictive_of(1e12, 0.5)
    normal = Normal(MEAN, (VARIANCE + 0.5).sqrt())
    assert torch.allclose(nearly.cdf(y), normal.cdf(y), rtol=1e-10)
    assert torch.allclose(nearly.icdf(0.01), normal.icdf(torch.tensor(0.01, dtype=F64)), rtol=1e-10)


def test_the_distribution_function_has_the_derivatives_of_finite_differences():
    y = torch.tensor([-0.5, -1.1, 2.9], dtype=F64)
    given = [MEAN, VARIANCE, torch.tensor(3.0, dtype=F64), torch.tensor(0.3, dtype=F64)]
    leaves = [value.clone().requires_grad_() for value in given]
    assert torch.autograd.gradcheck(lambda *args: NormalPlusStudentT(*args).cdf(y), leaves, atol=1e-8)
    _, predictive = predictive_of(3.0, 0.09)
    value = y.clone().requires_grad_()
    (density,) = torch.autograd.grad(predictive.cdf(value).sum(), value)
    assert torch.allclose(density, predictive.log_prob(y).exp(), rtol=1e-9)


def test_values_without_bounds():
    likelihood, predictive = predictive_of(3.0, 0.09)
    far = torch.tensor([1e140, 1e200, torch.inf], dtype=F64)
    assert torch.equal(predictive.cdf(-far), torch.zeros_like(far))
    assert torch.allclose(predictive.cdf(far), torch.ones_like(far), rtol=1e-14)
    density = predictive.log_prob(far)  # that of a Student-t, whose square overflows beyond 1e154
    assert density[0].item() == pytest.approx(likelihood.forward(MEAN).log_prob(far)[0].item(), rel=1e-12)
    assert density[1:].tolist() == [-torch.inf, -torch.inf]


def test_float32_batches_and_copies():
    _, exact = predictive_of(4.0, 0.2)
    _, single = predictive_of(4.0, 0.2, MEAN.float(), VARIANCE.float())
    assert single.icdf(0.9).dtype == single.cdf(MEAN.float()).dtype == torch.float32
    assert torch.allclose(single.icdf(0.9), exact.icdf(0.9).float(), rtol=1e-6)
    levels = torch.tensor([[0.1], [0.6]], dtype=F64)
    assert torch.allclose(exact.icdf(levels)[1], exact.icdf(0.6), rtol=1e-11)  # nodes are as many as the smallest needs
    for other in (copy.deepcopy(exact), pickle.loads(pickle.dumps(exact))):
        assert torch.equal(other.icdf(0.3), exact.icdf(0.3))
    # not to the bit: of another shape, other entries are computed by vector instructions
    expanded = exact.expand((2, 3)).icdf(0.3)
    assert expanded.shape == (2, 3)
    assert torch.allclose(expanded, exact.icdf(0.3), rtol=1e-13, atol=0)
    _, empty = predictive_of(4.0, 0.2, MEAN[:0], VARIANCE[:0])
    assert empty.icdf(0.5).shape == empty.cdf(MEAN[:0]).shape == (0,)
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        exact.icdf(1.0)
