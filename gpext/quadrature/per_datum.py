"""Integrals that are one number for each datum of K independent Gaussian latents, with derivatives in these alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpext.quadrature.adaptive import require

# mean, variance (B, K) and more -> values (B,), derivatives in mean and variance (B, K)
PerDatumRule = Callable[..., tuple[Tensor, Tensor, Tensor]]


def per_datum(rule: PerDatumRule, mean: Tensor, variance: Tensor, *extra: Tensor) -> Tensor:
    """Return the rule's values (..., N), once differentiable in mean and variance (..., K, N).

    Args:
        rule: of float64 rows.
        mean: (..., K, N).
        variance: (..., K, N).
        extra: what else the rule takes, as rows.
    """
    return _PerDatum.apply(mean, variance, rule, extra)


def marginals(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in one shape.

    Raises:
        ValueError: means or variances are not finite, or a variance is negative.
    """
    mean, variance = torch.broadcast_tensors(mean, variance)
    require(mean, mean.isfinite(), "mean must be finite")
    require(variance, variance.isfinite() & (variance >= 0), "variance must be finite and not negative")
    return mean, variance


def rows_of(tensor: Tensor) -> Tensor:
    """Return (..., K, N) as float64 rows (B, K)."""
    return tensor.double().mT.reshape(-1, tensor.size(-2))


class _PerDatum(torch.autograd.Function):
    """A scalar for each datum, with its derivatives from the same nodes."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, rule: PerDatumRule, extra: tuple[Tensor, ...]) -> Tensor:
        value, slope, bend = rule(rows_of(mean), rows_of(variance), *extra)
        shape = (*mean.shape[:-2], mean.size(-1), mean.size(-2))
        ctx.save_for_backward(*(t.view(shape).mT.to(mean.dtype) for t in (slope, bend)))
        return value.view(shape[:-1]).to(mean.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        slope, bend = ctx.saved_tensors
        return grad.unsqueeze(-2) * slope, grad.unsqueeze(-2) * bend, None, None
