"""A posterior from matrix products against the dense one, and its draws against their law."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

from gpext.inference.gibbs import draw_latent
from gpext.kernels import keops
from gpext.posteriors import DensePrior, MatrixFreePosterior, condition_matrix_free
from gpext.sites import GaussianSites
from gpext.solvers import partial_cholesky
from tests.statistics import misfit_of_gaussians

F64 = torch.float64
N = 25


def seed(number=0):
    return torch.Generator().manual_seed(number)


def problem(n=N, dtype=F64, lazy=False):
    """A prior and sites from blunt to sharp, one of them all but absent."""
    x = 4 * torch.rand(n, 2, generator=seed(), dtype=F64)
    kernel = gpytorch.kernels.ScaleKernel(keops.MaternKernel() if lazy else gpytorch.kernels.MaternKernel()).to(dtype)
    kernel.outputscale = 1.7
    mean = 0.5 * torch.randn(n, generator=seed(1), dtype=F64)
    precision = 10 ** (4 * torch.rand(n, generator=seed(2), dtype=F64) - 2)
    precision[0] = 1e-30
    sites = GaussianSites(torch.randn(n, generator=seed(3), dtype=F64) * precision, precision)
    with torch.no_grad():
        return MultivariateNormal(mean.to(dtype), kernel(x.to(dtype))), sites


def dense(prior, sites):
    return DensePrior(prior.mean.double(), prior.covariance_matrix.detach().double()).condition(sites)


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-7), (torch.float32, 2e-3)])
@pytest.mark.parametrize("lazy", [False, True])
def test_products_and_predictions_are_those_of_the_dense_posterior(dtype, tolerance, lazy):
    prior, sites = problem(dtype=dtype, lazy=lazy)
    posterior, exact = condition_matrix_free(prior, sites, generator=seed()), dense(prior, sites)
    vector = torch.randn(N, generator=seed(4), dtype=F64)
    torch.testing.assert_close(
        posterior.covariance_times(vector.to(dtype)).double(), exact.covariance_times(vector), rtol=0, atol=tolerance
    )
    cross = torch.randn(N, 3, generator=seed(5), dtype=F64) * 0.1
    test_mean, test_variance = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 2.0, 3.0])
    mean, variance = posterior.predict(test_mean.to(dtype), cross.to(dtype), test_variance.to(dtype))
    expected = exact.predict(test_mean.double(), cross, torch.diag(test_variance.double()))
    torch.testing.assert_close(mean.double(), expected.mean, rtol=0, atol=tolerance)
    torch.testing.assert_close(variance.double(), expected.variance, rtol=0, atol=tolerance)


@pytest.mark.slow
def test_draws_have_the_mean_and_the_covariance_of_the_posterior():
    """The partial factor has little of the prior here, so that most of a draw comes from Lanczos' recursion."""
    prior, sites = problem()
    K = prior.lazy_covariance_matrix.evaluate_kernel()
    L = partial_cholesky(lambda index: K[:, index].to_dense(), K.diagonal(), rank=4, generator=seed())
    posterior, exact, generator = MatrixFreePosterior(prior.mean, K, sites, L), dense(prior, sites), seed(6)
    starts = [posterior.draw_prior(generator=generator) for _ in range(350)]
    assert misfit_of_gaussians(torch.stack(starts), prior.mean, prior.covariance_matrix.detach()) < 1
    draws = torch.stack([draw_latent(posterior, f0, generator=generator) for f0 in starts])
    assert misfit_of_gaussians(draws, exact.mean, exact.covariance) < 1


def test_so_have_draws_of_the_dense_posterior():
    prior, sites = problem()
    exact, K = dense(prior, sites), prior.covariance_matrix.detach()
    starts = DensePrior(prior.mean, K).draw(torch.Size((20000, N)), generator=seed(6))
    draws = draw_latent(exact, starts, generator=seed(7))
    assert misfit_of_gaussians(draws, exact.mean, exact.covariance) < 1


def test_duplicate_inputs_are_drawn_alike():
    x = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=F64)
    K = torch.exp(-0.5 * (x.unsqueeze(-1) - x) ** 2)
    sites = GaussianSites(torch.ones(4, dtype=F64), torch.full((4,), 5.0, dtype=F64))
    posterior = condition_matrix_free(MultivariateNormal(torch.zeros(4, dtype=F64), to_linear_operator(K)), sites)
    f = draw_latent(posterior, posterior.draw_prior(generator=seed()), generator=seed(1))
    assert float((f[0] - f[1]).abs()) < 1e-6


def test_bad_input_and_systems_that_cannot_be_solved():
    prior, sites = problem()
    with pytest.raises(ValueError, match="positive precision; got 0"):
        condition_matrix_free(prior, GaussianSites(sites.shift, torch.zeros_like(sites.precision)))
    indefinite = MultivariateNormal(
        torch.zeros(2, dtype=F64), to_linear_operator(torch.tensor([[1.0, 9.0], [9.0, 1]]).to(F64))
    )
    posterior = condition_matrix_free(indefinite, GaussianSites(*torch.ones(2, 2, dtype=F64)))
    with pytest.raises(ArithmeticError, match="not positive definite"):
        posterior.covariance_times(torch.tensor([1.0, -1.0], dtype=F64))
