r"""log p(y | f) of several latents to second order, its Hessian in structured form [Cha13 Sec. 3.1].

log p(y | f + e) = log p + u'e - e' U e / 2 + ...,        U = diag(gamma) + a w w',     datum by datum
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
