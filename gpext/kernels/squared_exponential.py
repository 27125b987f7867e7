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

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Scaled(NamedTuple):
    """Both sets of inputs, stacked, relative to a common centre and in units of the lengthscale."""

    inputs: Tensor  # [z; x] (N1 + N2, d)
    depth: Tensor  # -|z|^2 / 2 and -|x|^2 / 2 (N1 + N2, 1)
    size: int  # N1


@torch.no_grad()
def scale_inputs(x1: Tensor, x2: Tensor, lengthscale: Tensor) -> Scaled:
    """Return both sets of inputs, relative to the centre of the first and divided by the lengthscale."""
    centre = x1.mean(-2, keepdim=True)  # distances by way of squares lose digits far from the origin
    inputs = torch.cat([x1, x2]).sub_(centre).div_(lengthscale)
    return Scaled(inputs, inputs.square().sum(-1, keepdim=True).mul_(-0.5), len(x1))


def _evaluate(scaled: Scaled, outputscale: Tensor) -> Tensor:
    """Return K (N1, N2)."""
    inputs, depth, size = scaled
    ones = torch.ones_like(depth)
    left = torch.cat([inputs[:size], depth[:size] + outputscale.log(), ones[:size]], -1)
    right = torch.cat([inputs[size:], ones[size:], depth[size:]], -1)
    return (right @ left.mT).exp_().mT  # column-major, for the triangular solves that follow


def by_inputs_and_lengthscale(
    weights: Tensor, z: Tensor, x: Tensor, lengthscale: Tensor, needed: Sequence[bool], *, unit: float = 1.0
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """Return the derivatives in x1, x2 and l, where they are needed, and the sum of W.

    Args:
        weights: W (N1, N2), -2 dK/d|z - x|^2 times the gradient with respect to K.
        z: (N1, d), x1 times `unit` / l.
        x: (N2, d), x2 likewise.
        lengthscale: l (1, d) or (1, 1).
        needed: whether the derivatives in x1, x2 and l are.
        unit: of the scaled inputs.
    """
    product = weights @ torch.cat([x, torch.ones_like(x[..., :1])], -1)
    weighted_x, rows = product[..., :-1], product[..., -1:]
    by_x1 = by_x2 = by_lengthscale = None
    if needed[0]:
        by_x1 = unit * (weighted_x - rows * z) / lengthscale
    columns = weights.sum(-2).unsqueeze(-1)
    if needed[1]:
        by_x2 = unit * (weights.mT @ z - columns * x) / lengthscale
    if needed[2]:
        terms = (rows * z.square() - 2 * z * weighted_x).sum(-2) + (columns * x.square()).sum(-2)
        by_lengthscale = terms.unsqueeze(-2) / lengthscale
        if lengthscale.size(-1) == 1:
            by_lengthscale = by_lengthscale.sum(-1, keepdim=True)
    return by_x1, by_x2, by_lengthscale, rows.sum()


class _SquaredExponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x1: Tensor, x2: Tensor, lengthscale: Tensor, outputscale: Tensor, scaled: Scaled) -> Tensor:
        covariance = _evaluate(scaled, outputscale)
        z, x = scaled.inputs.split([len(x1), len(x2)])
        ctx.save_for_backward(z, x, lengthscale, outputscale, covariance)
        return covariance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        z, x, lengthscale, outputscale, covariance = ctx.saved_tensors
        needed = ctx.needs_input_grad
        by_x1, by_x2, by_lengthscale, total = by_inputs_and_lengthscale(
            gradient * covariance, z, x, lengthscale, needed
        )
        by_outputscale = (total / outputscale).view(outputscale.shape) if needed[3] else None
        return by_x1, by_x2, by_lengthscale, by_outputscale, None


def squared_exponential(x1: Tensor, x2: Tensor, lengthscale: Tensor, outputscale: Tensor) -> Tensor:
    """Return the covariance (N1, N2), differentiable once in every argument.

    Args:
        x1: inputs (N1, d).
        x2: inputs (N2, d).
        lengthscale: l, (1, d) or (1, 1).
        outputscale: s, a single number of any shape.

    Example:
        >>> import torch
        >>> one = torch.ones(())
        >>> squared_exponential(torch.zeros(1, 1), torch.tensor([[0.0], [1.0]]), one, one)
        tensor([[1.0000, 0.6065]])
    """
    return squared_exponential_of(x1, x2, lengthscale, outputscale, scale_inputs(x1, x2, lengthscale))


def squared_exponential_of(x1: Tensor, x2: Tensor, lengthscale: Tensor, outputscale: Tensor, scaled: Scaled) -> Tensor:
    """Return the same for inputs that are scaled already."""
    if not torch.is_grad_enabled():
        return _evaluate(scaled, outputscale)
    return _SquaredExponential.apply(x1, x2, lengthscale, outputscale, scaled)
