r"""log p(y | f) of several latents to second order, its Hessian in structured form [Cha13 Sec. 3.1].

log p(y | f + e) = log p + u'e - e' U e / 2 + ...,        U = diag(gamma) + a w w',     datum by datum
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpext.bounds import conditional_log_prob


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


def log_prob_derivatives(likelihood: Any, targets: Tensor, f: Tensor, order: int) -> list[Tensor]:
    """Return log p(y_i | f_i) of one latent and its derivatives in f_i up to `order`, each (..., N).

    They are in the graph of the likelihood's parameters, and of f if that has one.
    """
    wanted = torch.is_grad_enabled()
    with torch.enable_grad():
        f = f if f.requires_grad else f.detach().requires_grad_()
        values = [conditional_log_prob(likelihood, targets, f)]
        for _ in range(order):
            last = values[-1]
            if not last.requires_grad:  # a polynomial has run out
                values.append(torch.zeros_like(f))
                continue
            (following,) = torch.autograd.grad(last.sum(), f, create_graph=True, materialize_grads=True)
            values.append(following)
    return values if wanted else [value.detach() for value in values]


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
