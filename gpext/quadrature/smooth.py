r"""E[F(z)], z ~ N(m, v), by fixed rules, with its derivatives from the same nodes [Trefethen & Weideman 2014, Sec. 5].

    dE/dm = E[F'(z)],    dE/dv = E[F''(z)] / 2

so that no graph is kept of the nodes. Where F is analytic in the strip |Im z| < a, the trapezoidal rule with step h (in
standard deviations s) errs by about exp(-2 pi a / (s h)), and needs some 70 s / a nodes for all of float64; Gauss-
Hermite needs the square of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Jet = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # z -> F(z), F'(z), F''(z)
Moments = Callable[[Tensor, Tensor], Tensor]  # mean and sd (n, 1) -> E[F], E[F'] and E[F''] (3, n)
Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # mean and sd (n, 1) -> nodes (n, Q), weights (n, Q) or (Q,)

_IN_CACHE = 2**17  # values of F at a time


def smooth_expectation(jet: Jet, mean: Tensor, variance: Tensor, rule: Rule, num_nodes: int) -> Tensor:
    """Return E[F(z)] (...), once differentiable in mean and variance.

    Args:
        jet: F and its first two derivatives, elementwise; parameters inside are not differentiated.
        mean: m (...).
        variance: v (...), nonnegative.
        rule: places `num_nodes` nodes for each datum.
        num_nodes: Q.

    Example:
        >>> import torch
        >>> from gpext.quadrature import trapezoid
        >>> zero, one = torch.zeros(1).double(), torch.ones(1).double()
        >>> def jet(z):
        ...     return z.cos(), -z.sin(), -z.cos()
        >>> smooth_expectation(jet, zero, one, trapezoid(51), 51).round(decimals=6)  # e^-1/2
        tensor([0.6065], dtype=torch.float64)
    """
    mean, variance = torch.broadcast_tensors(mean, variance)

    def moments(m: Tensor, sd: Tensor) -> Tensor:
        z, weights = rule(m, sd)
        return torch.stack([_weigh(values, weights) for values in jet(z)])

    return expectation_by_moments(moments, mean, variance, num_nodes)


def expectation_by_moments(moments: Moments, mean: Tensor, variance: Tensor, num_nodes: int) -> Tensor:
    """Return E[F(z)] (...), once differentiable in mean and variance, from E[F], E[F'] and E[F''].

    Args:
        moments: these of some of the data (3, n), at means and standard deviations (n, 1); parameters inside are not
            differentiated.
        mean: m (...).
        variance: v (...), nonnegative.
        num_nodes: what a datum takes memory for.
    """
    return _SmoothExpectation.apply(mean, variance, moments, max(_IN_CACHE // num_nodes, 1))


def trapezoid_nodes(strip: float, largest: Tensor) -> int:
    """Return how many nodes resolve all Gaussians up to the standard deviation `largest`, for F analytic in `strip`.

    Example:
        >>> import torch
        >>> trapezoid_nodes(1.0, torch.tensor(2.0)) > trapezoid_nodes(1.0, torch.tensor(1.0))
        True
    """
    digits, reach = _accuracy(largest.dtype)
    sd = float(largest)
    if not math.isfinite(sd):  # nor will be the result, whatever the nodes
        return 1
    relative = min(strip / max(sd, 1e-30), math.sqrt(2 * digits))  # beyond, the Gaussian itself sets h
    step = 2 * math.pi * relative / (digits + 0.5 * relative**2)
    return 2 * math.ceil(reach / step) + 1


def trapezoid(num_nodes: int) -> Rule:
    """Return the rule of equally spaced nodes, as wide as the dtype can see.

    Example:
        >>> import torch
        >>> z, weights = trapezoid(51)(torch.tensor([[1.0]]), torch.tensor([[2.0]]))
        >>> (weights * z).sum().round(decimals=4), (weights * (z - 1).square()).sum().round(decimals=3)
        (tensor(1.), tensor(4.))
    """

    def rule(mean: Tensor, sd: Tensor) -> tuple[Tensor, Tensor]:
        reach = _accuracy(mean.dtype)[1]
        u = torch.linspace(-reach, reach, num_nodes, dtype=mean.dtype, device=mean.device)
        weights = torch.softmax(-0.5 * u.square(), 0)
        return mean + sd * u, weights

    return rule


def _accuracy(dtype: torch.dtype) -> tuple[float, float]:
    """Return the error's -log, and where the Gaussian has fallen to it, in standard deviations."""
    return (28.0, 7.5) if dtype == torch.float64 else (15.0, 5.5)


class _SmoothExpectation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, moments: Moments, chunk: int) -> Tensor:
        flat_mean, sd = mean.reshape(-1, 1), variance.reshape(-1, 1).sqrt()
        found = [moments(m, s) for m, s in zip(flat_mean.split(chunk), sd.split(chunk), strict=True)]
        value, slope, bend = torch.cat(found, -1).reshape(3, *mean.shape)
        ctx.save_for_backward(slope, bend)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        slope, bend = ctx.saved_tensors
        return grad * slope, 0.5 * grad * bend, None, None


def _weigh(values: Tensor, weights: Tensor) -> Tensor:
    return values @ weights if weights.dim() == 1 else (values * weights).sum(-1)
