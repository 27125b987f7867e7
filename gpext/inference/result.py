"""What every inference rule returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpext.sites import GaussianSites


class Status(Enum):
    """How an iteration ended; the value says what to do about it."""

    CONVERGED = "converged"
    MAX_STEPS = "stopped at max_steps before the tolerance was reached; increase max_steps"
    STALLED = "no step raises the objective any more: it is as good as its rounding allows; loosen the tolerance"
    NOT_POSITIVE_DEFINITE = "the posterior covariance is not positive definite; raise jitter or check the kernel"
    NOT_FINITE = "a value overflowed or became NaN; rescale the targets or work in float64"


@dataclass(frozen=True)
class InferenceResult:
    """The outcome of `rule.infer(prior, likelihood, targets)`.

    Attributes:
        posterior: q(f) at the training inputs, in the dtype of the prior; a batch of D for D latents.
        sites: the Gaussian sites that stand for the likelihood.
        log_evidence: lower bound on, or approximation of, log p(y), shape (...); differentiable in the prior and in the
            likelihood's parameters, the way through the sites included (which is none at a stationary point).
        status: how the iteration ended.
        num_steps: how many steps it took, each with one Cholesky factorisation.
        trace: the evidence after each step, (num_steps, ...).
        message: one sentence on how it went.
        targets: what was conditioned on.
        cavities: means and variances (..., N) of each latent value given all sites but its own.
        log_density: (targets, mean, variance) -> log int p(y | f) N(f | mean, variance) df.
    """

    posterior: MultivariateNormal
    sites: GaussianSites
    log_evidence: Tensor
    status: Status
    num_steps: int
    trace: Tensor
    message: str
    targets: Tensor = field(repr=False)
    cavities: tuple[Tensor, Tensor] = field(repr=False)
    log_density: Callable[[Tensor, Tensor, Tensor], Tensor] = field(repr=False)

    @cached_property
    def log_loo(self) -> Tensor:
        r"""Leave-one-out log predictive densities, log p(y_i | y_-i) (..., N), from the cavities [R&W Sec. 5.4.2].

        The log density of y_i under :math:`\int p(y_i|f) N(f | m_{-i}, v_{-i}) df`; nan where a cavity has no positive
        variance, as a site of very negative precision can leave it.
        """
        mean, variance = self.cavities
        proper = variance > 0
        with torch.no_grad():
            values = self.log_density(self.targets, torch.where(proper, mean, 0), torch.where(proper, variance, 1))
        proper = proper if values.dim() == mean.dim() else proper.all(-2)
        return torch.where(proper, values, torch.nan).to(self.sites.shift.dtype)
