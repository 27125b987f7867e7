"""Models of proportions and of labels that the simplex benchmarks compare."""

from __future__ import annotations

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

import gpext
from benchmarks.ledger import Row
from gpext.inference import EP, Laplace, Taylor
from gpext.likelihoods import DirichletLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models import LatentGP

RULES = {"Dirichlet, Laplace": Laplace(), "Dirichlet, Taylor": Taylor()}


class DirichletGP(LatentGP):
    """A Dirichlet GP with squared exponential kernels.

    Args:
        x: (N, d).
        y: (N, D).
        rule: Laplace or Taylor.
        shared: whether the latents share the kernel's parameters, or each has its own.
        ard: whether every input has a length scale.
        constant: whether every latent has a constant mean, or zero.
    """

    def __init__(
        self, x: Tensor, y: Tensor, rule: Laplace | Taylor, *, shared: bool, ard: bool, constant: bool
    ) -> None:
        super().__init__(x, y, DirichletLikelihood(y.size(-1)), rule)
        latents = torch.Size([y.size(-1)])
        kernels = torch.Size([1]) if shared else latents
        means = gpytorch.means.ConstantMean if constant else gpytorch.means.ZeroMean
        self.mean_module = means(batch_shape=latents)
        base = gpytorch.kernels.RBFKernel(batch_shape=kernels, ard_num_dims=x.size(-1) if ard else None)
        self.covar_module = gpytorch.kernels.ScaleKernel(base, batch_shape=kernels)
        self.to(x)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the priors at x."""
        K = self.covar_module(x).to_dense()
        each = to_linear_operator(K.expand(self.likelihood.num_latents, *K.shape[1:]))
        return MultivariateNormal(self.mean_module(x), each)


class BinaryGP(LatentGP):
    """Binary GPC by EP with an isotropic squared exponential kernel and zero mean."""

    def __init__(self, x: Tensor, present: Tensor, lengthscale: float) -> None:
        super().__init__(x, present, gpytorch.likelihoods.BernoulliLikelihood(), EP())
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.to(x)
        self.covar_module.base_kernel.lengthscale = lengthscale

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def train(model: LatentGP, max_steps: int | None) -> Row:
    """Maximise the evidence; return the result."""
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    found = gpext.fit(mll, model.train_inputs[0], model.train_targets, max_steps=max_steps, progress=False)
    model.eval()
    return {"seconds": found.seconds, "status": found.status.name, "evidence": found.objective}


def present_by_ep(x: Tensor, present: Tensor, new: Tensor, max_steps: int | None, lengthscale: float = 1.0) -> Tensor:
    """Return the probability of every label at new points (M, L), each by a separate binary GPC.

    Args:
        x: (N, d).
        present: (N, L), of any dtype.
        new: (M, d).
        max_steps: of training.
        lengthscale: initial value for training.
    """
    columns = []
    for label in present.to(x).mT:
        model = BinaryGP(x, label, lengthscale)
        train(model, max_steps)
        with torch.no_grad():
            columns.append(model.likelihood(model(new)).mean)
    return torch.stack(columns, -1)


def smoothed(shares: Tensor, size: int | None = None) -> Tensor:
    """Return proportions (..., N, D) moved off the boundary as DirichletLikelihood's error proposes.

    Args:
        shares: proportions, some of them zero.
        size: n in y = (y (n - 1) + 1 / D) / n; by default the number of data.
    """
    n = shares.size(-2) if size is None else size
    return (shares * (n - 1) + 1 / shares.size(-1)) / n
