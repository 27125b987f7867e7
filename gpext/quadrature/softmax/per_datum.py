"""Integrals that are one number for each datum of K independent Gaussian latents, with derivatives in these alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpext.quadrature.adaptive import require

_CHUNK = 2**18  # values of the innermost integrand at a time

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


def in_groups(
    start: Tensor,
    step: Tensor,
    num_outer: Tensor,
    num_inner: int,
    evaluate: PerDatumRule,
    m: Tensor,
    v: Tensor,
    *extra: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Evaluate some data at a time: `evaluate` takes their nodes (B, U), their steps, and the rest.

    Args:
        start: of the outer sums (B,).
        step: likewise.
        num_outer: how many nodes each datum needs (B,).
        num_inner: how many nodes each of these takes, about.
        evaluate: the rule on a grid.
        m: means (B, K).
        v: variances.
        extra: what else `evaluate` takes of each datum.
    """
    value, slope, bend = torch.empty_like(start), torch.empty_like(m), torch.empty_like(v)
    order = num_outer.argsort()
    sizes = num_outer[order].tolist()
    done = 0
    while done < len(sizes):
        # The largest group whose longest grid fits; grids are sorted by length.
        last = done + 1
        while last < len(sizes) and (last + 1 - done) * sizes[last] * m.size(-1) * num_inner <= _CHUNK:
            last += 1
        part = order[done:last]
        nodes = torch.arange(sizes[last - 1], dtype=m.dtype, device=m.device)
        u = start[part, None] + step[part, None] * nodes  # (B, U)
        value[part], slope[part], bend[part] = evaluate(u, step[part], m[part], v[part], *(e[part] for e in extra))
        done = last
    return value, slope, bend


def count_nodes(start: Tensor, end: Tensor, step: Tensor) -> Tensor:
    """Return how many nodes reach from start to end, all (B,)."""
    return ((end - start) / step).ceil().clamp(min=0).long() + 1


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
