"""The preconditioner of a lazy kernel: with neighbours or in single precision if nothing requires L alone."""

import copy
from functools import partial

import gpytorch
import pytest
import torch
from linear_operator.operators import ConstantDiagLinearOperator

from gpext.kernels import keops
from gpext.operators import KeptPreconditioner, UnbiasedSolveOperator, UnbiasedSolver
from gpext.solvers import (
    LowRankPreconditioner,
    NeighbourPreconditioner,
    SinglePrecisionPreconditioner,
    choose_preconditioner,
    partial_cholesky,
    single_precision,
)
from tests.statistics import misfit, t_threshold

F64 = torch.float64
N = 500


@pytest.fixture(autouse=True)
def cheap(monkeypatch):
    """Make neighbours cost nothing: at the sizes of tests they would never pay."""
    monkeypatch.setattr(choose_preconditioner, "_TRIAL", 0.0)
    monkeypatch.setattr(choose_preconditioner, "_GROUPED", 0.0)


@pytest.fixture
def enough(monkeypatch):
    """Make few data enough for a factor in single precision, with even smaller panels."""
    monkeypatch.setattr(single_precision, "_FEWEST", 1)
    monkeypatch.setattr(single_precision, "_HEIGHT", 128)


def single():
    return keops.MaternKernel(nu=0.5).double()


def several():
    """A sum of a product over different columns, and of a scaled kernel."""
    first = keops.MaternKernel(nu=0.5, active_dims=[0]) * keops.RBFKernel(active_dims=[1, 2])
    return (first + keops.ScaleKernel(keops.MaternKernel(nu=0.5))).double()


def operator(kernel=single, dtype=F64, **options):
    x = torch.rand(N, 3, generator=torch.Generator().manual_seed(0), dtype=F64).to(dtype)
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(1):
        K = kernel().to(dtype)(x).evaluate_kernel()
    A = K.add_diagonal(torch.full((N,), 1e-2, dtype=dtype))
    options = {"tolerance": 1e-7, "generator": torch.Generator().manual_seed(0), **options}
    return UnbiasedSolveOperator(A, solver=UnbiasedSolver(**options))


@pytest.mark.parametrize("kernel", [single, several])
def test_it_has_neighbours_and_solves(kernel):
    A = operator(kernel, tolerance=0.1, lanczos_probes=40)
    assert isinstance(A.preconditioner, NeighbourPreconditioner)
    dense = A.base.to_dense()
    b = torch.randn(N, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    found = A.solve_to(b, 1e-10)
    torch.testing.assert_close(found.solution, torch.linalg.solve(dense, b), rtol=1e-7, atol=1e-7)
    without = operator(kernel, rank=A.preconditioner.rank)
    assert isinstance(without.preconditioner, LowRankPreconditioner)
    assert found.num_steps < 0.9 * without.solve_to(b, 1e-10).num_steps
    true = torch.logdet(dense)
    estimate, error = A.lanczos_log_det()
    assert abs(float(estimate - true)) < t_threshold(39) * float(error) + 1e-6
    assert abs(float(A.inv_quad_logdet(logdet=True)[1] - true)) < abs(float(without.preconditioner.log_det - true))


@pytest.mark.parametrize("kernel", [single, several])
def test_it_is_in_single_precision_and_solves(enough, kernel):
    A = operator(kernel, tolerance=0.1, lanczos_probes=40, lanczos_steps=10)
    assert isinstance(A.preconditioner, SinglePrecisionPreconditioner)
    dense = A.base.to_dense()
    b = torch.randn(N, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    found = A.solve_to(b, 1e-10)
    torch.testing.assert_close(found.solution, torch.linalg.solve(dense, b), rtol=1e-7, atol=1e-7)
    assert found.num_steps <= 4
    true = torch.logdet(dense)
    estimate, error = A.lanczos_log_det()
    assert abs(float(estimate - true)) < t_threshold(39) * float(error) + 1e-8
    torch.testing.assert_close(A.inv_quad_logdet(logdet=True)[1], true, rtol=0, atol=1e-2)


@pytest.mark.parametrize("options", [{"rank": 20}, {"keep": KeptPreconditioner()}, {"controlled": True}])
def test_where_the_low_rank_alone_is_wanted_it_is_alone(enough, options):
    assert isinstance(operator(**options).preconditioner, LowRankPreconditioner)


def test_kernels_that_do_not_say_between_which_inputs_they_are():
    x = torch.rand(N, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    kernel = gpytorch.kernels.MaternKernel(nu=0.5).double()
    noise = ConstantDiagLinearOperator(torch.tensor([1e-2], dtype=F64), N)
    for covariance in (kernel(x), (kernel + single())(x)):
        P = UnbiasedSolveOperator(covariance.evaluate_kernel() + noise).preconditioner
        assert isinstance(P, LowRankPreconditioner)


def test_the_same_seed_makes_the_same_and_copies_are_equal():
    A = operator()
    b = torch.ones(N, 1, dtype=F64)
    expected = A.preconditioner(b)
    for other in (operator(), copy.deepcopy(A)):
        assert torch.equal(other.preconditioner(b), expected)


def test_in_single_precision_it_is_the_same_for_the_same_seed_too(enough):
    A, b = operator(), torch.ones(N, 1, dtype=F64)
    assert isinstance(A.preconditioner, SinglePrecisionPreconditioner)
    for other in (operator(), copy.deepcopy(A)):
        assert torch.equal(other.preconditioner(b), A.preconditioner(b))


def test_float32(enough):
    A = operator(dtype=torch.float32, tolerance=1e-2)
    b = torch.ones(N, 1)
    assert isinstance(A.preconditioner, NeighbourPreconditioner)
    assert A.preconditioner(b).dtype == torch.float32
    found = A.solve_to(b, 1e-4).solution
    expected = torch.linalg.solve(A.base.to_dense().double(), b.double())
    assert float((found - expected).norm() / expected.norm()) < 1e-2


def misfit_of_gradients(is_of_kind):
    """Return the misfit of 200 gradients of y' A^-1 y + log|A| in every parameter."""
    x = torch.rand(60, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    y = torch.randn(60, 1, generator=torch.Generator().manual_seed(1), dtype=F64)
    kernel = keops.ScaleKernel(keops.MaternKernel(nu=0.5)).double()
    kernel.base_kernel.lengthscale = 0.3
    parameters = list(kernel.parameters())
    generator = torch.Generator().manual_seed(0)

    def gradient(exact):
        with gpytorch.settings.max_cholesky_size(1):
            A = kernel(x).evaluate_kernel().add_diagonal(torch.full((60,), 0.1, dtype=F64))
        if exact:
            value = (y * torch.linalg.solve(A.to_dense(), y)).sum() + torch.logdet(A.to_dense())
        else:
            operator = UnbiasedSolveOperator(A, solver=UnbiasedSolver(tolerance=0.3, generator=generator))
            value = sum(operator.inv_quad_logdet(y, logdet=True))
            assert isinstance(operator.preconditioner, is_of_kind)
        return torch.stack([g.sum() for g in torch.autograd.grad(value, parameters)])

    draws = torch.stack([gradient(exact=False) for _ in range(200)])
    return misfit(draws, gradient(exact=True))


@pytest.mark.slow
def test_gradients_with_neighbours_are_unbiased(monkeypatch):
    """A matrix this small has neighbours only at a low rank."""
    monkeypatch.setattr(choose_preconditioner, "partial_cholesky", partial(partial_cholesky, rank=5))
    monkeypatch.setattr(choose_preconditioner, "_WORTH", torch.inf)
    assert misfit_of_gradients(NeighbourPreconditioner) < 1


@pytest.mark.slow
def test_gradients_with_a_factor_in_single_precision_are_unbiased(monkeypatch):
    """A matrix this small would not have one."""
    monkeypatch.setattr(choose_preconditioner, "_single_precision_costs_less", lambda *args: True)
    monkeypatch.setattr(single_precision, "_HEIGHT", 16)
    assert misfit_of_gradients(SinglePrecisionPreconditioner) < 1
