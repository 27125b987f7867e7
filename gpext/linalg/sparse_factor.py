r"""A Cholesky factor of a sparse matrix by fronts, and some entries of its inverse [Duff & Reid 1983].

    Q = sum_i c_i r_i r_i' + diag(t) + small blocks,    rows r_i of a few entries

Along the tree of a :class:`gpext.linalg.dissection.Dissection`, from the leaves to the root, a front F of its own
indices o and its boundary b adds up its parts of this sum and what its children leave,

    F_oo = L L',   X = L^-1 F_ob,   F_bb - X'X  is left to the parent;      log|Q| = 2 sum log diag(L)

and from the root to the leaves, with G = L^-T X, the entries of Z = Q^-1 where F has any are [Takahashi et al. 1973]

    Z_ob = -G Z_bb,     Z_oo = (L L')^-1 - Z_ob G'

All of it is products of dense blocks. Q must be positive definite; its parts c, t and the blocks have any sign.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.linalg.dissection import Dissection, Front


@dataclass(frozen=True)
class SparseFactor:
    """L and X of every front."""

    dissection: Dissection
    chol: tuple[Tensor, ...]  # L (..., s, s)
    across: tuple[Tensor, ...]  # X (..., s, b)
    positive_definite: Tensor  # (...)

    @property
    def log_det(self) -> Tensor:
        """log|Q| (...)."""
        return 2 * torch.stack([L.diagonal(dim1=-2, dim2=-1).log().sum(-1) for L in self.chol]).sum(0)

    def solve(self, right: Tensor) -> Tensor:
        """Return Q^-1 right (..., n, R)."""
        return self._backward(self.half_solve(right))

    def half_solve(self, right: Tensor, touched: Tensor | None = None) -> Tensor:
        """Return H right (..., n, R) with H'H = Q^-1: the squared norms of its columns are right' Q^-1 right.

        Args:
            right: (..., n, R).
            touched: indices where it has entries, if they are few; None for any.
        """
        x = self._spread(right)
        visited = set(range(len(self.chol))) if touched is None else self.dissection.paths(touched)
        for i in sorted(visited):
            front, L, X = self.dissection.fronts[i], self.chol[i], self.across[i]
            done = torch.linalg.solve_triangular(L, x[..., front.own, :], upper=False)
            x[..., front.own, :] = done
            x[..., front.boundary, :] -= X.mT @ done
        return x

    def transposed_half_solve(self, right: Tensor) -> Tensor:
        """Return H' right (..., n, R): of standard normal numbers, draws from N(0, Q^-1)."""
        return self._backward(self._spread(right))

    def inverse_entries(self) -> Iterator[tuple[Front, Tensor]]:
        """Yield for each front, from the root to the leaves, the entries of Q^-1 of its own and its boundary."""
        children = Counter(front.parent for front in self.dissection.fronts)
        waiting: dict[int, Tensor] = {}  # of fronts with children to come
        for i in reversed(range(len(self.chol))):
            front, L, X = self.dissection.fronts[i], self.chol[i], self.across[i]
            own, parent = len(front.own), front.parent
            Z = L.new_empty(*L.shape[:-2], own + len(front.boundary), own + len(front.boundary))
            Z[..., :own, :own] = torch.cholesky_inverse(L) if own else 0.0
            if parent is not None:
                Z_bb = submatrix(waiting[parent], front.above)
                G = torch.linalg.solve_triangular(L.mT, X, upper=True)
                Z_ob = -(G @ Z_bb)
                Z[..., :own, :own] -= Z_ob @ G.mT
                Z[..., :own, own:], Z[..., own:, :own], Z[..., own:, own:] = Z_ob, Z_ob.mT, Z_bb
                children[parent] -= 1
                if not children[parent]:
                    del waiting[parent]
            if children[i]:
                waiting[i] = Z
            yield front, Z

    def _spread(self, right: Tensor) -> Tensor:
        """Return a copy of right with the batch dimensions of the factor."""
        batch = torch.broadcast_shapes(right.shape[:-2], self.positive_definite.shape)
        return right.expand(*batch, *right.shape[-2:]).clone()

    def _backward(self, x: Tensor) -> Tensor:
        for i in reversed(range(len(self.chol))):
            front, L, X = self.dissection.fronts[i], self.chol[i], self.across[i]
            right = x[..., front.own, :] - X @ x[..., front.boundary, :]
            x[..., front.own, :] = torch.linalg.solve_triangular(L.mT, right, upper=True)
        return x


def factorise_sparse(
    dissection: Dissection, weights: Tensor, scale: Tensor, diagonal: Tensor | None = None, blocks: Tensor | None = None
) -> SparseFactor:
    """Factorise Q = sum_i scale_i r_i r_i' + diag(diagonal) + blocks.

    Args:
        dissection: of the rows, and of the groups of the blocks, if there are any.
        weights: the entries of the rows r_i (..., R, E), zero where an index is repeated.
        scale: (..., R), of any sign.
        diagonal: (..., n), of any sign.
        blocks: of the second list of groups, (..., P, D, D), symmetric, of any signs.
    """
    given = [t for t in (diagonal, None if blocks is None else blocks[..., 0, 0]) if t is not None]
    batch = torch.broadcast_shapes(weights.shape[:-2], scale.shape[:-1], *(t.shape[:-1] for t in given))
    chol: list[Tensor] = []
    across: list[Tensor] = []
    left: dict[int, list[tuple[Front, Tensor]]] = {}
    positive = torch.ones(batch, dtype=torch.bool, device=weights.device)
    for i, front in enumerate(dissection.fronts):
        own, size = len(front.own), len(front.own) + len(front.boundary)
        F = weights.new_zeros(*batch, size, size)
        rows, places = front.parts[0]
        r = weights[..., rows, :]
        _add_at(F, places, (scale[..., rows].unsqueeze(-1) * r).unsqueeze(-1) * r.unsqueeze(-2))
        if diagonal is not None:
            F[..., :own, :own].diagonal(dim1=-2, dim2=-1).add_(diagonal[..., front.own])
        if blocks is not None:
            groups, places = front.parts[1]
            _add_at(F, places, blocks[..., groups, :, :])
        for child, rest in left.pop(i, []):
            _add_at(F, child.above, rest)
        L, info = torch.linalg.cholesky_ex(F[..., :own, :own])
        positive = positive & (info == 0) & (L.diagonal(dim1=-2, dim2=-1) > 0).all(-1)
        X = torch.linalg.solve_triangular(L, F[..., :own, own:], upper=False)
        if front.parent is not None:
            left.setdefault(front.parent, []).append((front, F[..., own:, own:] - X.mT @ X))
        chol.append(L)
        across.append(X)
    return SparseFactor(dissection, tuple(chol), tuple(across), positive)


def columns_at(index: Tensor, entries: Tensor, size: int) -> Tensor:
    """Return a matrix (..., size, S) whose columns have the entries (..., S, E) at the indices (S, E)."""
    count = len(index)
    at = (index * count + torch.arange(count, device=index.device).unsqueeze(-1)).flatten()
    flat = entries.new_zeros(*entries.shape[:-2], size * count).index_add(-1, at, entries.flatten(-2))
    return flat.unflatten(-1, (size, count))


def submatrix(matrix: Tensor, index: Tensor) -> Tensor:
    """Return the rows and columns (..., *R, k, k) of a matrix (..., n, n) at an index (*R, k)."""
    at = index.unsqueeze(-1) * matrix.size(-1) + index.unsqueeze(-2)
    return matrix.flatten(-2).index_select(-1, at.flatten()).unflatten(-1, at.shape)  # faster than two indices


def _add_at(matrix: Tensor, index: Tensor, entries: Tensor) -> None:
    """Add entries (..., *R, k, k) to the rows and columns of a contiguous matrix (..., n, n) at an index (*R, k)."""
    at = index.unsqueeze(-1) * matrix.size(-1) + index.unsqueeze(-2)
    entries = entries.expand(*matrix.shape[:-2], *at.shape).flatten(matrix.dim() - 2)
    matrix.view(*matrix.shape[:-2], -1).index_add_(-1, at.flatten(), entries)
