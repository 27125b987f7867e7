"""Unbiased solves under gpytorch's own objective: derivatives against exact ones, by z-scores."""

import unittest
from dataclasses import replace

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase

from gpext.kernels import keops
from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.operators import KernelOperator, UnbiasedSolveOperator, UnbiasedSolver, UnbiasedSolveWarning
from tests.solvers.test_conjugate_gradients import system
from tests.statistics import misfit, t_threshold

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


@pytest.mark.slow
@pytest.mark.parametrize("fixed_noise", [False, True])
@pytest.mark.parametrize("rank", [0, 5])
def test_gradients_are_unbiased_for_every_parameter(rank, fixed_noise):
    model, likelihood, x, y = problem(fixed_noise=fixed_noise)
    exact = gradient(gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model), model, x, y)
    solver = UnbiasedSolver(rank=rank, tolerance=0.3, generator=torch.Generator().manual_seed(0))
    mll = UnbiasedMarginalLogLikelihood(likelihood, model, solver=solver)
    draws = torch.stack([gradient(mll, model, x, y) for _ in range(400)])
    assert misfit(draws, exact, rounding=1e-12) < 1
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


@pytest.mark.parametrize("rank", [0, 20])
def test_a_log_determinant_by_lanczos_is_within_its_standard_error(rank):
    model, likelihood, x, _ = problem()
    covariance = likelihood(model(x)).lazy_covariance_matrix.evaluate_kernel()
    true = torch.logdet(covariance.to_dense())
    solver = UnbiasedSolver(
        rank=rank, log_det="lanczos", lanczos_probes=30, generator=torch.Generator().manual_seed(0), tolerance=1e-10
    )
    operator = UnbiasedSolveOperator(covariance, solver=solver)
    estimate, error = operator.lanczos_log_det()
    assert 0 < error < (5.0 if rank == 0 else 0.5)
    assert abs(estimate - true) < t_threshold(29) * error
    value = operator.inv_quad_logdet(logdet=True)[1]
    assert value.requires_grad
    assert abs(value - true) < t_threshold(29) * error
    exact = UnbiasedSolveOperator(covariance, solver=replace(solver, lanczos_probes=N)).lanczos_log_det()
    torch.testing.assert_close(exact, (true.detach(), torch.zeros((), dtype=F64)), rtol=1e-10, atol=1e-10)


def test_the_derivative_of_a_solve_takes_one_more_solve_of_as_many_columns():
    A = torch.eye(200, dtype=F64).requires_grad_()
    asked = []

    class Counted(UnbiasedSolveOperator):
        def _estimates(self, b, number, **options):
            asked.append(tuple(b.shape))
            return super()._estimates(b, number, **options)

    b = torch.ones(200, 3, dtype=F64)
    Counted(to_linear_operator(A)).solve(b).sum().backward()
    assert asked == [(200, 3), (200, 3)]
    torch.testing.assert_close(A.grad, -3 * torch.ones_like(A))


def test_lazy_kernels_train_under_it():
    model, likelihood, x, y = problem(kernels=keops)
    solver = UnbiasedSolver(tolerance=1e-10, num_probes=300, generator=torch.Generator().manual_seed(0))
    exact = gradient(gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model), model, x, y)
    with gpytorch.settings.max_cholesky_size(1):
        covariance = model(x).lazy_covariance_matrix.evaluate_kernel()
        assert all(isinstance(part, KernelOperator) for part in covariance.linear_ops)
        found = gradient(UnbiasedMarginalLogLikelihood(likelihood, model, solver=solver), model, x, y)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)  # as many probes as data: the trace is exact


def test_what_is_not_unbiased_is_said():
    model, likelihood, x, y = problem()
    mll = UnbiasedMarginalLogLikelihood(likelihood, model, solver=UnbiasedSolver(rank=0, max_steps=2))
    with pytest.warns(UnbiasedSolveWarning, match="ended after 2 steps.*raise max_steps"):
        mll(model(x), y)
    with pytest.raises(ValueError, match="num_probes"):
        UnbiasedMarginalLogLikelihood(likelihood, model, num_probes=0)
    with pytest.raises(ValueError, match="log_det must be"):
        UnbiasedSolver(log_det="exact")


def test_it_stays_matrix_free_where_fast_computations_are_off():
    """They are off once botorch has been imported."""
    model, likelihood, x, y = problem()
    mll = UnbiasedMarginalLogLikelihood(likelihood, model, solver=UnbiasedSolver(rank=0, max_steps=2))
    with gpytorch.settings.fast_computations(False, False, False), pytest.warns(UnbiasedSolveWarning):
        mll(model(x), y)


@pytest.mark.slow
def test_derivatives_need_two_estimates():
    """With one estimate in both places, as many draws show the bias."""

    class Twice(UnbiasedSolveOperator):
        def _estimates(self, b, number, **options):
            return super()._estimates(b, 1, **options).expand(number, *b.shape)

    A, b = system(15, 1, noise=0.1)
    A, y = A.requires_grad_(), b[:, 0]
    (exact,) = torch.autograd.grad(y @ torch.linalg.solve(A, y), [A])
    direction = torch.eye(15, dtype=F64)

    def drawn(operator):
        solver = UnbiasedSolver(tolerance=1.0, generator=torch.Generator().manual_seed(0))
        draws = []
        for _ in range(600):
            (found,) = torch.autograd.grad(operator(to_linear_operator(A), solver=solver).inv_quad(y), [A])
            draws.append((found * direction).sum().view(1))
        return torch.stack(draws)

    expected = (exact * direction).sum()
    assert misfit(drawn(UnbiasedSolveOperator), expected) < 1
    biased = drawn(Twice)
    assert biased.mean() < expected
    assert misfit(biased, expected) > 1


def test_nothing_is_done_for_derivatives_that_nobody_wants():
    model, likelihood, x, y = problem()
    covariance = likelihood(model(x)).lazy_covariance_matrix.evaluate_kernel()
    columns, products, derivatives = [], [], []

    class Counted(UnbiasedSolveOperator):
        def _estimates(self, b, number, **options):
            columns.append(b.size(-1))
            return super()._estimates(b, number, **options)

    matmul, derivative = covariance.matmul, covariance._bilinear_derivative
    covariance.matmul = lambda v: products.append(v.size(-1)) or matmul(v)
    covariance._bilinear_derivative = lambda u, v: derivatives.append(v.size(-1)) or derivative(u, v)
    operator = Counted(covariance, solver=UnbiasedSolver(num_probes=3, tolerance=1e-12))
    with torch.no_grad():
        value, log_det = operator.inv_quad_logdet(y, logdet=True)
    assert (columns, products) == ([1], [])
    torch.testing.assert_close(value, y @ torch.linalg.solve(covariance.to_dense(), y), rtol=1e-8, atol=1e-8)
    again = operator.inv_quad_logdet(y, logdet=True)
    sum(again).backward()
    assert (columns, products, derivatives) == ([1, 4], [], [4])
    torch.testing.assert_close((value, log_det), again, rtol=1e-8, atol=1e-8)
    fixed = Counted(to_linear_operator(covariance.to_dense().detach()), solver=operator.solver)
    b = y.clone().requires_grad_()
    (by_b,) = torch.autograd.grad(fixed.inv_quad(b), [b])
    torch.testing.assert_close(by_b, 2 * torch.linalg.solve(fixed.to_dense(), y), rtol=1e-8, atol=1e-8)
    assert columns[2:] == [1]
    with torch.no_grad():
        assert operator.inv_quad_logdet(logdet=True)[1] == log_det


# ---- bad input ------------------------------------------------------------------------------------------------------


def plain_problem(x, y, *, noise):
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-15))
    likelihood = likelihood.to(x)
    likelihood.noise = noise
    return Model(x, y, likelihood).to(x).train(), likelihood


def estimates(x, y, *, noise, draws, **options):
    """Gradients (draws, P) and their exact mean."""
    model, likelihood = plain_problem(x, y, noise=noise)
    with gpytorch.settings.max_cholesky_size(10_000):
        exact = gradient(gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model), model, x, y)
    solver = UnbiasedSolver(generator=torch.Generator().manual_seed(0), **options)
    mll = UnbiasedMarginalLogLikelihood(likelihood, model, solver=solver)
    return torch.stack([gradient(mll, model, x, y) for _ in range(draws)]), exact


@pytest.mark.parametrize("rank", [None, 0, 5])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_below_every_threshold_gradients_are_exact_but_for_rounding(n, rank):
    _, _, x, y = problem()
    found, exact = estimates(x[:n], y[:n], noise=0.1, draws=2, rank=rank, num_probes=3)
    torch.testing.assert_close(found, exact.expand_as(found), rtol=5e-6, atol=5e-9)


def duplicates():
    _, _, x, y = problem()
    return torch.cat([x[:20], x[:20]]), torch.cat([y[:20], y[:20] + 1e-4])


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "rank"), [(1e-2, None), (1e-2, 0), (1e-8, None), (1e-8, 0), (4e-11, None)])
def test_duplicate_inputs(noise, rank):
    """The condition numbers are 4e3, 4e9 and 1e12, where plain conjugate gradients would fail."""
    x, y = duplicates()
    found, exact = estimates(x, y, noise=noise, rank=rank, num_probes=1, draws=100)
    assert misfit(found, exact, rounding=5e-6 * exact.abs() + 5e-9) < 1


def test_what_rounding_has_taken_away_is_said():
    x, y = duplicates()
    model, likelihood = plain_problem(x.float(), y.float(), noise=4e-11)
    mll = UnbiasedMarginalLogLikelihood(likelihood, model, solver=UnbiasedSolver(rank=0))
    with pytest.warns(UnbiasedSolveWarning, match="not unbiased: .*(raise max_steps or the noise|work in float64)"):
        mll(model(x.float()), y.float())


def test_numbers_that_are_not_finite_are_refused_or_said():
    _, likelihood, x, y = problem()
    bad = x.index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(torch.nan, dtype=F64))
    with pytest.raises(ValueError, match=r"inputs must be finite; got nan at index \(3, 1\)"):
        UnbiasedMarginalLogLikelihood(likelihood, Model(bad, y, likelihood))
    with pytest.raises(ValueError, match=r"targets must be finite; got inf at index"):
        UnbiasedMarginalLogLikelihood(likelihood, Model(x, y / 0, likelihood))
    A = torch.eye(5, dtype=F64)
    A[2, 2] = torch.nan
    with pytest.warns(UnbiasedSolveWarning, match="not finite: look for them among inputs and parameters"):
        UnbiasedSolveOperator(to_linear_operator(A)).solve(torch.ones(5, dtype=F64))
    for options, error, match in (
        ({"rank": -1}, ValueError, "rank must not be negative"),
        ({"rank": 2.5}, TypeError, r"rank must be a whole number or None; got 2\.5"),
        ({"max_steps": -1}, ValueError, "max_steps must not be negative"),
        ({"num_probes": 2.5}, TypeError, "num_probes must be a whole number"),
        ({"tolerance": -0.1}, ValueError, "tolerance must not be negative"),
        ({"survival": "matched"}, TypeError, "survival must be a Survival or None; got 'matched'"),
        ({"keep": True}, TypeError, "keep must be a KeptPreconditioner or None"),
        ({"generator": 3}, TypeError, "generator must be a Generator or None"),
    ):
        with pytest.raises(error, match=match):
            UnbiasedSolver(**options)
    with pytest.raises(TypeError, match=r"expected a gpext\.operators\.UnbiasedSolver; got int"):
        UnbiasedMarginalLogLikelihood(likelihood, Model(x, y, likelihood), solver=3)


# ---- linear_operator's own suite, with complete solves and all probes -----------------------------------------------

EXACT = UnbiasedSolver(num_probes=5, tolerance=1e-12, max_steps=50, log_det="lanczos")


class TestUnbiasedSolveOperator(LinearOperatorTestCase, unittest.TestCase):
    seed = 0
    should_call_cg = False  # linear_operator's; here solves are gpext's own

    def create_linear_op(self):
        return UnbiasedSolveOperator(to_linear_operator(self.matrix().requires_grad_()), solver=EXACT)

    def matrix(self):
        root = torch.randn(5, 5)
        return root @ root.mT + 2 * torch.eye(5)

    def evaluate_linear_op(self, linear_op):
        return linear_op.to_dense()


@pytest.mark.filterwarnings("ignore:Sparse invariant")  # by torch, for linear_operator's interpolation
class TestUnbiasedSolveOperatorPreconditioned(TestUnbiasedSolveOperator):
    """A lazy kernel with noise, as a likelihood returns it."""

    def create_linear_op(self):
        x = torch.tensor([[0.0], [1.7], [3.1], [4.9], [7.5]]).requires_grad_()
        K = KernelOperator(torch.tensor([[1.5]]).requires_grad_(), x, profiles=("rbf",), square=True)
        noise = torch.linspace(0.5, 1.0, 5).requires_grad_()
        return UnbiasedSolveOperator(K.add_diagonal(noise), solver=replace(EXACT, rank=3))

    def test_it_is_preconditioned(self):
        assert self.create_linear_op().preconditioner.rank == 3


class TestUnbiasedSolveOperatorBatch(TestUnbiasedSolveOperator):
    def matrix(self):
        root = torch.randn(3, 5, 5)
        return root @ root.mT + 2 * torch.eye(5)


def test_a_matrix_is_an_operator_and_a_rectangle_is_not():
    A, b = system(30, 1, noise=1.0)
    solver = UnbiasedSolver(tolerance=0.0, generator=torch.Generator().manual_seed(0))
    x = UnbiasedSolveOperator(A, solver=solver).solve(b[:, 0])
    torch.testing.assert_close(x, torch.linalg.solve(A, b[:, 0]), rtol=1e-8, atol=1e-10)
    with pytest.raises(ValueError, match="square"):
        UnbiasedSolveOperator(A[:, :5])
