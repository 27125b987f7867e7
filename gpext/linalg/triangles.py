"""Cholesky factors L of B = I + R C R or I - R C R, R diagonal, what they solve, and the diagonal of B^-1."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAF = 128  # size of a triangle that is inverted as a whole


def factor_whole(covariance: Tensor, root: Tensor, *, sign: int) -> tuple[Tensor, Tensor]:
    """Return L with L L' = I + sign R C R, and whether the factorisation succeeded.

    LAPACK calls a pivot of zero a success; it makes the determinant zero and the inverse infinite.
    """
    inner = (covariance * (sign * root).unsqueeze(-1)).mul_(root.unsqueeze(-2))
    inner.diagonal(dim1=-2, dim2=-1).add_(1)
    chol, info = torch.linalg.cholesky_ex(inner)
    return chol, (info == 0) & (chol.diagonal(dim1=-2, dim2=-1) > 0).all(-1)


def inverse_diagonal(chol: Tensor) -> Tensor:
    """Return the diagonal of (L L')^-1 (..., N), the squared columns of L^-1, in a third of a full solve.

    With L = [[A, 0], [C, D]], L^-1 = [[A^-1, 0], [-D^-1 C A^-1, D^-1]].
    """
    size = chol.size(-1)
    if size <= _LEAF:
        unit = torch.eye(size, dtype=chol.dtype, device=chol.device)
        return solve_lower(chol, unit.expand(chol.shape)).square().sum(-2)
    half = size // 2
    upper, lower = chol[..., :half, :half], chol[..., half:, half:]
    corner = torch.linalg.solve_triangular(upper, chol[..., half:, :half], upper=False, left=False)
    left = inverse_diagonal(upper) + solve_lower(lower, corner).square().sum(-2)
    return torch.cat([left, inverse_diagonal(lower)], -1)


def solve_lower(chol: Tensor, right: Tensor) -> Tensor:
    """Return L^-1 right."""
    return torch.linalg.solve_triangular(chol, right, upper=False)


def solve_whole(chol: Tensor, right: Tensor) -> Tensor:
    """Return (L L')^-1 right: for a few columns in a fifth of the time of `torch.cholesky_solve`, which copies L."""
    return torch.linalg.solve_triangular(chol.mT, solve_lower(chol, right), upper=True)


def take_columns(matrix: Tensor, index: Tensor) -> Tensor:
    """Return the columns (..., N, k) of each matrix of a batch."""
    if matrix.dim() == 2 and index.dim() == 1:
        return matrix.index_select(-1, index)
    batch = torch.broadcast_shapes(matrix.shape[:-2], index.shape[:-1])
    index = index.expand(*batch, index.size(-1)).unsqueeze(-2)
    return torch.take_along_dim(matrix.expand(*batch, *matrix.shape[-2:]), index, -1)
