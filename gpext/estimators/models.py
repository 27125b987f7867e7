"""The Gaussian processes of the estimators: one kernel, shared by all latent functions, and constant means."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, MaternKernel, ProductKernel, ScaleKernel
from gpytorch.means import ConstantMean
from gpytorch.models import ApproximateGP
from gpytorch.variational import NaturalVariationalDistribution
from torch import Tensor
from torch.nn import Module

from gpext.bounds import num_latents
from gpext.inference import Rule
from gpext.kernels import CategoricalKernel
from gpext.likelihoods import LatentLikelihood
from gpext.models import LatentGP
from gpext.variational import SiteVariationalStrategy

torch.broadcast_shapes((1,), (1,))  # torch's first imports SymPy, in 0.4 s: now, and not in the first fit


class DenseGP(LatentGP):
    """A process on all data, whose latents share one kernel.

    Args:
        train_inputs: (N, d).
        train_targets: as the likelihood takes them.
        likelihood: p(y | f).
        inference: the rule.
        kernel: of the latents.
        neighbours: of each datum, for the nearest-neighbour prior; None for the exact one.
        points: inducing inputs (M, d), with neighbours of what these leave.
        fill_in, prediction_neighbours: see :class:`gpext.models.LatentGP`.
    """

    def __init__(
        self,
        train_inputs: Tensor,
        train_targets: Tensor,
        likelihood: LatentLikelihood,
        inference: Rule,
        kernel: Kernel,
        neighbours: int | None = None,
        points: Tensor | None = None,
        *,
        fill_in: bool = True,
        prediction_neighbours: int | None = None,
    ) -> None:
        super().__init__(
            train_inputs,
            train_targets,
            likelihood,
            inference,
            neighbours=neighbours,
            inducing_inputs=points,
            fill_in=fill_in,
            prediction_neighbours=prediction_neighbours,
        )
        self.mean_module = _mean(likelihood)
        self.covar_module = kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior of the latents at inputs (N, d); of several latents they share one covariance (N, N)."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class SparseGP(ApproximateGP):
    """A process with inducing points, trained by natural gradients, whose latents share one kernel."""

    def __init__(self, inducing_points: Tensor, likelihood: LatentLikelihood, kernel: Kernel) -> None:
        latents = likelihood.num_latents
        distribution = None
        if latents is not None:
            distribution = NaturalVariationalDistribution(
                len(inducing_points), batch_shape=torch.Size([latents]), mean_init_std=0.0
            ).to(inducing_points)
        super().__init__(SiteVariationalStrategy(self, inducing_points, distribution))
        self.mean_module = _mean(likelihood)
        self.covar_module = kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior of the latents at inputs (N, d); of several latents they share one covariance (N, N)."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def _mean(likelihood: Module) -> ConstantMean:
    latents = num_latents(likelihood)
    return ConstantMean() if latents is None else ConstantMean(batch_shape=torch.Size([latents]))


def default_kernel(num_numeric: int, num_categorical: int, *, relevance: bool = True) -> ScaleKernel:
    """Return a Matern-5/2 kernel of the numeric columns, times one of the categorical columns.

    Args:
        num_numeric: the number of numeric columns, which are the first.
        num_categorical: of the others.
        relevance: whether each numeric column has a lengthscale of its own.
    """
    parts: list[Kernel] = []
    if num_numeric:
        lengthscales = num_numeric if relevance else None
        parts.append(MaternKernel(2.5, ard_num_dims=lengthscales, active_dims=tuple(range(num_numeric))))
    if num_categorical:
        columns = tuple(range(num_numeric, num_numeric + num_categorical))
        parts.append(CategoricalKernel(ard_num_dims=num_categorical, active_dims=columns))
    return ScaleKernel(parts[0] if len(parts) == 1 else ProductKernel(*parts))


class _Linear(Kernel):
    """k(x, x') = x' x / d, about one on the diagonal for d standardised columns.

    gpytorch's LinearKernel is a root, and adding another matrix to it takes a Cholesky factor of that one, with jitter.
    """

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **_: Any) -> Tensor:
        """Return the covariances (n1, n2), or with `diag` those of each row with the same of the other (n,)."""
        return (x1 * x2).mean(-1) if diag else x1 @ x2.mT / x1.shape[-1]


def plain_kernels(num_numeric: int, num_categorical: int) -> dict[str, Kernel]:
    """Return kernels with one lengthscale of all numeric columns, without and with a linear function, by name."""
    linear = _Linear(active_dims=tuple(range(num_numeric)))
    single = "one lengthscale"
    return {
        single: default_kernel(num_numeric, num_categorical, relevance=False),
        f"{single} and a linear function": default_kernel(num_numeric, num_categorical, relevance=False)
        + ScaleKernel(linear),
    }


def hyperparameters_of(model: Module, likelihood: Module) -> dict[str, Tensor]:
    """Return copies of the parameters of mean, kernel and likelihood, by name."""
    return {
        name: value.detach().clone()
        for part in (model, likelihood)
        for name, value in part.named_parameters()
        if not name.startswith("variational_strategy.")
    }


@torch.no_grad()
def start_from(model: Module, values: dict[str, Tensor]) -> None:
    """Set the parameters that have these names and the shapes of these values."""
    for name, parameter in model.named_parameters():
        if name in values and values[name].shape == parameter.shape:
            parameter.copy_(values[name])
