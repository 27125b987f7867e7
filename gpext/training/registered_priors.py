"""The log densities of registered priors, a part of every objective that trains hyperparameters."""

from __future__ import annotations

import torch
from gpytorch.mlls import MarginalLogLikelihood


@torch.enable_grad()
def add_log_prior(mll: MarginalLogLikelihood, weight: float, *, gradient: bool) -> float:
    """Return weight times the sum of the log densities, and with a `gradient` add that of its negative to `.grad`."""
    # Each counts once, though a likelihood that the model holds as well is found twice.
    priors = {id(prior): (prior, closure, module) for _, module, prior, closure, _ in mll.named_priors()}
    if not priors:
        return 0.0
    total = weight * sum(prior.log_prob(closure(module)).sum() for prior, closure, module in priors.values())
    if gradient and total.requires_grad:
        (-total).backward()
    return float(total.detach())
