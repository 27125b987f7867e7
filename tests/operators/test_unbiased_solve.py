"""Unbiased solves under gpytorch's own objective: derivatives against exact ones, by z-scores."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

from gpext.kernels import keops
from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.operators import KernelOperator, UnbiasedSolveOperator, UnbiasedSolver, UnbiasedSolveWarning

F64 = torch.float64
N = 40


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernels=gpytorch.kernels):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(kernels.RBFKernel()) + kernels.MaternKernel(nu=1.5)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def problem(*, kernels=gpytorch.kernels, fixed_noise=False):
    torch.manual_seed(0)
    x = torch.rand(N, 2, dtype=F64)
    y = (5 * x.sum(-1)).sin() + 0.1 * torch.randn(N, dtype=F64)
    if fixed_noise:
        likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.linspace(0.05, 0.2, N, dtype=F64))
    else:
        likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
        likelihood.noise = 0.05
    model = Model(x, y, likelihood, kernels).double()
    model.covar_module.kernels[1].register_prior(
        "lengthscale_prior", gpytorch.priors.GammaPrior(3.0, 6.0), "lengthscale"
    )
    return model.train(), likelihood, x, y


def gradient(mll, model, x, y):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(mll(model(x), y), parameters)])


@pytest.mark.parametrize("fixed_noise", [False, True])
@pytest.mark.parametrize("rank", [0, 5])
def test_gradients_are_unbiased_for_every_parameter(rank, fixed_noise):
    model, likelihood, x, y = problem(fixed_noise=fixed_noise)
    exact = gradient(gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model), model, x, y)
    solver = UnbiasedSolver(rank=rank, tolerance=0.3, generator=torch.Generator().manual_seed(0))
    mll = UnbiasedMarginalLogLikelihood(likelihood, model, solver=solver)
    draws = torch.stack([gradient(mll, model, x, y) for _ in range(400)])
    z = (draws.mean(0) - exact) / (draws.std(0) / 20 + 1e-12)
    assert float(z.abs().max()) < 4.5
    assert float(draws.std(0).max()) > 1e-3  # they are estimates


def test_solved_to_the_end_everything_but_the_trace_is_exact():
    model, likelihood, x, y = problem()
    covariance = likelihood(model(x)).lazy_covariance_matrix.evaluate_kernel()
    operator = UnbiasedSolveOperator(covariance, solver=UnbiasedSolver(tolerance=1e-13))
    dense = covariance.to_dense()
    b = torch.stack([y, x[:, 0]], -1)
    torch.testing.assert_close(operator.solve(b), torch.linalg.solve(dense, b), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(operator.solve(y), torch.linalg.solve(dense, y), rtol=1e-8, atol=1e-8)
    left = b.mT
    torch.testing.assert_close(operator.solve(b, left), left @ torch.linalg.solve(dense, b), rtol=1e-8, atol=1e-8)
    ours, theirs = operator.inv_quad(b, reduce_inv_quad=False), (b * torch.linalg.solve(dense, b)).sum(0)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    for value, expected in (
        (ours.sum(), theirs.sum()),
        (operator.solve(b).square().sum(), torch.linalg.solve(dense, b).square().sum()),
    ):
        parameters = list(model.covar_module.parameters())
        for p, q in zip(
            torch.autograd.grad(value, parameters, retain_graph=True),
            torch.autograd.grad(expected, parameters, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_the_rough_log_determinant_is_on_the_side_it_says():
    model, likelihood, x, _ = problem()
    covariance = likelihood(model(x)).lazy_covariance_matrix.evaluate_kernel()
    true = torch.logdet(covariance.to_dense())
    below = UnbiasedSolveOperator(covariance, solver=UnbiasedSolver(rank=20)).inv_quad_logdet(logdet=True)[1]
    above = UnbiasedSolveOperator(covariance, solver=UnbiasedSolver(rank=0)).inv_quad_logdet(logdet=True)[1]
    assert below <= true <= above


def test_lazy_kernels_train_under_it():
    model, likelihood, x, y = problem(kernels=keops)
    solver = UnbiasedSolver(tolerance=1e-10, num_probes=300, generator=torch.Generator().manual_seed(0))
    exact = gradient(gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model), model, x, y)
    with gpytorch.settings.max_cholesky_size(1):
        covariance = model(x).lazy_covariance_matrix.evaluate_kernel()
        assert all(isinstance(part, KernelOperator) for part in covariance.linear_ops)
        found = gradient(UnbiasedMarginalLogLikelihood(likelihood, model, solver=solver), model, x, y)
    torch.testing.assert_close(found, exact, rtol=0.2, atol=0.02)


def test_what_is_not_unbiased_is_said():
    model, likelihood, x, y = problem()
    mll = UnbiasedMarginalLogLikelihood(likelihood, model, solver=UnbiasedSolver(rank=0, max_steps=2))
    with pytest.warns(UnbiasedSolveWarning, match="ended after 2 steps.*raise max_steps"):
        mll(model(x), y)
    with pytest.raises(ValueError, match="num_probes"):
        UnbiasedMarginalLogLikelihood(likelihood, model, num_probes=0)
    with pytest.raises(ValueError, match="one operator"):
        UnbiasedSolveOperator(to_linear_operator(torch.eye(3).expand(2, 3, 3)))


def test_it_stays_matrix_free_where_fast_computations_are_off():
    """As they are once botorch has been imported."""
    model, likelihood, x, y = problem()
    mll = UnbiasedMarginalLogLikelihood(likelihood, model, solver=UnbiasedSolver(rank=0, max_steps=2))
    with gpytorch.settings.fast_computations(False, False, False), pytest.warns(UnbiasedSolveWarning):
        mll(model(x), y)
