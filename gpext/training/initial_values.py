r"""Initial lengthscales, of the size of the data.

gpytorch initialises each at log 2, whatever the units and the number d of inputs. In d standardised columns the squared
distance of two inputs is about 2 d: in 18 columns no two inputs are near each other, and training starts on a plateau,
where it may end. With

    l = median |x_i - x_k|                          one lengthscale for all columns
    l_j = sqrt(d) median |x_ij - x_kj|              one per column

(over pairs that differ) two typical inputs are about one lengthscale apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from gpytorch.kernels import Kernel, PeriodicKernel
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor
from torch.nn import Module

from gpext.checks import check_finite, check_tensor
from gpext.kernels import CategoricalKernel
from gpext.parallel import Ranks

_MOST_ROWS = 2000  # of which the prior is called; not of fewer, as a model may hold numbers of all rows
_MOST_INPUTS = 500  # of which the distances are taken


@torch.no_grad()
def initialise_from_data(module: Module, x: Tensor) -> dict[str, Tensor]:
    """Set lengthscales that have gpytorch's default to the size of the data, and return them by name.

    A lengthscale that has been set, that has an initial value by its constraint, that is not trained, that a
    PeriodicKernel counts in periods, or that belongs to a constant column stays. The data of a kernel are the inputs
    that the prior covariance of a few hundred rows of x gives it: some columns, or features.

    Args:
        module: a kernel, a model or an objective.
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
    if x.shape[:-1].numel() > _MOST_ROWS:
        x = _some(_rows(x))
    kernels = {name: part for name, part in module.named_modules() if _is_at_default(part)}
    found: dict[str, Tensor] = {}
    if not kernels:
        return found
    for name, inputs in _inputs_of(kernels, module, x.detach()).items():
        kernel = kernels[name]
        count = kernel.raw_lengthscale.size(-1)
        if count not in (1, inputs.size(-1)):
            continue
        size = _sizes(_some(_rows(inputs)), together=count == 1).to(kernel.raw_lengthscale)
        value = torch.where(size > 0, size, kernel.lengthscale)
        if kernel.raw_lengthscale_constraint.check(value) and not torch.equal(value, kernel.lengthscale):
            kernel.lengthscale = value
            found[f"{name}.lengthscale".lstrip(".")] = kernel.lengthscale.clone()
    return found


def _is_at_default(module: Module) -> bool:
    """Return whether a module is a kernel whose trained lengthscale is as gpytorch makes it."""
    if not isinstance(module, Kernel) or isinstance(module, PeriodicKernel | CategoricalKernel):
        return False
    raw = module.raw_lengthscale if module.has_lengthscale else None
    if raw is None or not raw.requires_grad or module.raw_lengthscale_constraint.initial_value is not None:
        return False
    return bool((raw == 0).all())


def _inputs_of(kernels: dict[str, Module], module: Module, x: Tensor) -> dict[str, Tensor]:
    """Return the inputs (..., d) that kernels are given for the prior variances at x, by their names.

    Layers that follow the batch, as BatchNorm does, are as they were.
    """
    seen: dict[str, Tensor] = {}

    def noting(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def noted(x1: Tensor, *others: Any, **options: Any) -> Any:
            if name not in seen or x1.numel() > seen[name].numel():
                seen[name] = x1
            return forward(x1, *others, **options)

        return noted

    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    # ScaleKernel calls the `forward` of its kernel, past any hook.
    own = {name: kernel.__dict__.get("forward") for name, kernel in kernels.items()}
    try:
        for name, kernel in kernels.items():
            kernel.__dict__["forward"] = noting(name, kernel.forward)
        if isinstance(module, Kernel):
            module(x, diag=True)
        else:
            model = module.model if isinstance(module, MarginalLogLikelihood) else module
            # not its variance, which gpytorch rounds up, with a warning
            model.forward(x).lazy_covariance_matrix.diagonal(dim1=-2, dim2=-1)
    finally:
        for name, kernel in kernels.items():
            del kernel.__dict__["forward"]
            if own[name] is not None:
                kernel.__dict__["forward"] = own[name]
        for buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)
    return seen


def rows_of_all(x: Tensor, ranks: Ranks) -> Tensor:
    """Return the rows of the data of all ranks that :func:`initialise_from_data` would choose of them, on each."""
    if ranks.size == 1:
        return x
    rows = _rows(x)
    counts = ranks.gather(len(rows))
    first, number = sum(counts[: ranks.rank]), sum(counts)
    if number > _MOST_ROWS:
        chosen = _choice(number) - first
        rows = rows[chosen[(chosen >= 0) & (chosen < len(rows))].to(rows.device)]
    return torch.cat(ranks.gather(rows.cpu())).to(x.device)


def _rows(x: Tensor) -> Tensor:
    """Return the rows (n, d) of x (..., d), or of x (n,)."""
    return x.unsqueeze(-1) if x.dim() == 1 else x.reshape(-1, x.size(-1))


def _some(rows: Tensor) -> Tensor:
    """Return a few at random."""
    return rows if len(rows) <= _MOST_INPUTS else rows[_choice(len(rows)).to(rows.device)]


def _choice(number: int) -> Tensor:
    """Return which rows are taken of many."""
    return torch.randperm(number, generator=torch.Generator().manual_seed(0), device="cpu")[:_MOST_INPUTS]


def described_values(found: dict[str, Tensor]) -> str:
    """Return a clause that names the values that :func:`initialise_from_data` has set; nothing if there are none."""
    if not found:
        return ""
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
