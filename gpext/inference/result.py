"""What every inference rule returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpext.sites import GaussianSites


class Status(Enum):
    """How an iteration ended; the value says what to do about it."""

    CONVERGED = "converged"
    MAX_STEPS = "stopped at max_steps before the tolerance was reached; increase max_steps"
    NOT_POSITIVE_DEFINITE = "the posterior covariance is not positive definite; raise jitter or check the kernel"
    NOT_FINITE = "a value overflowed or became NaN; rescale the targets or work in float64"


@dataclass(frozen=True)
class InferenceResult:
    """The outcome of `rule.infer(prior, likelihood, targets)`.

    Attributes:
        posterior: q(f) at the training inputs, in the dtype of the prior.
        sites: the Gaussian sites that stand for the likelihood.
        log_evidence: lower bound on, or approximation of, log p(y), shape (...); differentiable in the prior and in the
            likelihood's parameters with the sites held fixed, which at convergence is its total derivative.
        status: how the iteration ended.
        num_steps: how many steps it took.
        trace: the evidence after each step, (num_steps, ...).
        message: one sentence on how it went.
    """

    posterior: MultivariateNormal
    sites: GaussianSites
    log_evidence: Tensor
    status: Status
    num_steps: int
    trace: Tensor
    message: str
