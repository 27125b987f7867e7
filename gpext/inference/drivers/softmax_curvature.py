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
from typing import TypeGuard

import torch
from torch import Tensor

from gpext.inference.local_terms import LocalTerms
from gpext.posteriors import CoupledPosterior, DensePosterior, Posterior
from gpext.sites import CoupledSites

_BISECTIONS = 50
_LARGEST = 14.0  # log of the largest A, in units of the smallest

Curvature = Callable[[LocalTerms], CoupledSites]
"""F_i's terms -> H_i, positive semidefinite, as the precisions of sites without a shift."""


def exact_curvature(local: LocalTerms) -> CoupledSites:
    """Return H for the exact expectation, from the precisions of its best sites (..., D, N)."""
    size, q = matching_softmax(local.precision.clamp_min(torch.finfo(local.precision.dtype).tiny))
    return _softmax_sites(size * q, size.squeeze(-2))


def log_sum_exp_curvature(counts: Tensor, total: Tensor) -> Curvature:
    """Return n (diag(pi) - pi pi') for bounds that are a log sum exp of shifted means.

    Args:
        counts: y (..., D, N).
        total: n (..., N).
    """
    return lambda local: _softmax_sites((counts - local.mean_gradient).clamp_min(0), total.clamp_min(1))


def _softmax_sites(weights: Tensor, size: Tensor) -> CoupledSites:
    """Return diag(w) - w w' / size, for w (..., D, N) and sizes (..., N)."""
    size = size.to(weights).expand(weights[..., 0, :].shape)
    return CoupledSites(torch.zeros_like(weights), weights, -1 / size, weights)


def coupled_nearby(posterior: Posterior) -> Posterior | CoupledPosterior:
    """Return the posterior of D latents with the sites of each datum coupled as by a softmax of the same rows.

    That is tau_d on the diagonal and -tau tau' / sum(tau) added, from the factors of the D latents and one more. Of the
    weighted graph that H is (its weights E[pi_c pi_d], its degrees tau where tau is best) this has the degrees, so that
    (K^-1 + U)^-1 (K^-1 + H) has eigenvalues up to two, and from one where pi is certain: conjugate gradients take two
    or three steps, where without a coupling they crawl along what all latents have in common, of which H is zero. What
    cannot be coupled is returned as it is.
    """
    if not can_be_coupled(posterior):
        return posterior
    tau = posterior.sites.precision
    size = tau.sum(-2).clamp_min(torch.finfo(tau.dtype).tiny)  # any, of a datum without a precision: its U is zero
    return CoupledPosterior.of(posterior, _softmax_sites(tau, size))


def can_be_coupled(posterior: Posterior) -> TypeGuard[DensePosterior]:
    """Return whether a posterior of D latents is dense, and no precision of it is negative."""
    return isinstance(posterior, DensePosterior) and bool((posterior.sites.precision >= 0).all())


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
