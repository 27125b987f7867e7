r"""The scaled squared exponential kernel in two passes over the matrix, and its derivatives in two more.

    K_ij = s exp(-|z_i - x_j|^2 / 2),   z = x1 / l,  x = x2 / l
         = exp([z_i, log s - |z_i|^2 / 2, 1] . [x_j, 1, -|x_j|^2 / 2])

One product and one exponential in place. With W = G * K, G the gradient with respect to K,

    d/ds   = sum(W) / s
    d/dl_k = [sum_ij W_ij (z_ik - x_jk)^2] / l_k = [z_k^2 . r + x_k^2 . c - 2 z_k . (W x)_k] / l_k
    d/dx1  = (W x - r z) / l,     d/dx2 = (W' z - c x) / l

where r and c are the row and column sums of W: one more product. gpytorch's own kernel makes about ten passes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gpytorch
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Scaled(NamedTuple):
    """Both sets of inputs, stacked, relative to a common centre and in units of the lengthscale."""

    inputs: Tensor  # [z; x] (N1 + N2, d)
    depth: Tensor  # -|z|^2 / 2 and -|x|^2 / 2 (N1 + N2, 1)
    size: int  # N1


@torch.no_grad()
def _scale(x1: Tensor, x2: Tensor, lengthscale: Tensor) -> _Scaled:
    centre = x1.mean(-2, keepdim=True)  # distances by way of squares lose digits far from the origin
    inputs = torch.cat([x1, x2]).sub_(centre).div_(lengthscale)
    return _Scaled(inputs, inputs.square().sum(-1, keepdim=True).mul_(-0.5), len(x1))


def _evaluate(scaled: _Scaled, outputscale: Tensor) -> Tensor:
    """Return K (N1, N2)."""
    inputs, depth, size = scaled
    ones = torch.ones_like(depth)
    left = torch.cat([inputs[:size], depth[:size] + outputscale.log(), ones[:size]], -1)
    right = torch.cat([inputs[size:], ones[size:], depth[size:]], -1)
    return (right @ left.mT).exp_().mT  # column-major, for the triangular solves that follow


class _SquaredExponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x1: Tensor, x2: Tensor, lengthscale: Tensor, outputscale: Tensor, scaled: _Scaled) -> Tensor:
        covariance = _evaluate(scaled, outputscale)
        z, x = scaled.inputs.split([len(x1), len(x2)])
        ctx.save_for_backward(z, x, lengthscale, outputscale, covariance)
        return covariance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        z, x, lengthscale, outputscale, covariance = ctx.saved_tensors
        weights = gradient * covariance
        product = weights @ torch.cat([x, torch.ones_like(x[..., :1])], -1)
        weighted_x, rows = product[..., :-1], product[..., -1:]
        by_x1 = by_x2 = by_lengthscale = by_outputscale = None
        if ctx.needs_input_grad[0]:
            by_x1 = (weighted_x - rows * z) / lengthscale
        columns = weights.sum(-2).unsqueeze(-1)
        if ctx.needs_input_grad[1]:
            by_x2 = (weights.mT @ z - columns * x) / lengthscale
        if ctx.needs_input_grad[2]:
            terms = (rows * z.square() - 2 * z * weighted_x).sum(-2) + (columns * x.square()).sum(-2)
            by_lengthscale = terms.unsqueeze(-2) / lengthscale
            if lengthscale.size(-1) == 1:
                by_lengthscale = by_lengthscale.sum(-1, keepdim=True)
        if ctx.needs_input_grad[3]:
            by_outputscale = (rows.sum() / outputscale).view(outputscale.shape)
        return by_x1, by_x2, by_lengthscale, by_outputscale, None


def squared_exponential(x1: Tensor, x2: Tensor, lengthscale: Tensor, outputscale: Tensor) -> Tensor:
    """Return the covariance (N1, N2), differentiable once in every argument.

    Args:
        x1: inputs (N1, d).
        x2: inputs (N2, d).
        lengthscale: l, (1, d) or (1, 1).
        outputscale: s, a single number of any shape.
    """
    return _covariance(x1, x2, lengthscale, outputscale, _scale(x1, x2, lengthscale))


def _covariance(x1: Tensor, x2: Tensor, lengthscale: Tensor, outputscale: Tensor, scaled: _Scaled) -> Tensor:
    if not torch.is_grad_enabled():
        return _evaluate(scaled, outputscale)
    return _SquaredExponential.apply(x1, x2, lengthscale, outputscale, scaled)


def direct_covariance(kernel: gpytorch.kernels.Kernel, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the covariance (N1, N2) and the variances at x2 (N2,), if the kernel is one that this module supports.

    That is gpytorch's RBFKernel, alone or in a ScaleKernel, without batch shape or active dimensions, and with a
    lengthscale and an outputscale for which this module's arithmetic is accurate.
    """
    base, scale = kernel, None
    if type(kernel) is gpytorch.kernels.ScaleKernel:
        base, scale = kernel.base_kernel, kernel.outputscale
    if type(base) is not gpytorch.kernels.RBFKernel or x1.dim() != 2 or x2.dim() != 2:
        return None
    scale = torch.ones((), dtype=x1.dtype, device=x1.device) if scale is None else scale
    lengthscale = base.lengthscale
    if scale.dim() or lengthscale.dim() != 2 or base.active_dims is not None or x1.dtype != lengthscale.dtype:
        return None
    scaled = _scale(x1, x2, lengthscale)
    if not _is_accurate(scaled, scale):
        return None
    return _covariance(x1, x2, lengthscale, scale, scaled), scale.expand(len(x2))


@torch.no_grad()
def _is_accurate(scaled: _Scaled, outputscale: Tensor) -> bool:
    """Return whether distances computed from squares keep enough digits, and log s is finite."""
    limits = torch.finfo(outputscale.dtype)
    return bool((scaled.depth.amin() * limits.eps > -5e-5) & (outputscale > limits.tiny**0.5))
