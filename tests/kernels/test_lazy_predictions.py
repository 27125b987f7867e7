"""Predictions of an ExactGP with lazy kernels are those by a Cholesky factor of the stored matrix."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

import gpext
from gpext.operators import KeptOnce, UnfinishedSolveWarning
from tests.members import F64

N, S = 70, 9


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), kernel
        self.to(x)
        self.mean_module.constant = 0.3

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def kernel(family):
    base = family.ScaleKernel(family.RBFKernel()) + family.ScaleKernel(family.MaternKernel(nu=1.5))
    base.kernels[0].base_kernel.lengthscale = 0.5
    base.kernels[1].outputscale = 0.3
    return base


def noise(kind, dtype):
    if kind == "fixed":
        return gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.linspace(0.01, 0.2, N, dtype=dtype))
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 1e-3
    return likelihood


def data(dtype):
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.rand(N, 2, generator=generator, dtype=F64)
    new = 3 * torch.rand(S, 2, generator=generator, dtype=F64)
    y = torch.sin(x.sum(-1)) + 0.1 * torch.randn(N, generator=generator, dtype=F64)
    return x.to(dtype), y.to(dtype), new.to(dtype)


def models(kind="one", dtype=F64):
    """The lazy model, and the same with a stored matrix."""
    x, y, _ = data(dtype)
    return [
        Model(x, y, noise(kind, dtype), kernel(family)).eval() for family in (gpext.kernels.keops, gpytorch.kernels)
    ]


def moments(model, new):
    predicted = model(new)
    return predicted.mean, predicted.variance, predicted.covariance_matrix


@pytest.fixture(autouse=True)
def _nothing_is_small():
    with gpytorch.settings.max_cholesky_size(10):
        yield


def exactly(model, new):
    with gpytorch.settings.max_cholesky_size(1000):
        return moments(model, new)


@pytest.mark.parametrize("kind", ["one", "fixed"])
@pytest.mark.parametrize(("dtype", "error"), [(F64, 1e-9), (torch.float32, 1e-4)])
def test_moments_are_exact(kind, dtype, error):
    (lazy, stored), new = models(kind, dtype), data(dtype)[2]
    with torch.no_grad():
        for ours, theirs in zip(moments(lazy, new), exactly(stored.double(), new.double()), strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=error, atol=error)


def test_batches_of_new_inputs():
    (lazy, stored), new = models(), data(F64)[2]
    batch = torch.stack([new, new + 0.1, new - 0.2])
    with torch.no_grad():
        for ours, theirs in zip(moments(lazy, batch), exactly(stored, batch), strict=True):
            torch.testing.assert_close(ours, theirs.expand(ours.shape), rtol=1e-9, atol=1e-9)


def test_derivatives_in_new_inputs():
    found = []
    for model, size in zip(models(), (10, 1000), strict=True):
        new = data(F64)[2].requires_grad_()
        with gpytorch.settings.max_cholesky_size(size):
            mean, variance, _ = moments(model, new)
            (mean.sum() + variance.square().sum()).backward()
        found.append(new.grad)
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-7)


def test_one_preconditioner_serves_until_training_goes_on(monkeypatch):
    made = []
    original = KeptOnce.of

    def counted(self, K, noise, tolerance):
        made.append(id(self._made))
        return original(self, K, noise, tolerance)

    monkeypatch.setattr(KeptOnce, "of", counted)
    (lazy, stored), new = models(), data(F64)[2]
    with torch.no_grad():
        moments(lazy, new)
        moments(lazy, new + 1)
        assert len(made) == 3  # the mean's weights, and two covariances
        assert len(set(made)) == 2  # None at first, then always the same
        for model in (lazy, stored):
            model.likelihood.noise = 0.05
            model.train()
            model.eval()
        torch.testing.assert_close(moments(lazy, new)[1], exactly(stored, new)[1], rtol=1e-9, atol=1e-9)


def test_what_is_gpytorchs_stays_so():
    x, y, new = data(F64)
    lazy, stored = models()
    with torch.no_grad(), gpytorch.settings.fast_pred_var(), gpytorch.settings.max_root_decomposition_size(N):
        torch.testing.assert_close(moments(lazy, new)[1], moments(stored, new)[1], rtol=1e-2, atol=1e-3)
    lazy, stored = models()
    for model in (lazy, stored):
        model.set_train_data(x, torch.where(torch.arange(N) == 3, torch.nan, y), strict=False)
    with torch.no_grad(), gpytorch.settings.observation_nan_policy("mask"):
        torch.testing.assert_close(exactly(lazy, new)[0], exactly(stored, new)[0], rtol=1e-9, atol=1e-9)
    lazy, _ = models()
    lazy(new)
    assert bool(lazy.get_fantasy_model(new, torch.zeros(S, dtype=F64))(new).mean.isfinite().all())


def test_a_solve_that_rounding_ends_says_so():
    lazy, _ = models(dtype=torch.float32)
    lazy.likelihood.noise = 1e-4
    lazy.covar_module.kernels[0].outputscale = 1e7
    lazy.covar_module.kernels[0].base_kernel.lengthscale = 100.0
    with torch.no_grad(), pytest.warns(UnfinishedSolveWarning, match="in place of 1e-04"):
        assert lazy(data(torch.float32)[2]).mean.shape == (S,)
