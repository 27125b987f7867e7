"""Cholesky factors L of B = I + R C R, R diagonal and often zero, and the diagonal of B^-1."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAF = 128  # size of a triangle that is inverted as a whole
_BLOCK_SHARE = 0.75  # of R that is not zero, below which a block is taken out: more and moving it costs what it saves


def factor_within(covariance: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Return L (..., N, N), and whether the factorisation succeeded; it is the identity where R is zero."""
    index = _few_positive(covariance, root)
    if index is None:
        return factor_whole(covariance, root, sign=1)
    inner, ok = factor_whole(covariance.index_select(0, index).index_select(1, index), root[index], sign=1)
    chol = torch.eye(len(root), dtype=inner.dtype, device=inner.device)
    return chol.index_put((index.unsqueeze(-1), index), inner), ok


def inverse_diagonal(chol: Tensor, root: Tensor) -> Tensor:
    """Return the diagonal of B^-1 (..., N), given L and R."""
    index = _few_positive(chol, root)
    if index is None:
        return _inverse_diagonal(chol)
    inner = _inverse_diagonal(chol.index_select(0, index).index_select(1, index))
    return torch.ones_like(root).index_put((index,), inner)


def _few_positive(matrix: Tensor, root: Tensor) -> Tensor | None:
    """Return where R is positive, if that is little enough of one posterior to make a block of it, else None."""
    if matrix.dim() > 2 or root.dim() > 1:
        return None
    index = root.nonzero().squeeze(-1)
    return index if len(index) < _BLOCK_SHARE * len(root) else None


def factor_whole(covariance: Tensor, root: Tensor, *, sign: int) -> tuple[Tensor, Tensor]:
    """Return L with L L' = I + sign R C R, and whether the factorisation succeeded."""
    inner = (covariance * (sign * root).unsqueeze(-1)).mul_(root.unsqueeze(-2))
    inner.diagonal(dim1=-2, dim2=-1).add_(1)
    chol, info = torch.linalg.cholesky_ex(inner)
    return chol, info == 0


def _inverse_diagonal(chol: Tensor) -> Tensor:
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
    left = _inverse_diagonal(upper) + solve_lower(lower, corner).square().sum(-2)
    return torch.cat([left, _inverse_diagonal(lower)], -1)


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


def given_sites(chol: Tensor, root: Tensor, reduced: Tensor) -> Tensor:
    """Return the covariance of the values and others given sites, R^-1 L^-T reduced (..., N, S), where R is not zero.

    The prior's less (L^-1 R C)' reduced is the same and has no digits of a variance far below the prior's. Off its
    diagonal a row of L, and so one of `reduced` and of the solution, is as small as its R: small ones lose nothing.

    Args:
        chol: L (..., N, N).
        root: R (..., N).
        reduced: L^-1 R times the prior covariance of the values and the others (..., N, S).
    """
    solved = torch.linalg.solve_triangular(chol.mT, reduced, upper=True)
    return solved / torch.where(root > 0, root, 1.0).unsqueeze(-1)
