r"""Products of groups of a few rows of a tall matrix, without a copy of all groups.

With A_g the rows of A (P x M) that group g of E names, the copy has E times the entries of A: it would be most of the
time and the memory. A part of it that stays in the processor's cache takes a third of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_AT_ONCE = 2**18  # entries of a part of the copy


def gathered_gram(matrix: Tensor, rows: Tensor) -> Tensor:
    """Return A_g A_g' (..., G, E, E) of all groups; differentiable once.

    Args:
        matrix: A (..., P, M).
        rows: of each group (G, E).

    Example:
        >>> import torch
        >>> gathered_gram(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0, 2]]))
        tensor([[[1., 3.],
                 [3., 9.]]])
    """
    (found,) = gathered_grams(matrix, [(rows, rows.size(-1))])
    return found


def gathered_grams(matrix: Tensor, groups: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, ...]:
    """Return the first s rows of A_g A_g' (..., G, s, E), for groups of several sizes; differentiable once.

    Derivatives of all are added up in one matrix of the size of A.

    Args:
        matrix: A (..., P, M).
        groups: of each size, the rows (G, E), and s.

    Example:
        >>> import torch
        >>> gathered_grams(torch.tensor([[1.0], [2.0], [3.0]]), [(torch.tensor([[0, 2]]), 1)])
        (tensor([[[1., 3.]]]),)
    """
    return _Grams.apply(matrix, groups)


def gathered_times(matrix: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return A_g A_g' w_g (..., G, E) of all groups, outside the graph of autograd.

    Args:
        matrix: A (..., P, M).
        rows: of each group (G, E).
        weights: w (..., G, E).

    Example:
        >>> import torch
        >>> gathered_times(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0, 2]]), torch.tensor([[1.0, 1.0]]))
        tensor([[ 4., 12.]])
    """
    batch = torch.broadcast_shapes(matrix.shape[:-2], weights.shape[:-2])
    found = matrix.new_empty(*batch, *rows.shape)
    for part, A in _parts(matrix.detach(), rows):
        along = weights[..., part, :].unsqueeze(-2) @ A
        found[..., part, :] = (A @ along.mT).squeeze(-1)
    return found


def gathered_sums(matrix: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return w_g' A_g (..., G, M) of all groups.

    Args:
        matrix: A (..., P, M).
        rows: of each group (G, E).
        weights: w (..., G, E).

    Example:
        >>> import torch
        >>> gathered_sums(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0, 2]]), torch.tensor([[1.0, 2.0]]))
        tensor([[7.]])
    """
    found = [(weights[..., part, :].unsqueeze(-2) @ A).squeeze(-2) for part, A in _parts(matrix, rows)]
    if found:
        return torch.cat(found, -2)
    return weights.new_zeros(*torch.broadcast_shapes(matrix.shape[:-2], weights.shape[:-2]), 0, matrix.size(-1))


def _parts(matrix: Tensor, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of groups and their rows (..., g, E, M)."""
    entries = matrix[..., 0, :].numel() * rows.size(-1)
    step = max(1, _AT_ONCE // max(1, entries))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        index = rows[part]
        yield part, matrix.index_select(-2, index.flatten()).unflatten(-2, index.shape)


class _Grams(torch.autograd.Function):
    """The first s rows of A_g A_g' of all groups, of each size."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, groups: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(matrix)
        ctx.groups = groups
        every = []
        for rows, s in groups:
            found = matrix.new_empty(*matrix.shape[:-2], len(rows), s, rows.size(-1))
            for part, A in _parts(matrix, rows):
                found[..., part, :, :] = A[..., :s, :] @ A.mT
            every.append(found)
        return tuple(every)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (matrix,) = ctx.saved_tensors
        total = torch.zeros_like(matrix)
        for (rows, s), gradient in zip(ctx.groups, gradients, strict=True):
            for part, A in _parts(matrix, rows):
                S, cross = gradient[..., part, :, :s], gradient[..., part, :, s:]
                by_A = (S + S.mT) @ A[..., :s, :]
                if cross.size(-1):
                    by_A = torch.cat([by_A + cross @ A[..., s:, :], cross.mT @ A[..., :s, :]], -2)
                total.index_add_(-2, rows[part].flatten(), by_A.flatten(-3, -2))
        return total, None
