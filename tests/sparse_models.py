"""Small sparse models for the variational tests."""

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.variational import (
    IndependentMultitaskVariationalStrategy,
    NaturalVariationalDistribution,
    VariationalStrategy,
)

from gpext.variational import SiteVariationalStrategy
from tests.members import F64


class SparseGP(gpytorch.models.ApproximateGP):
    """A scaled RBF kernel, a linear mean, and either gpext's strategy or gpytorch's own with a natural q(u)."""

    def __init__(self, Z, *, strategy=SiteVariationalStrategy, num_tasks=None, jitter_val=None, learn=True):
        q = NaturalVariationalDistribution(Z.size(-2), batch_shape=Z.shape[:-2], mean_init_std=0.0).to(Z)
        base = strategy(self, Z, q, learn_inducing_locations=learn, jitter_val=jitter_val)
        super().__init__(IndependentMultitaskVariationalStrategy(base, num_tasks) if num_tasks else base)
        self.base = base
        batch = torch.Size([num_tasks] if num_tasks else [])
        self.mean_module = gpytorch.means.LinearMean(Z.size(-1), batch_shape=batch)
        kernel = gpytorch.kernels.RBFKernel(ard_num_dims=Z.size(-1), batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)
        self.to(Z)
        self.covar_module.outputscale, kernel.lengthscale = 1.3, 0.8
        torch.nn.init.constant_(self.mean_module.weights, 0.2)
        torch.nn.init.constant_(self.mean_module.bias, -0.1)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    @property
    def natural(self):
        """The natural parameters of q(u)."""
        q = self.base._variational_distribution
        return q.natural_vec, q.natural_mat


def inputs(*shape, seed=0, dtype=F64):
    return 3 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype) - 1


def randomise(model, seed=0):
    """Set q(u) to random natural parameters with a positive definite precision."""
    generator = torch.Generator().manual_seed(seed)
    vec, mat = model.natural
    factor = torch.randn(mat.shape, generator=generator, dtype=F64)
    size = mat.size(-1)
    with torch.no_grad():
        vec.copy_(torch.randn(vec.shape, generator=generator, dtype=F64))
        mat.copy_(-0.5 * (torch.eye(size, dtype=F64) + 0.3 * factor @ factor.mT))
    model.base.variational_params_initialized.fill_(1)
    model.base._clear_cache()
    return model


def pair(Z, **kwargs):
    """The same model with gpext's and with gpytorch's strategy, at the same random q(u)."""
    return randomise(SparseGP(Z, **kwargs)), randomise(SparseGP(Z, strategy=VariationalStrategy, **kwargs))
