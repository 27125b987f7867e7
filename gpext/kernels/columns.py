"""The columns of the inputs that each kernel of a module depends on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpytorch.kernels import Kernel, ScaleKernel
from torch import Tensor
from torch.nn import Module


def stationary_kernels(module: Module, num_columns: int) -> Iterator[tuple[str, Kernel, Tensor]]:
    """Yield the kernels with a lengthscale, by name, and the indices of the columns that they use.

    Those whose `active_dims` or number of lengthscales show that they take features, not the inputs, are left out.
    """
    yield from _visit(module, "", torch.arange(num_columns, device="cpu"), selects=True)


def _visit(module: Module, name: str, columns: Tensor, *, selects: bool) -> Iterator[tuple[str, Kernel, Tensor]]:
    if isinstance(module, Kernel):
        if selects and module.active_dims is not None:
            if int(module.active_dims.max()) >= len(columns):
                return
            columns = columns[module.active_dims.cpu()]
        if module.has_lengthscale and module.lengthscale.size(-1) in (1, len(columns)):
            yield name, module, columns
    below = not isinstance(module, ScaleKernel)  # it has the active_dims of its kernel, too
    for child, part in module.named_children():
        yield from _visit(part, f"{name}.{child}".lstrip("."), columns, selects=below)
