r"""The scaled Matern-5/2 kernel and its derivatives, from one matrix product each.

    K_ij = s (1 + t + t^2 / 3) exp(-t),   t = |z_i - x_j|,   z = sqrt(5) x1 / l,  x = sqrt(5) x2 / l

It is smooth in t^2, which a matrix product gives: dK/d(t^2) = -S / 2 with S = s (1 + t) exp(-t) / 3, without the pole
at t = 0 of a derivative by way of the distance. The derivatives are those of
:mod:`gpext.kernels.squared_exponential` with W = G * S, but d/ds = sum(G * K) / s [R&W Eq. 4.17].
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpext.kernels.squared_exponential import Scaled, by_inputs_and_lengthscale, scale_inputs


def _evaluate(scaled: Scaled, outputscale: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and S (N1, N2), column-major, in three matrices of their size."""
    inputs, depth, size = scaled
    ones = torch.ones_like(depth)
    left = torch.cat([inputs[:size], depth[:size], ones[:size]], -1)
    right = torch.cat([inputs[size:], ones[size:], depth[size:]], -1)
    t = (right @ left.mT).mul_(-2).clamp_min_(0).sqrt_()
    scale = float(outputscale)
    decay = t.neg().exp_()
    slope = t.add(1).mul_(decay)
    covariance = t.square_().mul_(decay).mul_(scale / 3).add_(slope, alpha=scale)
    return covariance.mT, slope.mul_(scale / 3).mT


class _Matern52(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x1: Tensor, x2: Tensor, lengthscale: Tensor, outputscale: Tensor, scaled: Scaled) -> Tensor:
        covariance, slope = _evaluate(scaled, outputscale)
        z, x = scaled.inputs.split([len(x1), len(x2)])
        ctx.save_for_backward(z, x, lengthscale, outputscale, covariance, slope)
        return covariance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        z, x, lengthscale, outputscale, covariance, slope = ctx.saved_tensors
        weights = gradient * slope
        by_x1, by_x2, by_lengthscale, _ = by_inputs_and_lengthscale(
            weights, z, x, lengthscale, ctx.needs_input_grad, unit=math.sqrt(5)
        )
        by_outputscale = None
        if ctx.needs_input_grad[3]:
            total = torch.mul(gradient, covariance, out=weights).sum()
            by_outputscale = (total / outputscale).view(outputscale.shape)
        return by_x1, by_x2, by_lengthscale, by_outputscale, None


def matern52(x1: Tensor, x2: Tensor, lengthscale: Tensor, outputscale: Tensor) -> Tensor:
    """Return the covariance (N1, N2), differentiable once in every argument.

    Args:
        x1: inputs (N1, d).
        x2: inputs (N2, d).
        lengthscale: l, (1, d) or (1, 1).
        outputscale: s, a single number of any shape.

    Example:
        >>> import torch
        >>> one = torch.ones(())
        >>> matern52(torch.zeros(1, 1), torch.tensor([[0.0], [1.0]]), one, one)
        tensor([[1.0000, 0.5240]])
    """
    return matern52_of(x1, x2, lengthscale, outputscale, scale_inputs(x1, x2, lengthscale / math.sqrt(5)))


def matern52_of(x1: Tensor, x2: Tensor, lengthscale: Tensor, outputscale: Tensor, scaled: Scaled) -> Tensor:
    """Return the same for inputs that are scaled already, by l / sqrt(5)."""
    if not torch.is_grad_enabled():
        return _evaluate(scaled, outputscale)[0]
    return _Matern52.apply(x1, x2, lengthscale, outputscale, scaled)
