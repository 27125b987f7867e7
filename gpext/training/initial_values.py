r"""Initial lengthscales, of the size of the data.

gpytorch initialises each at log 2, whatever the units and the number d of inputs. In d standardised columns the squared
distance of two inputs is about 2 d: in 18 columns no two inputs are near each other, and training starts on a plateau.
With

    l = median |x_i - x_k|                          one lengthscale for all columns
    l_j = sqrt(d) median |x_ij - x_kj|              one per column

(over pairs that differ) two typical inputs are about one lengthscale apart.
"""

from __future__ import annotations

import math

import torch
from gpytorch.kernels import PeriodicKernel
from torch import Tensor
from torch.nn import Module

from gpext.checks import check_finite, check_tensor
from gpext.kernels import CategoricalKernel
from gpext.kernels.columns import stationary_kernels

_MOST_INPUTS = 500


@torch.no_grad()
def initialise_from_data(module: Module, x: Tensor) -> dict[str, Tensor]:
    """Set lengthscales that have gpytorch's default to the size of the data, and return them by name.

    A lengthscale that has been set, that has an initial value by its constraint, that is not trained, that a
    PeriodicKernel counts in periods, or that belongs to a constant column stays. Kernels use the columns of their
    `active_dims`; for a model that maps inputs to features, give the features.

    Args:
        module: a model or an objective.
        x: inputs (..., N, d), or (N,).

    Raises:
        TypeError, ValueError: x is not a tensor, or not finite.

    Example:
        >>> import gpytorch, torch
        >>> from gpext.training import initialise_from_data
        >>> kernel = gpytorch.kernels.RBFKernel(ard_num_dims=2)
        >>> initialise_from_data(kernel, torch.tensor([[0.0, 0.0], [1.0, 30.0]]))
        {'lengthscale': tensor([[ 1.4142, 42.4264]])}
    """
    check_tensor("inputs", x)
    check_finite("inputs", x)
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    points = x.detach().reshape(-1, x.size(-1))
    if len(points) > _MOST_INPUTS:
        order = torch.randperm(len(points), generator=torch.Generator().manual_seed(0), device="cpu")
        points = points[order[:_MOST_INPUTS].to(points.device)]
    found = {}
    for name, kernel, columns in stationary_kernels(module, x.size(-1)):
        if isinstance(kernel, PeriodicKernel | CategoricalKernel):
            continue
        raw = kernel.raw_lengthscale
        constraint = kernel.raw_lengthscale_constraint
        if not raw.requires_grad or constraint.initial_value is not None or not bool((raw == 0).all()):
            continue
        size = _sizes(points[:, columns.to(points.device)], together=raw.size(-1) == 1).to(raw)
        value = torch.where(size > 0, size, kernel.lengthscale)
        if constraint.check(value) and not torch.equal(value, kernel.lengthscale):
            kernel.lengthscale = value
            found[f"{name}.lengthscale".lstrip(".")] = kernel.lengthscale.clone()
    return found


def described_values(found: dict[str, Tensor]) -> str:
    """Return a clause that names the values that :func:`initialise_from_data` has set."""
    if not found:
        return "no lengthscale was at its default, to be started from the data"
    ranges = []
    for name, value in found.items():
        low, high = float(value.min()), float(value.max())
        ranges.append(f"{name} at {low:.3g}" + (f" to {high:.3g}" if high > low else ""))
    return f"started from the data: {', '.join(ranges)}"


def _sizes(points: Tensor, *, together: bool) -> Tensor:
    """Return the lengthscale of all columns (1,), or of each (d,); 0 where no two inputs differ."""
    if together:
        return _median(torch.pdist(points.double())).unsqueeze(0)
    each = [_median(torch.pdist(column.unsqueeze(-1).double())) for column in points.unbind(-1)]
    return math.sqrt(points.size(-1)) * torch.stack(each)


def _median(distances: Tensor) -> Tensor:
    positive = distances[distances > 0]
    return positive.median() if len(positive) else distances.new_zeros(())
