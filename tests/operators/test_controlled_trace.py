"""Derivatives of log|A| that are mostly given by the preconditioner: unbiased, with less noise than without."""

import pytest
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator import to_linear_operator

from gpext.kernels import keops
from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.operators import UnbiasedSolveOperator, UnbiasedSolver
from tests.operators.test_unbiased_solve import F64, N, gradient, problem
from tests.statistics import misfit


def estimates(number, **options):
    model, likelihood, x, y = problem(kernels=keops)
    solver = UnbiasedSolver(generator=torch.Generator().manual_seed(0), **options)
    mll = UnbiasedMarginalLogLikelihood(likelihood, model, solver=solver)
    exact = gradient(ExactMarginalLogLikelihood(likelihood, model), model, x, y)
    return torch.stack([gradient(mll, model, x, y) for _ in range(number)]), exact


@pytest.mark.slow
def test_they_are_unbiased_and_have_less_noise():
    draws, exact = estimates(200, rank=36, controlled=True, tolerance=1e-8)
    assert misfit(draws, exact, rounding=1e-12) < 1
    plain, _ = estimates(200, rank=36, tolerance=1e-8)
    learnt = plain.std(0) > 1e-6  # log|A| does not depend on the mean
    assert float((draws.std(0) / plain.std(0))[learnt].max()) < 0.3


@pytest.mark.parametrize("rank", [3, 20])
def test_with_as_many_probes_as_data_solved_to_the_end_they_are_exact(rank):
    model, likelihood, x, _ = problem()
    covariance = likelihood(model(x)).lazy_covariance_matrix.evaluate_kernel()
    solver = UnbiasedSolver(num_probes=N, tolerance=1e-13, rank=rank, controlled=True)
    parameters = [p for name, p in model.named_parameters() if "mean" not in name]
    found = torch.autograd.grad(UnbiasedSolveOperator(covariance, solver=solver).logdet(), parameters)
    exact = torch.autograd.grad(likelihood(model(x)).covariance_matrix.logdet(), parameters)
    for ours, dense in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-8, atol=1e-8)


def test_without_a_preconditioner_they_are_refused():
    A = torch.eye(3, dtype=F64, requires_grad=True)
    operator = UnbiasedSolveOperator(to_linear_operator(A), solver=UnbiasedSolver(controlled=True))
    with pytest.raises(ValueError, match="need a preconditioner"):
        operator.logdet()
