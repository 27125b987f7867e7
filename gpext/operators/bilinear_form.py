"""The value u' K v of a kernel matrix and its derivatives from one pass over its tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from gpext.operators.kernel_operator import KernelOperator


class BilinearForm(torch.autograd.Function):
    """u' K v, summed over columns; see :meth:`gpext.operators.KernelOperator.bilinear_form`."""

    @staticmethod
    def forward(ctx: Any, operator: KernelOperator, left: Tensor, right: Tensor, *tensors: Tensor) -> Tensor:
        """Return it (...), and keep its derivatives in the tensors K is made of."""
        ctx.operator, ctx.shapes = operator, [t.shape for t in tensors]
        derivatives = operator._pass(left, right)
        ctx.save_for_backward(left, right, *derivatives)
        return (derivatives[0] * operator.outputscale).sum((-2, -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """Return nothing for the operator, g K v for u, g K' u for v, and what was kept for each tensor."""
        left, right, *derivatives = ctx.saved_tensors
        g, (_, by_left, by_right, *_) = cotangent.unsqueeze(-1).unsqueeze(-1), ctx.needs_input_grad
        return (
            None,
            (g * (ctx.operator._matmul(right))).sum_to_size(left.shape) if by_left else None,
            (g * (ctx.operator.mT._matmul(left))).sum_to_size(right.shape) if by_right else None,
            *((g * t).sum_to_size(shape) for t, shape in zip(derivatives, ctx.shapes, strict=True)),
        )
