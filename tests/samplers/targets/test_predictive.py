"""Predictions over draws by solves without a factorisation, against dense ones."""

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood

from gpext.kernels import keops
from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.operators import UnbiasedSolver
from gpext.samplers import LogPosterior, SGLDSampler
from gpext.samplers.targets import predictive
from tests.samplers.hyper_cases import F64, problem


class Narrow(gpytorch.models.ExactGP):
    """A GP over numbers."""

    def __init__(self, x, likelihood):
        super().__init__(x, x[:, 0].sin(), likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), RBFKernel()

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Wide(gpytorch.models.ExactGP):
    """A sum of kernels with a mean that is not zero, one of them lazy."""

    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.LinearMean(2)
        self.covar_module = ScaleKernel(keops.MaternKernel(nu=1.5)) + RBFKernel(ard_num_dims=2)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def wide(likelihood, dtype=F64):
    x = torch.rand(60, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    model = Wide(x.to(dtype), (5 * x.sum(-1)).sin().to(dtype), likelihood).to(dtype)
    with torch.no_grad():
        model.mean_module.weights.copy_(torch.tensor([[0.7], [-0.4]]))
        model.mean_module.bias.fill_(0.2)
    return model


def likelihoods():
    fixed = torch.linspace(0.01, 0.2, 60, dtype=F64)
    return [gpytorch.likelihoods.GaussianLikelihood(), gpytorch.likelihoods.FixedNoiseGaussianLikelihood(fixed)]


@pytest.mark.parametrize("which", [0, 1])
def test_solves_predict_what_a_factorisation_does(which, monkeypatch):
    likelihood = likelihoods()[which]
    model = wide(likelihood)
    monkeypatch.setattr(predictive, "_CHUNK", 3)
    new = torch.rand(7, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
    solver = UnbiasedSolver(rank=10)
    target = LogPosterior(UnbiasedMarginalLogLikelihood(likelihood, model, solver=solver))
    mean, variance = predictive.predictive(target, new)
    # by hand: in float64, without gpytorch's rules of prediction
    with torch.no_grad():
        K = model.covar_module(torch.cat([model.train_inputs[0], new])).to_dense()
        m = model.mean_module(torch.cat([model.train_inputs[0], new]))
        noise = likelihood.noise.expand(60) if which == 0 else likelihood.noise
        A, cross = K[:60, :60] + noise.diag(), K[:60, 60:]
        gain = torch.linalg.solve(A, cross).mT
        expected = K[60:, 60:].diagonal() - (gain * cross.mT).sum(-1)
        torch.testing.assert_close(mean, m[60:] + gain @ (model.train_targets - m[:60]), rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(variance, expected + (likelihood.noise if which == 0 else 0), rtol=1e-7, atol=1e-7)


def test_single_precision_has_its_own_tolerance():
    single, double = (
        predictive.predictive(
            LogPosterior(UnbiasedMarginalLogLikelihood(model.likelihood, model)),
            torch.full((2, 2), 0.3, dtype=dtype),
        )
        for dtype in (torch.float32, F64)
        for model in [wide(gpytorch.likelihoods.GaussianLikelihood(), dtype)]
    )
    for found, exact in zip(single, double, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-3)


def test_over_draws_and_inputs_of_one_dimension_without_a_second_one():
    exact = problem()
    found = SGLDSampler(UnbiasedMarginalLogLikelihood(exact.likelihood, exact.model)).run(
        3, 2, 0, step_size=0.1, progress=False
    )
    new = torch.tensor([0.3, 2.2, 9.0], dtype=F64)
    mixture = found.predict(new)
    dense = LogPosterior(exact, logarithms=True)
    each = []
    for row in found.raw.transpose(0, 1).flatten(0, 1):
        dense.moved.write(row)
        each.append(torch.stack(predictive.predictive(dense, new)))
    means, variances = torch.stack(each).unbind(1)
    torch.testing.assert_close(mixture.mean, means.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mixture.variance, variances.mean(0) + means.var(0, correction=0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("how", ["indefinite", "nan"])
def test_a_draw_without_a_covariance_is_named(unbiased, how, monkeypatch):
    exact = problem()
    mll = UnbiasedMarginalLogLikelihood(exact.likelihood, exact.model) if unbiased else exact
    found = SGLDSampler(mll).run(3, 1, 0, step_size=0.1, progress=False)
    forward = type(found.target.model.covar_module).forward

    def broken(kernel, x1, x2, **options):
        K = forward(kernel, x1, x2, **options)
        worse = K - torch.ones_like(K) if how == "indefinite" else K * torch.nan
        is_draw = abs(float(kernel.lengthscale) / float(found.draws["covar_module.lengthscale"][0, 1]) - 1) < 1e-9
        return worse if is_draw else K

    monkeypatch.setattr(type(found.target.model.covar_module), "forward", broken)
    with pytest.raises(FloatingPointError, match=r"draw 1, .*covar_module.lengthscale \[\["):
        found.predict(torch.tensor([[0.3]], dtype=F64))
    assert found.target.model.training


def test_a_solve_that_runs_out_of_steps_names_the_cure():
    exact = problem(size=40)
    solver = UnbiasedSolver(rank=0, max_steps=2)
    target = LogPosterior(UnbiasedMarginalLogLikelihood(exact.likelihood, exact.model, solver=solver))
    with pytest.raises(FloatingPointError, match=r"after 2 steps.*max_steps"):
        predictive.predictive(target, torch.zeros(1, 1, dtype=F64))


@pytest.mark.parametrize("objective", [ExactMarginalLogLikelihood, UnbiasedMarginalLogLikelihood])
@pytest.mark.parametrize("learnt", [False, True])
def test_fixed_noise_of_the_training_data_is_not_that_of_new_inputs(objective, learnt):
    """gpytorch adds it if the number of inputs happens to be the same."""
    x = torch.linspace(0, 3, 8, dtype=F64).unsqueeze(-1)
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.full((8,), 0.5, dtype=F64), learnt)
    target = LogPosterior(objective(likelihood, Narrow(x, likelihood).double()))
    new = x + 0.1
    mean, variance = predictive.predictive(target, new)
    fewer = predictive.predictive(target, new[:3])
    torch.testing.assert_close((mean[:3], variance[:3]), fewer, rtol=1e-6, atol=1e-6)
    noise = torch.linspace(0.1, 0.8, 8, dtype=F64)
    torch.testing.assert_close(
        predictive.predictive(target, new, noise), (mean, variance + noise), rtol=1e-6, atol=1e-6
    )
    other = gpytorch.likelihoods.GaussianLikelihood()
    target = LogPosterior(objective(other, Narrow(x, other).double()))
    with pytest.raises(TypeError, match="only a FixedNoiseGaussianLikelihood takes noise; got GaussianLikelihood"):
        predictive.predictive(target, new, noise)
