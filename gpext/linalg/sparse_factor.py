r"""A Cholesky factor of a sparse matrix by fronts, and some entries of its inverse [Duff & Reid 1983].

    Q = sum_i c_i r_i r_i' + diag(t) + small blocks,    rows r_i of a few entries

Along the tree of a :class:`gpext.linalg.dissection.Dissection`, from the leaves to the root, a front F of its own
indices o and its boundary b adds up its parts of this sum and what its children leave,

    F_oo = L L',   X = L^-1 F_ob,   F_bb - X'X  is left to the parent;      log|Q| = 2 sum log diag(L)

and from the root to the leaves, with G = L^-T X, the entries of Z = Q^-1 where F has any are [Takahashi et al. 1973]

    Z_ob = -G Z_bb,     Z_oo = (L L')^-1 - Z_ob G'

All of it is products of dense blocks, of a batch of fronts at once (:mod:`gpext.linalg.front_batches`). Q must be
positive definite; its parts c, t and the blocks have any sign.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpext.linalg.dissection import Dissection
from gpext.linalg.front_batches import Batch


@dataclass(frozen=True)
class SparseFactor:
    """L and X of every batch of fronts."""

    dissection: Dissection
    chol: tuple[Tensor, ...]  # L (..., B, s, s)
    across: tuple[Tensor, ...]  # X (..., B, s, b)
    positive_definite: Tensor  # (...)

    @property
    def log_det(self) -> Tensor:
        """log|Q| (...)."""
        return 2 * torch.stack([_diagonal(L).log().sum((-2, -1)) for L in self.chol]).sum(0)

    def solve(self, right: Tensor) -> Tensor:
        """Return Q^-1 right (..., n, R)."""
        return self._backward(self._forward(right))

    def half_solve(self, right: Tensor, touched: Tensor | None = None) -> Tensor:
        """Return H right (..., n, R) with H'H = Q^-1: the squared norms of its columns are right' Q^-1 right.

        Args:
            right: (..., n, R).
            touched: indices where it has entries, if they are few; None for any.
        """
        return self._forward(right, touched)[..., : self.dissection.size, :]

    def transposed_half_solve(self, right: Tensor) -> Tensor:
        """Return H' right (..., n, R): of standard normal numbers, draws from N(0, Q^-1)."""
        return self._backward(self._spread(right))

    def inverse_entries(self) -> Iterator[tuple[Batch, Tensor]]:
        """Yield for each batch, from the root to the leaves, the entries of Q^-1 of own and boundary (..., B, S, S)."""
        batches = self.dissection.batches
        waiting: dict[int, Tensor] = {}  # Z_bb of batches to come
        for j in reversed(range(len(batches))):
            batch, L, X = batches[j], self.chol[j], self.across[j]
            s, b = X.shape[-2:]
            new = L.new_zeros if self.dissection.together else L.new_empty  # what is missing is finite
            Z = new(*L.shape[:-2], batch.size, batch.size)
            Z_oo = torch.cholesky_inverse(L) if s else L
            if j in waiting:
                Z_bb = waiting.pop(j)
                G = torch.linalg.solve_triangular(L.mT, X, upper=True)
                Z_ob = -(G @ Z_bb)
                Z_oo = _less_product(Z_oo, Z_ob, G.mT)
                Z[..., :s, s : s + b], Z[..., s : s + b, :s], Z[..., s : s + b, s : s + b] = Z_ob, Z_ob.mT, Z_bb
            Z[..., :s, :s] = Z_oo
            hand_down(Z, batches, j, waiting)
            yield batch, Z

    def _spread(self, right: Tensor) -> Tensor:
        """Return a copy of right with the batch dimensions of the factor, and a zero for what is missing."""
        lead = torch.broadcast_shapes(right.shape[:-2], self.positive_definite.shape)
        right = right.expand(*lead, *right.shape[-2:])
        return pad(right, (0, 0, 0, 1))

    def _forward(self, right: Tensor, touched: Tensor | None = None) -> Tensor:
        x, tree = self._spread(right), self.dissection
        visited = range(len(tree.batches)) if touched is None else tree.batches_on_paths(touched)
        for j in visited:
            batch, L, X = tree.batches[j], self.chol[j], self.across[j]
            done = torch.linalg.solve_triangular(L, x[..., batch.own, :], upper=False)
            x[..., batch.own, :] = done
            if X.size(-1):
                x.index_add_(-2, batch.boundary.flatten(), (X.mT @ done).flatten(-3, -2), alpha=-1)
        return x

    def _backward(self, x: Tensor) -> Tensor:
        for batch, L, X in reversed(list(zip(self.dissection.batches, self.chol, self.across, strict=True))):
            right = x[..., batch.own, :] - X @ x[..., batch.boundary, :]
            x[..., batch.own, :] = torch.linalg.solve_triangular(L.mT, right, upper=True)
        return x[..., : self.dissection.size, :]


def eliminate(dissection: Dissection, positive: Tensor, parts: Callable[[int], Tensor]) -> SparseFactor:
    """Factorise a sum of parts that belong to the batches of fronts.

    Args:
        dissection: the tree.
        positive: ones (...), bool, of the batch shape of the matrix.
        parts: returns those of the batch of a number (..., B, S, S), to be overwritten.
    """
    tree = dissection
    chol: list[Tensor] = []
    across: list[Tensor] = []
    rests: dict[int, Tensor] = {}
    waited_for = parents_of(tree.batches)
    for j, batch in enumerate(tree.batches):
        s, b = batch.own.size(-1), batch.boundary.size(-1)
        F = parts(j)
        take_up(F, batch, rests, waited_for)
        L, info = torch.linalg.cholesky_ex(F[..., :s, :s])
        positive = positive & ((info == 0) & (_diagonal(L) > 0).all(-1)).all(-1)
        X = torch.linalg.solve_triangular(L, F[..., :s, s : s + b], upper=False)
        if waited_for[j]:
            rests[j] = _less_product(F[..., s : s + b, s : s + b], X.mT, X)
        chol.append(L)
        across.append(X)
    return SparseFactor(dissection, tuple(chol), tuple(across), positive)


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
    lead = torch.broadcast_shapes(weights.shape[:-2], scale.shape[:-1], *(t.shape[:-1] for t in given))
    added = weights.new_zeros(dissection.size) if diagonal is None else diagonal
    added = pad(added, (0, 1), value=1.0)  # 1 for what is missing

    def parts(j: int) -> Tensor:
        batch = dissection.batches[j]
        F = weights.new_zeros(*lead, len(batch.own), batch.size, batch.size)
        of_rows = batch.parts[0]
        r = weights[..., of_rows.groups, :]
        outer = (scale[..., of_rows.groups].unsqueeze(-1) * r).unsqueeze(-1) * r.unsqueeze(-2)
        _add_at(F, of_rows.front, of_rows.places, outer)
        _diagonal(F)[..., : batch.own.size(-1)].add_(added[..., batch.own])
        if blocks is not None:
            of_blocks = batch.parts[1]
            _add_at(F, of_blocks.front, of_blocks.places, blocks[..., of_blocks.groups, :, :])
        return F

    return eliminate(dissection, torch.ones(lead, dtype=torch.bool, device=weights.device), parts)


def parents_of(batches: Sequence[Batch]) -> Counter[int]:
    """Return how many batches have parents of the fronts of each batch."""
    return Counter(child.batch for batch in batches for child in batch.children)


def take_up(matrices: Tensor, batch: Batch, rests: dict[int, Tensor], waited_for: Counter[int]) -> None:
    """Add to the matrices (..., B, S, S) of a batch what its children leave at their boundaries.

    Args:
        matrices: to be changed.
        batch: of the fronts.
        rests: of earlier batches, less those that no other batch takes up.
        waited_for: how many batches are still to take up each one's.
    """
    for child in batch.children:
        rest = rests[child.batch]
        _add_at(matrices, child.parent, child.above, rest if child.front is None else rest[..., child.front, :, :])
        waited_for[child.batch] -= 1
        if not waited_for[child.batch]:
            del rests[child.batch]


def hand_down(matrices: Tensor, batches: Sequence[Batch], number: int, waiting: dict[int, Tensor]) -> None:
    """Put entries of a batch's matrices (..., B, S, S), those at its children's boundaries, where these will find them.

    Args:
        matrices: contiguous.
        batches: all of them.
        number: of the batch among them.
        waiting: the entries (..., B, b, b) by the number of a batch, zero for fronts without a parent.
    """
    for child in batches[number].children:
        found = entries_at(matrices, child.parent, child.above)
        if child.front is None:
            waiting[child.batch] = found
            continue
        if child.batch not in waiting:
            count = len(batches[child.batch].own)
            waiting[child.batch] = matrices.new_zeros(*matrices.shape[:-3], count, *found.shape[-2:])
        waiting[child.batch][..., child.front, :, :] = found


def entries_at(matrices: Tensor, which: Tensor | None, index: Tensor) -> Tensor:
    """Return the rows and columns (..., R, k, k) at an index (R, k), each of one of the matrices (..., B, S, S).

    Args:
        matrices: contiguous.
        which: of them, for each (R,); None for the first.
        index: (R, k).
    """
    at = _flat(matrices.size(-1), which, index)
    return matrices.flatten(-3).index_select(-1, at.flatten()).unflatten(-1, at.shape)  # faster than two indices


def columns_at(index: Tensor, entries: Tensor, size: int) -> Tensor:
    """Return a matrix (..., size, S) whose columns have the entries (..., S, E) at the indices (S, E)."""
    count = len(index)
    at = (index * count + torch.arange(count, device=index.device).unsqueeze(-1)).flatten()
    flat = entries.new_zeros(*entries.shape[:-2], size * count).index_add(-1, at, entries.flatten(-2))
    return flat.unflatten(-1, (size, count))


def _add_at(matrices: Tensor, which: Tensor | None, index: Tensor, entries: Tensor) -> None:
    """Add entries (..., R, k, k) to rows and columns, see :func:`entries_at`."""
    at = _flat(matrices.size(-1), which, index)
    entries = entries.expand(*matrices.shape[:-3], *at.shape).flatten(matrices.dim() - 3)
    matrices.view(*matrices.shape[:-3], -1).index_add_(-1, at.flatten(), entries)


def _less_product(matrices: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return M - A B (..., B, k, l), without a copy of A B."""
    M, A, B = (each.flatten(0, -3) for each in (matrices, left, right))
    return torch.baddbmm(M, A, B, alpha=-1).view(matrices.shape)


def _flat(size: int, which: Tensor | None, index: Tensor) -> Tensor:
    """Return the places (R, k, k) of rows and columns (R, k) of matrices (B, S, S) among all of their entries."""
    at = index.unsqueeze(-1) * size + index.unsqueeze(-2)
    return at if which is None else at + (which * size**2).view(-1, 1, 1)


def _diagonal(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1)
