"""The Dirichlet likelihood: density and curvature against SciPy and autograd, also where parameters underflow."""

import copy
import pickle
import warnings

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator
from scipy import integrate, stats

from gpext.distributions import CompoundDirichlet
from gpext.inference import KL, Laplace
from gpext.likelihoods import DirichletLikelihood
from gpext.quadrature import QuadratureWarning
from tests.members import F64, tensor
from tests.statistics import misfit


def problem(latents, size=6, *, spread=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    f = spread * torch.randn(latents, size, generator=generator, dtype=F64)
    return torch.randn(size, latents, generator=generator, dtype=F64).softmax(-1), f.requires_grad_()


@pytest.mark.parametrize("latents", [2, 3, 6])
@pytest.mark.parametrize("spread", [0.5, 3.0, 30.0])
def test_log_prob_and_curvature_against_scipy_and_autograd(latents, spread):
    likelihood = DirichletLikelihood(latents)
    y, f = problem(latents, spread=spread)
    value = likelihood.log_prob(y, f)
    theta = torch.nn.functional.softplus(f.detach(), threshold=50).T
    for i in range(6):
        point = y[i].numpy()
        assert value[i].item() == pytest.approx(stats.dirichlet.logpdf(point / point.sum(), theta[i].numpy()), rel=1e-9)
    at = likelihood.curvature(y, f)
    torch.testing.assert_close(at.log_prob, value)
    (gradient,) = torch.autograd.grad(value.sum(), f, create_graph=True)
    torch.testing.assert_close(at.gradient, gradient, rtol=1e-10, atol=1e-10)
    rows = [torch.autograd.grad(gradient[d].sum(), f, retain_graph=True)[0] for d in range(latents)]
    torch.testing.assert_close(at.blocks, -torch.stack(rows), rtol=1e-10, atol=1e-10)


def test_the_fisher_information_is_the_expectation_of_the_curvature():
    likelihood, f = DirichletLikelihood(2), tensor(0.3, 1.4).unsqueeze(-1)
    theta = torch.nn.functional.softplus(f[:, 0])
    at = likelihood.curvature(tensor(0.5, 0.5).unsqueeze(0), f)

    def weighted(t, i, j):
        y = tensor(t, 1 - t).unsqueeze(0)
        block = likelihood.curvature(y, f).blocks[i, j, 0].item()
        return block * stats.beta.pdf(t, *theta.tolist())

    for i, j in ((0, 0), (0, 1), (1, 1)):
        expected = integrate.quad(weighted, 0, 1, args=(i, j), epsabs=1e-9)[0]
        assert at.expected_blocks[i, j, 0].item() == pytest.approx(expected, rel=1e-6)
    assert float(torch.linalg.eigvalsh(at.expected_blocks[..., 0])[0]) > 0


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_everything_is_finite_for_tiny_and_huge_parameters(dtype):
    y = torch.tensor([[0.2, 0.8], [1e-6, 1 - 1e-6]], dtype=dtype)
    f = torch.tensor([[-80.0, 60.0], [3.0, 1e4]], dtype=dtype).requires_grad_()
    at = DirichletLikelihood(2).curvature(y, f)
    for value in (at.log_prob, at.gradient, at.precision, at.coupling, at.expected_precision):
        assert value.dtype == dtype
        assert bool(value.isfinite().all())
    (slope,) = torch.autograd.grad(at.precision.sum() + at.log_prob.sum(), f)
    assert bool(slope.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_where_all_parameters_underflow_the_derivatives_are_those_of_their_logarithms(dtype):
    # theta -> e^eta -> 0: log p = sum_j eta_j - logsumexp(eta) - sum_j log y_j
    likelihood = DirichletLikelihood(3)
    y = torch.tensor([[0.2, 0.3, 0.5]], dtype=dtype)
    f = torch.tensor([[-2000.0], [-2001.0], [-1999.5]], dtype=dtype).requires_grad_()
    at, p = likelihood.curvature(y, f), f.detach().softmax(0)
    expected = f.detach().sum(0) - f.detach().logsumexp(0) - y.log().sum(-1)
    torch.testing.assert_close(at.log_prob.detach(), expected)
    torch.testing.assert_close(at.gradient.detach(), 1 - p)
    torch.testing.assert_close(at.blocks.detach()[..., 0], torch.diag(p[:, 0]) - p @ p.mT, rtol=1e-5, atol=1e-6)
    (slope,) = torch.autograd.grad(at.log_prob.sum(), f)
    torch.testing.assert_close(slope, 1 - p)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_vague_predictive_is_finite(dtype):
    covariance = to_linear_operator((1e3 if dtype == torch.float32 else 1e5) * torch.ones(3, 1, 1, dtype=dtype))
    vague = MultivariateNormal(torch.zeros(3, 1, dtype=dtype), covariance)
    y = torch.tensor([[0.2, 0.3, 0.5]], dtype=dtype)
    likelihood = DirichletLikelihood(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuadratureWarning)  # it is only nearly right, and warns
        density, expected = likelihood.log_marginal(y, vague), likelihood.expected_log_prob(y, vague)
    assert bool(density.isfinite())
    assert bool(expected.isfinite())
    assert float(expected) < float(density)


def test_the_variance_of_a_sure_prediction_keeps_its_digits_in_float32():
    f, covariance = torch.tensor([[1.1e6], [1e6]]), to_linear_operator(1e-3 * torch.ones(2, 1, 1))
    variance = DirichletLikelihood(2)(MultivariateNormal(f, covariance)).variance
    expected = torch.full((1, 2), 1.1 / 2.1**2 / (2.1e6 + 1))  # m_1 m_2 / (S + 1)
    torch.testing.assert_close(variance, expected, rtol=1e-4, atol=0.0)


def test_the_predictive_sees_the_correlation():
    V = torch.tensor([[1.0, 0.8], [0.8, 2.0]], dtype=F64)
    q = MultitaskMultivariateNormal(tensor(0.5, 1.5).unsqueeze(0), to_linear_operator(V))
    predictive = DirichletLikelihood(2)(q)
    assert isinstance(predictive, CompoundDirichlet)
    assert (predictive.batch_shape, predictive.event_shape) == ((1,), (2,))
    line = torch.arange(-9, 9, 0.05, dtype=F64)
    z = torch.cartesian_prod(line, line)
    f = tensor(0.5, 1.5) + z @ torch.linalg.cholesky(V).T
    weights = torch.exp(-0.5 * z.square().sum(-1)) * 0.05**2 / (2 * torch.pi)
    given = torch.distributions.Dirichlet(torch.nn.functional.softplus(f))
    y = tensor(0.3, 0.7)
    expected = (weights * given.log_prob(y).exp()).sum().log()
    assert predictive.log_prob(y.unsqueeze(0)).item() == pytest.approx(expected.item(), abs=1e-7)
    mean = (weights.unsqueeze(-1) * given.mean).sum(0)
    torch.testing.assert_close(predictive.mean[0], mean, rtol=1e-7, atol=1e-7)
    second = (weights.unsqueeze(-1) * (given.variance + given.mean.square())).sum(0)
    torch.testing.assert_close(predictive.variance[0], second - mean.square(), rtol=1e-6, atol=1e-7)
    draws = predictive.sample((100_000,), generator=torch.Generator().manual_seed(0))[:, 0]
    assert misfit(draws, mean) < 1


def test_proportions_are_recovered():
    x = torch.linspace(0, 4, 50, dtype=F64)
    truth = torch.stack([x.sin(), x.cos(), 0.3 * x], -1).softmax(-1)
    generator = torch.Generator().manual_seed(0)
    gammas = torch._standard_gamma(30 * truth, generator)
    y = gammas / gammas.sum(-1, keepdim=True)
    K = 25 * torch.exp(-0.5 * (x.unsqueeze(-1) - x).square()) + 1e-6 * torch.eye(50, dtype=F64)
    prior = MultivariateNormal(torch.full((3, 50), 5.0, dtype=F64), to_linear_operator(K.expand(3, 50, 50)))
    result = Laplace().infer(prior, DirichletLikelihood(3), y)
    assert result.status.name == "CONVERGED"
    with torch.no_grad():
        mean = DirichletLikelihood(3)(result.posterior).mean
    torch.testing.assert_close(mean.sum(-1), torch.ones(50, dtype=F64), rtol=0, atol=1e-6)
    assert float((mean - truth).abs().mean()) < 0.03 < float((y - truth).abs().mean())


def test_wrong_proportions_are_refused():
    likelihood = DirichletLikelihood(2)
    with pytest.raises(ValueError, match=r"got 0 at index \(1, 0\). Smooth zeros: y = \(y \* \(n - 1\) \+ 1 / 2\) / n"):
        likelihood.check(torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
    with pytest.raises(ValueError, match=r"must sum to 1; got 1.1 at index 1. Divide"):
        likelihood.check(torch.tensor([[0.5, 0.5], [0.3, 0.8]]))
    with pytest.raises(ValueError, match=r"proportions of shape \(..., N, 2\); got shape \(3,\)"):
        likelihood.check(torch.tensor([0.5, 0.2, 0.3]))
    with pytest.raises(ValueError, match="num_classes must be at least 2"):
        DirichletLikelihood(1)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(clone):
    likelihood, (y, f) = DirichletLikelihood(3), problem(3)
    assert torch.equal(clone(likelihood).log_prob(y, f), likelihood.log_prob(y, f))


def test_shares_of_parameters_that_underflow_are_those_of_their_logarithms():
    f = torch.tensor([[-1000.0], [-1001.0], [-1002.0]], dtype=torch.float64)
    nearly_a_point = to_linear_operator(1e-9 * torch.ones(3, 1, 1, dtype=torch.float64))
    predictive = DirichletLikelihood(3)(MultivariateNormal(f, nearly_a_point))
    torch.testing.assert_close(predictive.mean, f.softmax(0).mT, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("latents", [3, 5])
def test_kl_settles_in_few_steps_at_an_outlying_target_under_a_wide_prior(latents):
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(3, latents, generator=generator, dtype=F64).softmax(-1)
    y[0], y[0, -1] = 1e-12, 1 - (latents - 1) * 1e-12
    x = torch.tensor([0.0, 1.5, 3.0], dtype=F64)
    covariance = 1e4 * torch.exp(-0.5 * (x.unsqueeze(-1) - x).square()).expand(latents, 3, 3)
    prior = MultivariateNormal(torch.zeros(latents, 3, dtype=F64), to_linear_operator(covariance.clone()))
    result = KL().infer(prior, DirichletLikelihood(latents), y)
    assert result.status.name == "CONVERGED"
    assert result.num_steps < 100
