r"""E[log sum_k exp(f_k)] by a product of sigmoids [Bouchard 2007].

    log sum_k exp(f_k) <= alpha + sum_k log(1 + exp(f_k - alpha))

for every alpha, because prod_k (1 + x_k) >= sum_k x_k at x_k = exp(f_k - alpha). A binary bound gives the expectation
of each term; alpha is the best one for each datum.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gpext.bounds.bound import SoftplusBound
from gpext.bounds.multinomial import MultinomialBound
from gpext.bounds.piecewise import PiecewiseQuadratic

_MAX_STEPS = 100  # of each search; some 10 are taken


class ProductOfSigmoids(MultinomialBound):
    """Bouchard's bound, tighter than :class:`LogSumExp` where the variances are large.

    Args:
        inner: the bound on E[log(1 + e^x)]; by default `PiecewiseQuadratic()`.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import MultinomialLogitLikelihood
        >>> bound = ProductOfSigmoids().bind(MultinomialLogitLikelihood(3), torch.tensor([0]))
        >>> bool(bound(torch.zeros(3, 1), torch.ones(3, 1)) < -1.0986)  # below log(1 / 3)
        True
    """

    def __init__(self, inner: SoftplusBound | None = None) -> None:
        self.inner = PiecewiseQuadratic() if inner is None else inner

    def __repr__(self) -> str:
        return f"ProductOfSigmoids({self.inner!r})"

    def expected_log_sum_exp(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return min over alpha of alpha + sum_k E[log(1 + exp(f_k - alpha))], (..., N).

        The derivatives are those at the best alpha held fixed: alpha is stationary.
        """
        alpha = self._best_alpha(mean.detach(), variance.detach())
        return alpha + self.inner.expected_softplus(mean - alpha.unsqueeze(-2), variance).sum(-2)

    def _best_alpha(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return alpha (..., N), at which the derivatives of the expectations in the means sum to 1 over k."""

        def excess(alpha: Tensor) -> Tensor:
            with torch.enable_grad():
                gap = (mean - alpha.unsqueeze(-2)).requires_grad_()
                (slope,) = torch.autograd.grad(self.inner.expected_softplus(gap, variance).sum(), gap)
            return 1 - slope.sum(-2)

        with torch.no_grad():
            # Where variances vanish, jumps of a piecewise bound are stationary points too: begin near the right one.
            start = _approximate_alpha(mean, variance)
            return _root(excess, *_bracket(excess, start, 0.05 * (1 + variance.amax(-2).sqrt())))


def _approximate_alpha(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the same for E[sigma(x)] = sigma(m / sqrt(1 + pi v / 8)) [MacKay 1992]."""
    scale = (1 + math.pi / 8 * variance).rsqrt()

    def excess(alpha: Tensor) -> Tensor:
        return 1 - torch.sigmoid(scale * (mean - alpha.unsqueeze(-2))).sum(-2)

    farthest = 1 + math.log(mean.size(-2)) / scale.amin(-2)  # every term is below 1/K from here on, or above 1/2
    return _root(excess, mean.amin(-2) - farthest, mean.amax(-2) + farthest)


def _bracket(function: Callable[[Tensor], Tensor], start: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Return points around `start` between which an increasing function changes its sign."""
    for _ in range(_MAX_STEPS):
        low, high = start - radius, start + radius
        bracketed = (function(low) <= 0) & (function(high) >= 0)
        if bool(bracketed.all()):
            break
        radius = torch.where(bracketed, radius, 2 * radius)
    return low, high


def _root(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Return the zeros, elementwise, of a function of order 1 with opposite signs at low and high [Chandrupatla 1997].

    Inverse quadratic interpolation through the last three points where it can be trusted, bisection elsewhere.
    """
    a, b = low, high
    at_a, at_b = function(a), function(b)
    t = torch.full_like(a, 0.5)
    eps = torch.finfo(a.dtype).eps
    tolerance = 4 * eps * (1 + torch.maximum(low.abs(), high.abs()))
    for _ in range(_MAX_STEPS):
        x = a + t * (b - a)
        at_x = function(x)
        same = at_x.sign() == at_a.sign()
        c, at_c = torch.where(same, a, b), torch.where(same, at_a, at_b)
        b, at_b = torch.where(same, b, a), torch.where(same, at_b, at_a)
        a, at_a = x, at_x
        width = (b - a).abs()
        if bool(((width <= tolerance) | (at_a.abs() <= eps**0.75)).all()):
            break
        xi, phi = (a - b) / (c - b), (at_a - at_b) / (at_c - at_b)
        trusted = (phi.square() < xi) & ((1 - phi).square() < 1 - xi)
        inverse = at_a / (at_b - at_a) * at_c / (at_b - at_c)
        inverse = inverse + (c - a) / (b - a) * at_a / (at_c - at_a) * at_b / (at_c - at_b)
        t = torch.where(trusted, inverse, torch.full_like(t, 0.5))
        margin = (0.5 * tolerance / width).clamp_max(0.5)
        t = torch.minimum(torch.maximum(t, margin), 1 - margin)
    return torch.where(at_a.abs() < at_b.abs(), a, b)
