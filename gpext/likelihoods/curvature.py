r"""log p(y | f) of several latents to second order, its Hessian in structured form [Cha13 Sec. 3.1].

log p(y | f + e) = log p + u'e - e' U e / 2 + ...,        U = diag(gamma) + a w w',     datum by datum
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpext.bounds import conditional_log_prob, serves_density
from gpext.bounds.contracts import HasLogProbSlopes


@dataclass(frozen=True)
class Curvature:
    """The value and the derivatives of log p(y | f) at latent values f (..., D, N), in the graph of f and parameters.

    `expected_precision` is gamma of the Fisher information, the expectation of U over y: never negative definite,
    unlike U away from the mode. With a canonical link the two are the same.
    """

    log_prob: Tensor  # (..., N)
    gradient: Tensor  # u (..., D, N)
    precision: Tensor  # gamma (..., D, N)
    coupling: Tensor  # a (..., N)
    direction: Tensor  # w (..., D, N)
    expected_precision: Tensor  # (..., D, N)

    @property
    def blocks(self) -> Tensor:
        """U (..., D, D, N)."""
        return self._with(self.precision)

    @property
    def expected_blocks(self) -> Tensor:
        """The Fisher information (..., D, D, N)."""
        return self._with(self.expected_precision)

    def _with(self, precision: Tensor) -> Tensor:
        return structured_blocks(precision, self.coupling, self.direction)


@dataclass(frozen=True)
class BlockCurvature:
    """The same where the Hessian has no structure: a D x D block for each datum."""

    log_prob: Tensor  # (..., N)
    gradient: Tensor  # u (..., D, N)
    blocks: Tensor  # U (..., D, D, N)
    expected_blocks: Tensor  # the Fisher information (..., D, D, N)


def log_prob_derivatives(likelihood: Any, targets: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p(y_i | f_i) of one latent and its first two derivatives in f_i, each (..., N).

    They are in the graph of the likelihood's parameters, and of f if that has one.
    """
    if isinstance(likelihood, HasLogProbSlopes) and serves_density(likelihood, "log_prob_slopes"):
        return conditional_log_prob(likelihood, targets, f), *likelihood.log_prob_slopes(targets, f)
    wanted = torch.is_grad_enabled()
    with torch.enable_grad():
        f = f if f.requires_grad else f.detach().requires_grad_()
        log_p = conditional_log_prob(likelihood, targets, f)
        slope = _derivative(log_p, f)
        bend = _derivative(slope, f)
    return (log_p, slope, bend) if wanted else (log_p.detach(), slope.detach(), bend.detach())


def _derivative(values: Tensor, f: Tensor) -> Tensor:
    if not values.requires_grad:  # a polynomial has run out
        return torch.zeros_like(f)
    (found,) = torch.autograd.grad(values.sum(), f, create_graph=True, materialize_grads=True)
    return found


def structured_blocks(precision: Tensor, coupling: Tensor, direction: Tensor) -> Tensor:
    """Return diag(gamma) + a w w' (..., D, D, N), from (..., D, N), (..., N) and (..., D, N)."""
    coupled = coupling.unsqueeze(-2).unsqueeze(-2) * direction.unsqueeze(-2) * direction.unsqueeze(-3)
    return coupled + diagonal_blocks(precision)


def diagonal_blocks(variance: Tensor) -> Tensor:
    """Return the covariances (..., D, D, N) of independent latents (..., D, N)."""
    return torch.diag_embed(variance.mT).movedim(-3, -1)


def independent_variance(covariance: Tensor) -> Tensor | None:
    """Return the variances (..., D, N) of latents of covariances (..., D, D, N), or None if any are correlated."""
    variance = covariance.diagonal(dim1=-3, dim2=-2).mT
    return variance if torch.equal(covariance, diagonal_blocks(variance)) else None
