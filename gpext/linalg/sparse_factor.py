r"""A Cholesky factor of a sparse matrix by fronts, and the entries of its inverse that are asked for [Duff & Reid 1983].

Along the tree of a :class:`gpext.linalg.dissection.Dissection`, from the leaves to the root, a front F of its own
indices o and its boundary b adds up its rows and what its children leave,

    F_oo = L L',   X = L^-1 F_ob,   F_bb - X'X  is left to the parent;      log|Q| = 2 sum log diag(L)

and from the root to the leaves, with G = L^-T X, the entries of Z = Q^-1 where F has any are [Takahashi et al. 1973]

    Z_ob = -G Z_bb,     Z_oo = (L L')^-1 - Z_ob G'

All of it is products of dense blocks. Q need not be diagonally dominant, only positive definite: c and t have any sign.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.linalg.dissection import Dissection, Front


@dataclass(frozen=True)
class SparseFactor:
    """L and X of every front."""

    dissection: Dissection
    chol: tuple[Tensor, ...]  # L (s, s)
    across: tuple[Tensor, ...]  # X (s, b)
    positive_definite: Tensor  # ()

    @property
    def log_det(self) -> Tensor:
        """log|Q| ()."""
        return 2 * torch.stack([L.diagonal().log().sum() for L in self.chol]).sum()

    def solve(self, right: Tensor) -> Tensor:
        """Return Q^-1 right (n, R)."""
        return self._backward(self.half_solve(right))

    def half_solve(self, right: Tensor, touched: Tensor | None = None) -> Tensor:
        """Return H right (n, R) with H'H = Q^-1: the squared norms of its columns are right' Q^-1 right.

        Args:
            right: (n, R).
            touched: indices where it has entries, if they are few; None for any.
        """
        x = right.clone()
        visited = set(range(len(self.chol))) if touched is None else self.dissection.paths(touched)
        for i in sorted(visited):
            front, L, X = self.dissection.fronts[i], self.chol[i], self.across[i]
            done = torch.linalg.solve_triangular(L, x[front.own], upper=False)
            x[front.own] = done
            x[front.boundary] -= X.mT @ done
        return x

    def transposed_half_solve(self, right: Tensor) -> Tensor:
        """Return H' right (n, R): of standard normal numbers, draws from N(0, Q^-1)."""
        return self._backward(right.clone())

    def inverse_entries(self) -> Iterator[tuple[Front, Tensor]]:
        """Yield for each front, from the root to the leaves, the entries of Q^-1 of its own and its boundary."""
        waiting: dict[int, tuple[Tensor, int]] = {}
        children = [0] * len(self.chol)
        for front in self.dissection.fronts:
            if front.parent is not None:
                children[front.parent] += 1
        for i in reversed(range(len(self.chol))):
            front, L, X = self.dissection.fronts[i], self.chol[i], self.across[i]
            own = len(front.own)
            Z = L.new_empty(own + len(front.boundary), own + len(front.boundary))
            Z[:own, :own] = torch.cholesky_inverse(L) if own else 0.0
            if len(front.boundary):
                assert front.parent is not None
                of_parent, left = waiting[front.parent]
                Z_bb = of_parent[front.above.unsqueeze(-1), front.above]
                G = torch.linalg.solve_triangular(L.mT, X, upper=True)
                Z_ob = -(G @ Z_bb)
                Z[:own, :own] -= Z_ob @ G.mT
                Z[:own, own:], Z[own:, :own], Z[own:, own:] = Z_ob, Z_ob.mT, Z_bb
            if front.parent is not None and front.parent in waiting:
                of_parent, left = waiting.pop(front.parent)
                if left > 1:
                    waiting[front.parent] = of_parent, left - 1
            if children[i]:
                waiting[i] = Z, children[i]
            yield front, Z

    def _backward(self, x: Tensor) -> Tensor:
        for i in reversed(range(len(self.chol))):
            front, L, X = self.dissection.fronts[i], self.chol[i], self.across[i]
            right = x[front.own] - X @ x[front.boundary]
            x[front.own] = torch.linalg.solve_triangular(L.mT, right, upper=True)
        return x


def factorise_sparse(
    dissection: Dissection, weights: Tensor, scale: Tensor, diagonal: Tensor
) -> SparseFactor:
    """Factorise Q = sum_i scale_i r_i r_i' + diag(diagonal).

    Args:
        dissection: of the rows' indices.
        weights: the entries of the rows r_i (R, E), zero where an index is repeated.
        scale: (R,), of any sign.
        diagonal: (n,), of any sign.
    """
    chol: list[Tensor] = []
    across: list[Tensor] = []
    left: dict[int, list[tuple[Front, Tensor]]] = {}
    positive = torch.ones((), dtype=torch.bool, device=weights.device)
    for i, front in enumerate(dissection.fronts):
        own, size = len(front.own), len(front.own) + len(front.boundary)
        F = weights.new_zeros(size, size)
        r = weights[front.rows]
        entries = (scale[front.rows].unsqueeze(-1) * r).unsqueeze(-1) * r.unsqueeze(-2)
        at = front.places.unsqueeze(-1) * size + front.places.unsqueeze(-2)
        F.view(-1).index_add_(0, at.flatten(), entries.flatten())
        F[:own, :own].diagonal().add_(diagonal[front.own])
        for child, rest in left.pop(i, []):
            F.view(-1).index_add_(0, (child.above.unsqueeze(-1) * size + child.above).flatten(), rest.flatten())
        L, info = torch.linalg.cholesky_ex(F[:own, :own])
        positive = positive & (info == 0) & (L.diagonal() > 0).all()
        X = torch.linalg.solve_triangular(L, F[:own, own:], upper=False)
        if front.parent is not None and size > own:
            left.setdefault(front.parent, []).append((front, F[own:, own:].addmm_(X.mT, X, alpha=-1)))
        chol.append(L)
        across.append(X)
    return SparseFactor(dissection, tuple(chol), tuple(across), positive)
