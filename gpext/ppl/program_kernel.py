"""The base of kernels over the sites of a Pyro program: their starts, in unconstrained space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.infer.mcmc.util import initialize_model
from pyro.poutine import Trace
from torch import Tensor


class ProgramKernel(MCMCKernel):
    """A kernel over the sites of a Pyro program, for `pyro.infer.MCMC`.

    Args:
        model: the program.
        generator: of what the kernel draws by itself.
    """

    def __init__(self, model: Callable[..., object], generator: torch.Generator | None) -> None:
        self.model, self.generator = model, generator
        self.transforms: dict[str, Any] | None = None
        self.cleanup()

    def cleanup(self) -> None:
        """Forget the last run."""
        self._initial_params: dict[str, Tensor] | None = None

    @property
    def initial_params(self) -> dict[str, Tensor] | None:
        """The start of the chain, in unconstrained space."""
        return self._initial_params

    @initial_params.setter
    def initial_params(self, params: dict[str, Tensor]) -> None:
        self._initial_params = params

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Tensor], Trace]:
        """Return where the chain starts and the program's trace; potential and transforms are kept."""
        params, self._potential, self.transforms, trace = initialize_model(
            self.model, args, kwargs, initial_params=self._initial_params
        )
        self._initial_params = params
        return params, trace
