"""Parameters that have no best value are named."""

from __future__ import annotations

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal

import gpext
from gpext.inference import Laplace
from gpext.likelihoods import DirichletLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.training.runaway import positive_parameters
from tests.members import F64, tensor

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


def test_only_what_may_be_any_positive_number_is_watched():
    model = Shares(EQUAL)
    model.covar_module.base_kernel.register_constraint("raw_lengthscale", gpytorch.constraints.Interval(0.1, 10.0))
    assert list(positive_parameters(model)) == ["covar_module.outputscale"]
