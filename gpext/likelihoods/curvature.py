r"""log p(y | f) of several latents to second order, its Hessian in structured form [Cha13 Sec. 3.1].

log p(y | f + e) = log p + u'e - e' U e / 2 + ...,        U = diag(gamma) + a w w',     datum by datum
"""

from __future__ import annotations

from dataclasses import dataclass

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
