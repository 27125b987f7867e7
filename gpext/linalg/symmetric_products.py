r"""Symmetric matrices by their lower blocks of rows, each as far as the diagonal: little more than half of the numbers.

Blocks, not triangles: each is one product, and one strided copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

_ROWS = 128  # of a block: more save less, fewer make slow products
_FEW_BLOCKS = 2
_LONG = 2  # times its height: a shorter product costs less than its blocks and their copies


def lower_blocks(matrix: Tensor) -> list[Tensor]:
    """Return views (..., b, e) of a matrix (..., M, M), e the number of rows as far as the block's last.

    Example:
        >>> import torch
        >>> [block.shape for block in lower_blocks(torch.zeros(200, 200))]
        [torch.Size([128, 128]), torch.Size([72, 200])]
    """
    return [matrix[..., i : i + _ROWS, : i + _ROWS] for i in range(0, matrix.size(-1), _ROWS)]


def symmetric_matrix(blocks: Sequence[Tensor]) -> Tensor:
    """Return the symmetric matrix (..., M, M) of these :func:`lower_blocks`.

    Example:
        >>> import torch
        >>> from gpext.linalg.symmetric_products import lower_blocks
        >>> A = torch.ones(3, 3)
        >>> torch.equal(symmetric_matrix(lower_blocks(A)), A)
        True
    """
    size = blocks[-1].size(-1)
    matrix = blocks[-1].new_empty(*blocks[-1].shape[:-2], size, size)
    for block, place in zip(blocks, lower_blocks(matrix), strict=True):
        place.copy_(block)
        start = block.size(-1) - block.size(-2)
        matrix[..., :start, start : block.size(-1)] = block[..., :start].mT
    return matrix


def symmetric_product(left: Tensor, right: Tensor) -> Tensor:
    """Return X Y' (..., M, M), which has to be symmetric, of X and Y (..., M, N)."""
    if left.size(-2) <= _FEW_BLOCKS * _ROWS and left.size(-1) <= _LONG * left.size(-2):
        return left @ right.mT
    rows = range(0, left.size(-2), _ROWS)
    return symmetric_matrix([left[..., i : i + _ROWS, :] @ right[..., : i + _ROWS, :].mT for i in rows])


def subtract_product(blocks: Sequence[Tensor], rows: Tensor) -> None:
    """Subtract X X' from a symmetric matrix given by its :func:`lower_blocks`, in place, for X (..., M, N).

    Example:
        >>> import torch
        >>> from gpext.linalg.symmetric_products import lower_blocks
        >>> A = torch.ones(2, 2)
        >>> subtract_product(lower_blocks(A), torch.eye(2))
        >>> A
        tensor([[0., 1.],
                [1., 0.]])
    """
    for block in blocks:
        end = block.size(-1)
        block.sub_(rows[..., end - block.size(-2) : end, :] @ rows[..., :end, :].mT)
