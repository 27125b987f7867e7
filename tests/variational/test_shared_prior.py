"""Latents that share a kernel without batch shape are as latents with equal kernels, and cost one of them."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import NaturalVariationalDistribution

from gpext.likelihoods import MultinomialLogitLikelihood
from gpext.training import fit
from gpext.variational import CollapsedBound, SiteVariationalStrategy
from tests.sparse_models import inputs

CLASSES, N, M = 3, 30, 6


class Softmax(gpytorch.models.ApproximateGP):
    """A latent function a class, whose one kernel is evaluated once, or expanded as if there were one of each."""

    def __init__(self, num_inducing=M, *, expand=False):
        Z = inputs(num_inducing, 2)
        q = NaturalVariationalDistribution(num_inducing, batch_shape=torch.Size([CLASSES]), mean_init_std=0.0).to(Z)
        super().__init__(SiteVariationalStrategy(self, Z, q))
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=torch.Size([CLASSES]))
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(2.5, ard_num_dims=2))
        self.expand = expand
        self.double()

    def forward(self, x):
        mean, covariance = self.mean_module(x), self.covar_module(x)
        if self.expand:
            covariance = covariance.expand(*mean.shape[:-1], *covariance.shape[-2:])
        return MultivariateNormal(mean, covariance)


@pytest.fixture
def data():
    x = inputs(N, 2, seed=1)
    return x, torch.arange(N) % CLASSES


def test_bound_and_derivatives_are_those_of_equal_kernels(data):
    x, y = data
    found = []
    for expand in (False, True):
        model, likelihood = Softmax(expand=expand), MultinomialLogitLikelihood(CLASSES)
        bound = CollapsedBound(model.variational_strategy, likelihood, x, y, bound="exact", block_size=8)
        bound.evaluate(gradient=False)
        bound.refresh()
        bound.evaluate()
        bound.commit()
        derivatives = [p.grad for p in model.hyperparameters()]
        value = model.variational_strategy.update(x, y, likelihood, 0.5, gradient="exact")
        model.eval()
        q = model(x[:5] + 0.1)
        found.append(
            [bound.refresh(), *derivatives, value, q.mean, q.variance, *(p.grad for p in model.hyperparameters())]
        )
    assert all(p is not None for p in found[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


def test_derivatives_agree_with_differences(data):
    x, y = data
    model, likelihood = Softmax(), MultinomialLogitLikelihood(CLASSES)
    bound = CollapsedBound(model.variational_strategy, likelihood, x, y, bound="exact")
    bound.evaluate(gradient=False)
    bound.refresh()
    bound.evaluate()
    raw = model.covar_module.base_kernel.raw_lengthscale
    slope, step, values = -N * raw.grad[0, 0].item(), 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            raw[0, 0] += sign * step
        values.append(float(bound.evaluate(gradient=False)))
        with torch.no_grad():
            raw[0, 0] -= sign * step
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=1e-6)


def test_the_kernel_is_evaluated_once_for_all_latents(data):
    cross = Softmax().variational_strategy.cross_blocks(data[0])
    assert cross.covariance.shape == (M, N)
    assert cross.variance.shape == (N,)
    assert cross.mean.shape == (CLASSES, N)


def test_a_bound_may_begin_at_the_posterior_of_other_inducing_points(data):
    """Nearly at its optimum: a step from there is worth more than several from the prior."""
    x, y = data
    likelihood = MultinomialLogitLikelihood(CLASSES)
    few, many = Softmax(12), Softmax(15)
    CollapsedBound(few.variational_strategy, likelihood, x, y, bound="exact").settle()
    first = CollapsedBound(few.variational_strategy, likelihood, x, y, bound="exact")
    first.settle(tolerance=1e-10)
    first.commit()
    warm = CollapsedBound(
        many.variational_strategy, likelihood, x, y, bound="exact", start=few.variational_strategy, block_size=8
    )
    cold = CollapsedBound(many.variational_strategy, likelihood, x, y, bound="exact")
    start = float(warm.evaluate(gradient=False))
    assert start > float(cold.evaluate(gradient=False))
    best = float(cold.settle(tolerance=1e-12))
    assert float(warm.settle(tolerance=1e-12)) == pytest.approx(best, rel=1e-9)
    assert best - start < 0.05


def test_marginals_are_those_of_predictions(data):
    x, y = data
    model, likelihood = Softmax(), MultinomialLogitLikelihood(CLASSES)
    model.variational_strategy.update(x, y, likelihood)
    mean, variance = model.variational_strategy.marginals(x)
    q = model.eval()(x)
    torch.testing.assert_close(mean, q.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(variance, q.variance, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("batch_size", [None, 10])
def test_training_ends_where_that_of_equal_kernels_does(data, batch_size):
    x, y = data
    ends = []
    for expand in (False, True):
        model, likelihood = Softmax(expand=expand), MultinomialLogitLikelihood(CLASSES)
        result = fit(VariationalELBO(likelihood, model, N), x, y, batch_size=batch_size, max_steps=5, progress=False)
        ends.append((result.objective, model.covar_module.outputscale.item()))
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


def test_gpytorch_objectives_take_the_model(data):
    x, y = data
    values = []
    for expand in (False, True):
        model, likelihood = Softmax(expand=expand), MultinomialLogitLikelihood(CLASSES)
        objective = VariationalELBO(likelihood, model, N)
        value = objective(model(x), y)
        value.sum().backward()
        values.append((value, model.covar_module.raw_outputscale.grad))
    torch.testing.assert_close(values[0], values[1], rtol=1e-8, atol=1e-8)
