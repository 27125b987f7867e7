"""A LatentGP whose likelihood has several latents: training, predictions and restoring a state dict."""

import math

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal

import gpext
from gpext.inference import Laplace, Taylor
from gpext.likelihoods import DirichletLikelihood, MultinomialLogitLikelihood, VonMisesLikelihood
from tests.latent_cases import CASES

pytestmark = pytest.mark.filterwarnings("ignore::gpext.inference.DenseBlocksWarning")


class Model(gpext.models.LatentGP):
    def __init__(self, x, y, likelihood, rule, z=None):
        super().__init__(x, y, likelihood, rule, inducing_inputs=z)
        batch = torch.Size([likelihood.num_latents])
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(batch_shape=batch), batch_shape=batch
        )

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def data(name, x):
    generator = torch.Generator().manual_seed(0)
    noise = 0.2 * torch.randn(len(x), 3, dtype=x.dtype, generator=generator)
    if name == "von_mises":
        return VonMisesLikelihood(), torch.remainder(x + noise[:, 0], 2 * math.pi)
    if name == "dirichlet":
        return DirichletLikelihood(3), (torch.stack([x.sin(), x.cos(), 0 * x], -1) + noise).softmax(-1)
    if name == "multinomial":
        return MultinomialLogitLikelihood(3), (x + noise[:, 0]).floor().clamp(0, 2)
    return CASES["family_gaussian"].make().to(x.dtype), torch.stack([x.sin(), x.cos()], -1) + noise[:, :2]


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Laplace(), Taylor()])
@pytest.mark.parametrize("name", ["von_mises", "dirichlet", "multinomial", "family"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trains_predicts_and_is_restored(name, rule, dtype):
    x, new = torch.linspace(0, 3, 25, dtype=dtype), torch.linspace(0, 3, 4, dtype=dtype)
    likelihood, y = data(name, x)
    model = Model(x, y, likelihood, rule).to(dtype)
    mll = gpext.mlls.LatentMarginalLogLikelihood(likelihood, model)
    before = mll(model(x), y).item()
    gpext.fit(mll, x, y, max_steps=5, progress=False)
    assert mll(model.train()(x), y).item() > before
    model.eval()
    with torch.no_grad():
        q = model(new)
    assert isinstance(q, MultitaskMultivariateNormal)
    assert q.mean.dtype == dtype
    assert bool(likelihood.log_marginal(y[:4], q).isfinite().all())
    restored = Model(x, y, likelihood, rule).to(dtype)
    restored.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(restored.eval()(new).mean, q.mean, rtol=1e-4, atol=1e-4)
    assert model.variational_strategy.kl_divergence().item() > 0
    at_data = model.variational_strategy.result().posterior
    with torch.no_grad():
        torch.testing.assert_close(model(x).mean, at_data.mean, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("rule", [Laplace(), Taylor()])
@pytest.mark.parametrize("name", ["von_mises", "dirichlet", "multinomial", "family"])
def test_with_every_input_inducing_the_sparse_model_is_the_exact_one(name, rule):
    x, new = torch.linspace(0, 3, 20, dtype=torch.float64), torch.linspace(-0.3, 3.2, 5, dtype=torch.float64)
    likelihood, y = data(name, x)
    exact, sparse = (Model(x, y, likelihood, rule, z).double() for z in (None, x))
    sparse.variational_strategy._jitter_val = 1e-9
    values = [gpext.mlls.LatentMarginalLogLikelihood(likelihood, m)(m(x), y) for m in (exact, sparse)]
    torch.testing.assert_close(*values, rtol=0, atol=1e-6)
    learnt = [[*m.mean_module.parameters(), *m.covar_module.parameters()] for m in (exact, sparse)]
    gradients = [torch.autograd.grad(value, parameters) for value, parameters in zip(values, learnt, strict=True)]
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    theirs, ours = (m.eval()(new) for m in (exact, sparse))
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.covariance_matrix, theirs.covariance_matrix, rtol=0, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(
            likelihood.log_marginal(y[:5], ours), likelihood.log_marginal(y[:5], theirs), rtol=0, atol=1e-5
        )


def test_a_sparse_model_of_several_latents_trains_its_inducing_inputs():
    x = torch.linspace(0, 3, 60, dtype=torch.float64)
    likelihood, y = data("von_mises", x)
    model = Model(x, y, likelihood, Laplace(), x[::12] + 0.05).double()
    mll = gpext.mlls.LatentMarginalLogLikelihood(likelihood, model)
    first, before = model.variational_strategy.sparse_inputs.detach().clone(), mll(model(x), y).item()
    gpext.fit(mll, x, y, max_steps=8, progress=False)
    assert mll(model.train()(x), y).item() > before
    assert (model.variational_strategy.sparse_inputs - first).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["von_mises", "dirichlet"])
def test_a_batch_of_models_trains(name):
    x = torch.linspace(0, 3, 12, dtype=torch.float64)
    likelihood, y = data(name, x)
    D = likelihood.num_latents
    ys = torch.stack([y, y.roll(3, 0)])

    class Batch(Model):
        def forward(self, x):
            return super().forward(x.unsqueeze(-3))

    def trained(x, y, kind):
        model = kind(x, y, likelihood, Laplace()).double()
        mll = gpext.mlls.LatentMarginalLogLikelihood(likelihood, model)
        gpext.fit(mll, x, y, max_steps=4, progress=False)
        return model.eval()

    both = trained(x.unsqueeze(-1).expand(2, -1, 1), ys, Batch)
    assert both.result.log_evidence.shape == (2,)
    alone = [Model(x, target, likelihood, Laplace()).double() for target in ys]
    for model, evidence in zip(alone, both.result.log_evidence, strict=True):
        model.load_state_dict({k: v for k, v in both.state_dict().items() if "variational" not in k}, strict=False)
        torch.testing.assert_close(model.eval().result.log_evidence, evidence, rtol=1e-8, atol=1e-8)
    assert both(x[:3].unsqueeze(-1).expand(2, -1, 1)).mean.shape == (2, 3, D)
