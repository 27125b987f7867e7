r"""Predictions of a sparse model as a module of plain tensors, which torch.export can trace.

gpytorch's kernels and lazy matrices decide on the way whether two sets of inputs are the same, and whether q(u) is new:
questions that have no answer while a program is traced. Here all that does not depend on the new inputs is computed
beforehand, in whitened coordinates v = L^-1 (f(Z) - mu_z) with L L' = K_zz + jitter I and q(v) = N(m, S):

    A = L^-1 K_zx,    E f(x) = mu_x + A'm,    Var f(x) = k_xx + j - sum_j A_jx^2 + sum_jk A_jx S_jk A_kx

(j is gpytorch's jitter of the variances, none for a LatentGP). The data are not a part of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ApproximateGP
from gpytorch.variational import VariationalStrategy
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from gpext.kernels import dense_covariance
from gpext.models.latent_gp import LatentGP
from gpext.posteriors import LowRankPosterior, factorise


class ExportablePrediction(Module):
    """Inputs (S, d) -> mean and variance (..., S) of f, made by :func:`exportable`.

    Example:
        >>> import gpytorch, torch, gpext
        >>> class Model(gpext.models.LatentGP):
        ...     def __init__(self, x, y, likelihood):
        ...         super().__init__(x, y, likelihood, inducing_inputs=x[::2].unsqueeze(-1))
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.RBFKernel()
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 1, 8).double()
        >>> model = Model(x, (x > 0.5).double(), gpext.likelihoods.BernoulliLogitLikelihood()).double().eval()
        >>> mean, variance = gpext.models.exportable(model)(x.unsqueeze(-1))
        >>> torch.allclose(mean, model(x).mean)
        True
    """

    points: Tensor  # Z (..., M, d)
    root: Tensor  # L (..., M, M), float64
    mean: Tensor  # m (..., M), float64
    covariance: Tensor  # S (..., M, M), float64

    def __init__(
        self, model: ApproximateGP, points: Tensor, jitter: float, q: tuple[Tensor, Tensor], *, noise: float
    ) -> None:
        super().__init__()
        # The mean and the kernel; not the strategy, which has the data, nor the likelihood.
        for name, part in model.named_children():
            if name not in ("variational_strategy", "likelihood"):
                self.add_module(name, part)
        self._prior: Callable[[Tensor], MultivariateNormal] = type(model).forward.__get__(self)
        self._noise = noise
        inner = dense_covariance(self._prior(points).lazy_covariance_matrix).double()
        inner = inner + jitter * torch.eye(points.size(-2), dtype=inner.dtype, device=inner.device)
        mean, covariance = q
        for name, value in (("points", points), ("root", factorise(inner)), ("mean", mean), ("covariance", covariance)):
            self.register_buffer(name, value.detach().clone(memory_format=torch.contiguous_format))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the variance of f (..., S) at inputs x (S, d)."""
        size, points = self.points.size(-2), self.points
        x = x.expand(*points.shape[:-2], *x.shape[-2:])
        with _Apart(), settings.debug(False):
            joint = self._prior(torch.cat([points, x], -2))
            covariance = joint.lazy_covariance_matrix
            # Beside all M + S inputs the M points are fewer, which settles questions of kernels about equal sizes.
            cross = covariance[..., :size, :].to_dense()[..., size:]
            variance = covariance.diagonal(dim1=-1, dim2=-2)[..., size:]
        whitened = torch.linalg.solve_triangular(self.root, cross.double(), upper=False)
        mean = joint.mean[..., size:].double() + (whitened * self.mean.unsqueeze(-1)).sum(-2)
        spread = (whitened * (self.covariance @ whitened - whitened)).sum(-2)
        return mean.to(x.dtype), (variance.double() + self._noise + spread).to(x.dtype)


class _Apart(TorchFunctionMode):
    """Two tensors are equal only if they are one; distances are computed in one way whatever the number of inputs."""

    def __torch_function__(
        self, func: Any, types: Any, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tuple(args), kwargs or {}
        if func is torch.equal:
            return args[0] is args[1]
        if func is torch.cdist:
            return (args[0].unsqueeze(-2) - args[1].unsqueeze(-3)).square().sum(-1).sqrt()
        return func(*args, **kwargs)


@torch.no_grad()
def exportable(model: ApproximateGP) -> ExportablePrediction:
    """Return a module of plain tensors that predicts f as a sparse model does, for `torch.export.export`.

    Its kernel and mean function are those of the model, no copies; their parameters must not change afterwards. A
    compiled model needs no such module: `torch.compile(lambda x: model(x).mean)` predicts the same, in pieces.

    Args:
        model: a model with a SiteVariationalStrategy or gpytorch's VariationalStrategy, or a LatentGP of one latent
            with inducing inputs; its `forward` takes the mean and the kernel from submodules of the model.

    Raises:
        TypeError: another model.

    Example:
        >>> module = exportable(model)  # doctest: +SKIP
        >>> dynamic = ({0: torch.export.Dim("inputs")},)  # doctest: +SKIP
        >>> program = torch.export.export(module, (x,), dynamic_shapes=dynamic)  # doctest: +SKIP
        >>> torch.export.save(program, "model.pt2")  # doctest: +SKIP
    """
    model = model.eval()
    strategy = getattr(model, "variational_strategy", None)
    if isinstance(model, LatentGP):
        conditioned, points = model.result.conditioned, model.variational_strategy.sparse_inputs
        if isinstance(conditioned, LowRankPosterior) and points is not None:
            q = conditioned.coordinates
            return ExportablePrediction(model, points, model.variational_strategy.jitter_val, q, noise=0.0)
    elif isinstance(strategy, VariationalStrategy):
        posterior = strategy.variational_distribution
        q = posterior.mean.double(), posterior.covariance_matrix.double()
        points, jitter = strategy.inducing_points, strategy.jitter_val
        return ExportablePrediction(model, points, jitter, q, noise=jitter)
    raise TypeError(
        "expected a sparse model, with a SiteVariationalStrategy or a VariationalStrategy, or a LatentGP of one latent "
        f"with inducing_inputs; got {type(model).__qualname__}."
    )
