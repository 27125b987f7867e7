"""LatentGP with inducing inputs: every rule under the sparse prior, in O(N M^2) time."""

import copy
import time

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

import gpext
from gpext.inference import CAVI, EP, KL, Laplace, Status
from gpext.likelihoods import BernoulliLogitLikelihood, StudentTLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models import LatentGP
from gpext.posteriors import LowRankPosterior
from gpext.variational import kmeans_inducing_points
from tests.members import F64

RULES = [EP(), EP(power=0.5), KL(), Laplace(), CAVI()]
rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{type(rule).__name__}-{getattr(rule, 'power', '')}")


class Model(LatentGP):
    def __init__(self, x, y, likelihood, rule, z=None):
        super().__init__(x, y, likelihood, rule, inducing_inputs=z)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.covar_module.base_kernel.lengthscale = 0.5
        self.to(x)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def data(n=60, dtype=F64):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(n, 1, generator=generator, dtype=F64)
    y = torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(n, generator=generator, dtype=F64)
    y[::9] += 4 * torch.randn(len(y[::9]), generator=generator, dtype=F64)
    return x.to(dtype), y.to(dtype)


def made(rule, z=None, n=60, dtype=F64):
    x, y = data(n, dtype)
    likelihood = StudentTLikelihood().to(dtype)
    likelihood.noise = torch.tensor(0.02, dtype=dtype)
    model = Model(x, y, likelihood, rule, z)
    return model, LatentMarginalLogLikelihood(likelihood, model), x, y


@rules
def test_with_every_input_inducing_it_is_the_exact_model(rule):
    x, _ = data()
    (exact, mll, _, y), (sparse, sparse_mll, *_) = made(rule), made(rule, x)
    sparse.variational_strategy._jitter_val = 1e-10
    assert isinstance(sparse.result.conditioned, LowRankPosterior)
    torch.testing.assert_close(sparse_mll(sparse(x), y), mll(exact(x), y), rtol=0, atol=1e-6)
    new = torch.linspace(-0.5, 4.5, 7, dtype=F64).unsqueeze(-1)
    ours, theirs = sparse.eval()(new), exact.eval()(new)
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.covariance_matrix, theirs.covariance_matrix, rtol=0, atol=1e-5)
    torch.testing.assert_close(sparse.result.log_loo, exact.result.log_loo, rtol=0, atol=1e-5)


@rules
def test_gradients_agree_with_finite_differences(rule):
    z = torch.linspace(0.2, 3.8, 7, dtype=F64).unsqueeze(-1)
    model, mll, x, y = made(type(rule)(**{**vars(rule), "tolerance": 1e-9}), z)
    (-mll(model(x), y)).backward()
    for name, parameter in model.named_parameters():
        numeric = torch.zeros_like(parameter)
        for j in range(parameter.numel()):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.view(-1)[j] += sign * 1e-5
                    values.append(-mll(model(x), y).item())
                    parameter.view(-1)[j] -= sign * 1e-5
            numeric.view(-1)[j] = (values[0] - values[1]) / 2e-5
        torch.testing.assert_close(parameter.grad, numeric, rtol=2e-5, atol=2e-7, msg=lambda m, name=name: name + m)


@pytest.mark.slow
@rules
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_trains_and_predicts(rule, dtype):
    x, _ = data(dtype=dtype)
    model, mll, x, y = made(rule, kmeans_inducing_points(x, 10), dtype=dtype)
    before = mll(model(x), y).item()
    gpext.fit(mll, x, y, max_steps=10, progress=False)
    assert mll(model.train()(x), y).item() > before
    inputs = torch.linspace(0.3, 3.7, 30, dtype=dtype)
    with torch.no_grad():
        predictive = model.eval()(inputs)
    assert predictive.mean.dtype == dtype
    assert float((predictive.mean - torch.sin(2 * inputs)).abs().mean()) < 0.12
    assert bool((predictive.variance > 0).all())


def test_state_is_restored_and_copied():
    z = torch.linspace(0, 4, 8, dtype=F64).unsqueeze(-1)
    model, *_ = made(EP(), z)
    new = torch.linspace(0, 4, 5, dtype=F64)
    expected = model.eval()(new).mean
    other, *_ = made(EP(), z + 0.1)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.eval()(new).mean, expected)
    torch.testing.assert_close(copy.deepcopy(model)(new).mean, expected)


def test_a_thousand_data_converge_in_a_moment():
    x, _ = data(1000)
    model, *_ = made(EP(), kmeans_inducing_points(x, 20), n=1000)
    started = time.perf_counter()
    result = model.result
    assert result.status is Status.CONVERGED
    assert time.perf_counter() - started < 5  # about the time of a dense one


def test_classes_too():
    x, y = data(200)
    model = Model(x, (y > 0).to(F64), BernoulliLogitLikelihood(), EP(), kmeans_inducing_points(x, 10))
    assert model.result.status is Status.CONVERGED
    with torch.no_grad():
        probs = model.likelihood(model.eval()(torch.tensor([0.8, 2.3], dtype=F64))).probs
    assert float(probs[0]) > 0.8
    assert float(probs[1]) < 0.2


def test_errors_say_what_was_expected():
    with pytest.raises(ValueError, match=r"expected inducing_inputs \(M, 1\)"):
        made(EP(), torch.zeros(3, 2, dtype=F64))
    with pytest.raises(TypeError, match="convert"):
        made(EP(), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="finite"):
        made(EP(), torch.full((3, 1), torch.nan, dtype=F64))
