r"""Covariances a' Q^-1 b of many sparse vectors, given a sparse factor of Q.

The indices of a few near points are below one front t of the tree, or in its boundary. Once the fronts on the ways from
them to t are eliminated, what is left of a vector is in the own indices and the boundary of t, where the entries Z of
Q^-1 are known:

    a' Q^-1 b = sum of (L^-1 a)_o' (L^-1 b)_o over these fronts + rest(a)' Z rest(b)

Most points are far from large separators, and their t is near the leaves. Where there is no such t, as between regions,
or there are too few vectors to compute Z for, fronts are eliminated up to the roots, and nothing is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.linalg.front_batches import Batch
from gpext.linalg.sparse_factor import SparseFactor, columns_at

_COLUMNS = 128  # vectors at a time
_WORTHWHILE = 16  # times as many, from which on Z takes less time than to go up to the roots


def sparse_covariances(factor: SparseFactor, index: Tensor, entries: Tensor) -> Tensor:
    """Return a_c' Q^-1 a_d (..., S, C, C) of S groups of C vectors with few entries each.

    Args:
        factor: of Q (..., n, n).
        index: of the entries (S, C, E), near each other in a group.
        entries: (..., S, C, E).
    """
    tree = factor.dissection
    count, size = index.shape[:2]
    lead = torch.broadcast_shapes(entries.shape[:-3], factor.positive_definite.shape)
    entries = entries.expand(*lead, *index.shape)
    found = entries.new_empty(*lead, count, size, size)
    if tree.together or count * size < _WORTHWHILE * _COLUMNS:
        meeting = torch.full((count,), -1, device=index.device)
    else:
        meeting = tree.meeting(index.flatten(1))
    order = torch.argsort(tree.node[index[:, 0, 0]] + len(tree.fronts) * meeting, stable=True)
    at_once = max(_COLUMNS // size, 1)
    apart = order[: int((meeting < 0).sum())]
    for i in apart.split(at_once):
        half = factor.half_solve(_columns(index[i], entries[..., i, :, :], tree.size), index[i].flatten())
        found[..., i, :, :] = _products(half, size)
    fronts, numbers = meeting[order[len(apart) :]].unique_consecutive(return_counts=True)
    groups = dict(zip(fronts.tolist(), order[len(apart) :].split(numbers.tolist()), strict=True))
    if not groups:
        return found
    place = torch.empty(tree.size, dtype=torch.long, device=index.device)
    for batch, Z in factor.inverse_entries():
        for i in groups.get(batch.fronts[0], order[:0]).split(at_once):
            found[..., i, :, :] = _below(factor, batch, Z[..., 0, :, :], index[i], entries[..., i, :, :], place)
    return found


def _below(factor: SparseFactor, top: Batch, Z: Tensor, index: Tensor, entries: Tensor, place: Tensor) -> Tensor:
    """Return the covariances of groups that meet in the front of a batch, where Q^-1 is Z (..., S, S).

    Args:
        factor: of Q.
        top: the batch, of one front.
        Z: the entries of its own indices and its boundary.
        index: (S, C, E).
        entries: (..., S, C, E).
        place: memory for the numbers of indices (n,).
    """
    tree = factor.dissection
    below = tree.ways(index.flatten(), top.fronts[0])  # whose batches are of one front each, with its number
    rows = torch.cat([tree.batches[j].own[0] for j in below] + [top.own[0], top.boundary[0]])
    place[rows] = torch.arange(len(rows), device=rows.device)
    x = _columns(place[index], entries, len(rows))
    for j in below:
        batch, L, X = tree.batches[j], factor.chol[j][..., 0, :, :], factor.across[j][..., 0, :, :]
        own = place[batch.own[0]]
        done = torch.linalg.solve_triangular(L, x[..., own, :], upper=False)
        x[..., own, :] = done
        x.index_add_(-2, place[batch.boundary[0]], X.mT @ done, alpha=-1)
    eliminated = len(rows) - Z.size(-1)
    rest = x[..., eliminated:, :]
    size = index.size(1)
    return _products(x[..., :eliminated, :], size) + _products(rest, size, Z @ rest)


def _columns(index: Tensor, entries: Tensor, size: int) -> Tensor:
    """Return a matrix (..., size, S C) of vectors with entries (..., S, C, E) at indices (S, C, E)."""
    return columns_at(index.flatten(0, 1), entries.flatten(-3, -2), size)


def _products(x: Tensor, size: int, y: Tensor | None = None) -> Tensor:
    """Return x_c' y_d (..., S, C, C) of the columns of each group, of x and y (..., n, S C); y is x for None."""
    x = x.unflatten(-1, (-1, size))
    y = x if y is None else y.unflatten(-1, (-1, size))
    return torch.einsum("...nsc,...nsd->...scd", x, y)
