"""Parameters that have no best value, or none that the data tell from others, are named."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

import gpext
from gpext.inference import Laplace
from gpext.likelihoods import DirichletLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.training.remarks import positive_parameters
from tests.members import F64, tensor
from tests.sparse_models import SparseGP

X = torch.linspace(0, 1, 10, dtype=F64).unsqueeze(-1)


class Shares(gpext.models.LatentGP):
    """Two latents with a kernel each."""

    def __init__(self, y):
        super().__init__(X, y, DirichletLikelihood(2), Laplace())
        batch = torch.Size([2])
        self.mean_module = gpytorch.means.ZeroMean(batch_shape=batch)
        base = gpytorch.kernels.RBFKernel(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(base, batch_shape=batch)
        self.to(X)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def fitted(y, *, prior=None):
    model = Shares(y)
    if prior is not None:
        model.covar_module.register_prior("scale_prior", prior, "outputscale")
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    return gpext.fit(mll, X, y, progress=False, max_steps=40)


EQUAL = tensor(0.3, 0.7).expand(10, 2)  # a density that can be as high as the kernels' scale allows


def test_a_scale_that_grows_without_bound_is_named():
    assert "model.covar_module.outputscale grew" in fitted(EQUAL).message


def test_otherwise_nothing_is_said():
    noise = torch.randn(10, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    assert "grew" not in fitted(noise.softmax(-1)).message
    assert "grew" not in fitted(EQUAL, prior=gpytorch.priors.GammaPrior(2.0, 0.02)).message


class Curve(gpext.models.LatentGP):
    def __init__(self, x, y, lengthscale):
        super().__init__(x, y, gpext.likelihoods.StudentTLikelihood(), Laplace())
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.to(x)
        self.covar_module.base_kernel.lengthscale = lengthscale

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def message(unit, *, lengthscale=1.0, batch_size=None):
    """What training on a noisy sine says, whose inputs are in some unit."""
    x = unit * torch.linspace(0, 6, 30, dtype=F64).unsqueeze(-1)
    y = (x[:, 0] / unit).sin() + 0.3 * torch.randn(30, dtype=F64, generator=torch.Generator().manual_seed(0))
    if batch_size is None:
        model = Curve(x, y, lengthscale)
        mll = LatentMarginalLogLikelihood(model.likelihood, model)
    else:
        model = SparseGP(x[::3].clone())
        mll = gpext.mlls.AugmentedELBO(gpext.likelihoods.StudentTLikelihood().to(x), model, num_data=30)
    return gpext.fit(mll, x, y, progress=False, max_steps=10, batch_size=batch_size).message


@pytest.mark.parametrize("batch_size", [None, 15])
def test_a_lengthscale_that_no_two_inputs_share_is_named(batch_size):
    """Metres and a lengthscale of one: the covariance is diagonal whatever it is, and training converges at once."""
    expected = "model.covar_module.base_kernel.lengthscale did not move, with a gradient of zero"
    assert expected in message(1e6, batch_size=batch_size)
    assert "did not move" not in message(1.0, batch_size=batch_size)
    if batch_size is None:
        assert "did not move" not in message(1e6, lengthscale=1e6)


def test_noise_that_vanishes_is_named():
    """Equal targets: the density of a noise as narrow as one likes is as high."""
    x = torch.linspace(0, 6, 30, dtype=F64)
    model = Curve(x, torch.zeros_like(x), 1.0)
    result = gpext.fit(LatentMarginalLogLikelihood(model.likelihood, model), x, model.train_targets, progress=False)
    assert "likelihood.noise fell" in result.message
    assert "fell" not in message(1.0)


def test_only_what_may_be_any_positive_number_is_watched():
    model = Shares(EQUAL)
    model.covar_module.base_kernel.register_constraint("raw_lengthscale", gpytorch.constraints.Interval(0.1, 10.0))
    assert list(positive_parameters(model)) == ["covar_module.outputscale"]
