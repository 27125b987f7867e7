r"""Values and partial derivatives of f as rows of inputs, (x, 0) for f(x) and (x, j) for df/dx_j [R&W Sec. 9.4].

cov(f(x), df/dx'_j) = dk/dx'_j,     cov(df/dx_i, df/dx'_j) = d^2 k / (dx_i dx'_j)
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel
from linear_operator import to_dense
from torch import Tensor

from gpext.checks import show_index


class PartialDerivativeKernel(Kernel):
    r"""The covariance of values of f and of chosen partial derivatives, from gpytorch's kernels of both.

    Inputs (..., N, d + 1) have the component in their last column: 0 for f(x), j for its derivative in x_j, j = 1, ...,
    d. So a datum may be a value or a derivative alone, each with its own likelihood by a
    :class:`gpext.likelihoods.MixedLikelihood`: measured slopes by a Gaussian, known signs of slopes, as of a monotonic
    function, by a Bernoulli [Riihimaki & Vehtari 2010], whose steepness is the weight of the slopes in a design.
    Predictions are of f or of its derivatives, at any input. The mean function has to agree: that of a derivative is
    the derivative of the mean, which is zero for a constant.

    An evaluation makes all (d + 1)^2 components and takes those that are asked for.

    Args:
        base_kernel: `RBFKernelGrad`, `Matern52KernelGrad` or `PolynomialKernelGrad`, by itself or in a `ScaleKernel`.

    Raises:
        ValueError: a component that the kernel does not have, when it is evaluated.

    Example:
        A function that rises everywhere, from three noisy values.

        >>> import gpytorch, torch, gpext
        >>> class Rising(gpext.models.LatentGP):
        ...     def __init__(self, x, y, likelihood, design):
        ...         super().__init__(x, y, likelihood, gpext.inference.EP(), design=design)
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         base = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernelGrad())
        ...         self.covar_module = PartialDerivativeKernel(base)
        ...
        ...     def forward(self, x):
        ...         mean = self.mean_module(x) * (x[..., -1] == 0)  # a constant has no derivative
        ...         return gpytorch.distributions.MultivariateNormal(mean, self.covar_module(x))
        >>> values = PartialDerivativeKernel.inputs(torch.tensor([[0.0], [1.0], [2.0]]), 0)
        >>> slopes = PartialDerivativeKernel.inputs(torch.linspace(0, 2, 9).unsqueeze(-1), 1)
        >>> likelihoods = [gpytorch.likelihoods.GaussianLikelihood(), gpext.likelihoods.BernoulliLogitLikelihood()]
        >>> likelihood = gpext.likelihoods.MixedLikelihood(likelihoods, torch.tensor([0] * 3 + [1] * 9))
        >>> y = torch.cat([torch.tensor([0.0, -0.2, 0.6]), torch.ones(9)])  # 1: the slope is positive
        >>> steepness = gpext.designs.rows_of(torch.tensor([1.0] * 3 + [20.0] * 9).diag())
        >>> model = Rising(torch.cat([values, slopes]), y, likelihood, steepness).eval()
        >>> bool((model(slopes).mean > 0).all())
        True
    """

    def __init__(self, base_kernel: Kernel) -> None:
        super().__init__()
        self.base_kernel = base_kernel

    @property
    def batch_shape(self) -> torch.Size:
        """That of the base kernel."""
        return self.base_kernel.batch_shape

    @staticmethod
    def inputs(x: Tensor, component: int) -> Tensor:
        """Return inputs (..., N, d + 1) of a component at x (..., N, d)."""
        return torch.cat([x, torch.full_like(x[..., :1], component)], -1)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """Return the covariances (..., N1, N2), or the variances (..., N)."""
        (at1, which1), (at2, which2) = ((x[..., :-1], x[..., -1]) for x in (x1, x2))
        outputs = self.base_kernel.num_outputs_per_input(at1, at2)
        rows, columns = (_places(which, outputs) for which in (which1, which2))
        if diag:
            known = to_dense(self.base_kernel(at1, at2, diag=True, **params))
            return known.gather(-1, rows.expand(*known.shape[:-1], -1))
        covariance = to_dense(self.base_kernel(at1, at2, **params))
        shape = covariance.shape[:-2]
        covariance = covariance.gather(-2, rows.unsqueeze(-1).expand(*shape, -1, covariance.size(-1)))
        return covariance.gather(-1, columns.unsqueeze(-2).expand(*shape, covariance.size(-2), -1))


def _places(which: Tensor, outputs: int) -> Tensor:
    """Return the places of components (..., N) among the `outputs` of every input.

    Raises:
        ValueError: there is no such component.
    """
    wrong = ((which < 0) | (which >= outputs) | (which != which.round())).nonzero()
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise ValueError(
            f"the last column of the inputs is the component, 0 for f and j for its derivative in column j, up to "
            f"{outputs - 1}; got {float(which[place]):g} at index {show_index(place)}."
        )
    return outputs * torch.arange(which.size(-1), device=which.device) + which.long()
