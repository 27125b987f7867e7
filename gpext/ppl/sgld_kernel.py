r"""Langevin dynamics within Pyro: every sample site of a program by a step with the gradient of its log density.

    theta <- theta + eps / 2 M grad log p(theta, y) + N(0, eps M)                             (gpext.optim.SGLD)

theta are all sites in unconstrained space, as one vector in the order of their names. Nothing is rejected: in units of
M a step of size eps widens the draws by about eps / 8 of a standard deviation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpext.optim import SGLD
from gpext.ppl.program_kernel import ProgramKernel


class SGLDKernel(ProgramKernel):
    """A kernel for `pyro.infer.MCMC`: unadjusted Langevin steps.

    Args:
        model: a Pyro program whose sample sites are continuous.
        step_size: eps.
        preconditioner: M, about the covariance of the posterior in unconstrained space: None for the identity, a
            diagonal (P,) or a matrix (P, P).
        generator: for the noise, on the CPU; by default seeded from torch's global one for each chain.

    Raises:
        ValueError: a step size that is not positive; when it is set up: a preconditioner that does not fit.

    Example:
        >>> kernel = SGLDKernel(model, step_size=0.1)  # doctest: +SKIP
        >>> draws = sample_posterior(kernel, num_samples=1000, warmup=300)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Callable[..., object],
        *,
        step_size: float = 0.1,
        preconditioner: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if not step_size > 0:
            raise ValueError(f"step_size must be positive; got {step_size}.")
        self.step_size, self.preconditioner = step_size, preconditioner
        super().__init__(model, generator)

    def cleanup(self) -> None:
        """Forget the last run."""
        super().cleanup()
        self._optimizer: SGLD | None = None

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Find a start; see the class for the errors."""
        params, _ = self._start(args, kwargs)
        self._sites = {name: params[name].detach().clone().requires_grad_() for name in sorted(params)}
        self._optimizer = SGLD(self._sites.values(), self.step_size, self.preconditioner, generator=self.generator)

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the next state of the chain, in unconstrained space.

        Raises:
            FloatingPointError: the gradient is not finite; the step size is too large for this program.
        """
        assert self._optimizer is not None
        with torch.no_grad():
            for name, site in self._sites.items():
                site.copy_(params[name])
        with torch.enable_grad():
            slopes = torch.autograd.grad(self._potential(dict(self._sites)), list(self._sites.values()))
        for site, slope in zip(self._sites.values(), slopes, strict=True):
            site.grad = slope
        self._optimizer.step()
        return {name: site.detach().clone() for name, site in self._sites.items()}

    def logging(self) -> OrderedDict[str, str]:
        """Return the step size."""
        return OrderedDict({"step size": f"{self.step_size:.2e}"})

    def diagnostics(self) -> dict[str, Any]:
        """Return the step size."""
        return {"step size": self.step_size}
