r"""The coupling of the latents of a datum by a softmax, for Newton steps on all their means together.

With pi = softmax(f) and n trials, the curvature of the expected log likelihood in the means is

    H = -d^2 E_q[log p(y | f)] / dm dm' = n E[diag(pi) - pi pi'].

Its rows sum to zero, for a softmax knows differences only, and where the latents are independent Gaussians its diagonal
is -2 d E_q[log p] / dv, the precision tau* of the best sites [Price 1958]. What lies off the diagonal would take
integrals of its own; of the matrices with that diagonal, those rows and the structure of a softmax,

    H = A (diag(q) - q q'),   A q_k (1 - q_k) = tau*_k,   sum_k q_k = 1,

there is one, exact for two classes. Plain n (diag(E pi) - E pi E pi') is far too large where q is wide: Newton steps
with it crawl.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpext.inference.local_terms import LocalTerms

_BISECTIONS = 50
_LARGEST = 14.0  # log of the largest A, in units of the smallest

Curvature = Callable[[LocalTerms], Callable[[Tensor], Tensor]]
"""F_i's terms -> the product of H_i with a direction (..., D, N); H_i is positive semidefinite."""


def exact_curvature(local: LocalTerms) -> Callable[[Tensor], Tensor]:
    """Return the product with H for the exact expectation, from the precisions of its best sites (..., D, N)."""
    size, q = matching_softmax(local.precision.clamp_min(torch.finfo(local.precision.dtype).tiny))
    return _product(size * q, q)


def log_sum_exp_curvature(counts: Tensor, total: Tensor) -> Curvature:
    """Return the product with n (diag(pi) - pi pi') for bounds that are a log sum exp of shifted means.

    Args:
        counts: y (..., D, N).
        total: n (..., N).
    """

    def curvature(local: LocalTerms) -> Callable[[Tensor], Tensor]:
        weights = (counts - local.mean_gradient).clamp_min(0)  # n pi
        return _product(weights, weights / total.unsqueeze(-2).clamp_min(1))

    return curvature


def _product(weights: Tensor, q: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda p: weights * (p - (q * p).sum(-2, keepdim=True))


def matching_softmax(diagonal: Tensor) -> tuple[Tensor, Tensor]:
    """Return A (..., 1, N) and q (..., D, N) with A q (1 - q) = diagonal and sum q = 1, by bisection on log A.

    The largest element may stand for a q above a half: it does where the other elements' small roots leave room. An
    element above the sum of the others, which no softmax has, gives an A of 4 e^14 times its size.

    Args:
        diagonal: (..., D, N), positive.
    """
    largest, where = diagonal.max(-2, keepdim=True)
    ratio = diagonal / (4 * largest)
    is_largest = torch.zeros_like(diagonal, dtype=torch.bool).scatter(-2, where, True)

    def small_roots(log_size: Tensor) -> Tensor:  # of q (1 - q) = ratio / size, without cancellation
        x = ratio * (-log_size).exp()
        return 2 * x / (1 + (1 - 4 * x).clamp_min(0).sqrt())

    low = torch.zeros_like(largest)
    high = torch.full_like(largest, _LARGEST)
    has_large_root = small_roots(low).sum(-2, keepdim=True) < 1

    def roots(log_size: Tensor) -> Tensor:
        q = small_roots(log_size)
        return torch.where(is_largest & has_large_root, 1 - q, q)

    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        total = roots(middle).sum(-2, keepdim=True)
        go_up = torch.where(has_large_root, total < 1, total > 1)
        low, high = torch.where(go_up, middle, low), torch.where(go_up, high, middle)
    q = roots(high)
    return 4 * largest * high.exp(), q / q.sum(-2, keepdim=True)
