r"""A root by nearest neighbours, V^-1 near G'G, of what a low rank leaves of a kernel matrix, V = K - L L' + D.

In a given order of the data, row i of G whitens datum i by its m nearest neighbours N among those before it:

    G_i = (e_i - V_iN V_NN^-1) / sqrt(V_ii - V_iN V_NN^-1 V_Ni)

the last row of the inverse of a Cholesky factor of m + 1 data. Of all triangular G with this sparsity it has the
smallest Kullback-Leibler divergence of N(0, V) from N(0, (G'G)^-1), and G V G' has a diagonal of ones [Vecchia 1988,
Kolotilina & Yeremin 1993].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from gpext.linalg.neighbours import nearest_before

Entries = Callable[[Tensor, Tensor], Tensor]  # rows and columns, each (B,) -> those entries of K (B,)

NUM_NEIGHBOURS = 5
_LITTLE = 0.01  # of the noise: a datum with less residual variance has no neighbours, and is not one
_SLACK = 1.0  # neighbours may be farther by this share than the nearest, which take several times as long to find
_AXES = 8  # in more dimensions neighbours are searched for along this many principal axes
_NUMBERS = 2**22  # processed at a time


@dataclass(frozen=True)
class NeighbourRoot:
    """G (n, n), a few entries per row."""

    rows: _Lists  # of G
    columns: _Lists  # of G'
    log_det: Tensor  # log|G| ()
    explained: float  # share of V_ii that neighbours explain, the mean over data that have any; nan if none has

    def __call__(self, v: Tensor) -> Tensor:
        """Return G v (..., n, R)."""
        return self.rows.times(v)

    def transposed(self, v: Tensor) -> Tensor:
        """Return G' v (..., n, R)."""
        return self.columns.times(v)


@dataclass(frozen=True)
class _Lists:
    """A sparse matrix: the columns and the entries of each row, one row after another."""

    places: Tensor  # (E,)
    entries: Tensor  # (E,)
    starts: Tensor  # of the rows (n,)

    @classmethod
    def of(cls, rows: Tensor, columns: Tensor, entries: Tensor, n: int) -> _Lists:
        """Return the matrix of entries (E,) in these rows and columns, none of n rows empty."""
        order = rows.argsort(stable=True)
        starts = torch.searchsorted(rows[order], torch.arange(n, device=rows.device))
        return cls(columns[order], entries[order], starts)

    def times(self, v: Tensor) -> Tensor:
        """Return the product with v (..., n, R)."""
        flat = v.movedim(-2, 0)
        numbers = flat.reshape(len(flat), -1)
        found = embedding_bag(self.places, numbers, self.starts, mode="sum", per_sample_weights=self.entries)
        return found.view(flat.shape).movedim(0, -2)


def check_noise(noise: Tensor) -> None:
    """Raise unless the noise of every datum is positive.

    Raises:
        ValueError: it is not.
    """
    if not bool((noise > 0).all()):
        raise ValueError(f"a preconditioner needs positive noise; the smallest is {noise.min().item():g}.")


def data_with_neighbours(left: Tensor, noise: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return in random order the indices (k,) of those of n data with residual variance beside the noise."""
    order = torch.randperm(len(left), generator=generator, device="cpu").to(left.device)
    return order[(left > _LITTLE * noise)[order]]


def neighbours_before(points: Tensor, order: Tensor) -> Tensor:
    """Return approximate nearest neighbours of each point among those before it (n, m), padded with its own index.

    For the second half of the order they are among the 3 m or so nearest overall; likewise within the first half.

    Args:
        points: (n, d), finite.
        order: indices (k,) of the points that have neighbours and may be neighbours.
    """
    x = points[order].double().cpu()
    if x.size(-1) > _AXES and len(x) > 1:
        x = x @ torch.linalg.eigh(torch.cov(x.mT)).eigenvectors[:, -_AXES:]
    before = nearest_before(x, NUM_NEIGHBOURS, _SLACK)
    found = torch.arange(len(points), device=points.device).unsqueeze(-1).repeat(1, NUM_NEIGHBOURS)
    found[order] = order[before.to(order.device)]
    return found


def neighbour_root(entries: Entries, root: Tensor, left: Tensor, noise: Tensor, neighbours: Tensor) -> NeighbourRoot:
    """Return G.

    Args:
        entries: of K.
        root: L (n, k).
        left: the diagonal of K - L L' (n,).
        noise: the diagonal of D (n,), positive.
        neighbours: of each datum (n, m), all before it in some order; its own index where there are fewer.
    """
    n, m = neighbours.shape
    own = torch.arange(n, device=root.device).unsqueeze(-1)
    is_one = neighbours != own
    last = torch.eye(m + 1, dtype=root.dtype, device=root.device)
    variance = left + noise
    weights, scale = torch.zeros_like(neighbours, dtype=root.dtype), variance.rsqrt()
    together = max(_NUMBERS // ((m + 1) * max(root.size(-1), m + 1)), 1)
    has_some = is_one.any(-1)
    for i in has_some.nonzero().squeeze(-1).split(together):
        group, there = torch.cat([neighbours[i], own[i]], -1), torch.cat([is_one[i], is_one.new_ones(len(i), 1)], -1)
        rows, columns = torch.broadcast_tensors(group.unsqueeze(-1), group.unsqueeze(-2))
        L = root[group]
        V = entries(rows.reshape(-1), columns.reshape(-1)).view(rows.shape) - L @ L.mT
        V = torch.where(there.unsqueeze(-1) & there.unsqueeze(-2), V, 0.0)
        V.diagonal(dim1=-2, dim2=-1).copy_(torch.where(there, variance[group], 1.0))
        chol, failed = torch.linalg.cholesky_ex(V)
        row = torch.linalg.solve_triangular(chol.mT, last[:, -1:].expand(len(i), -1, -1), upper=True).squeeze(-1)
        is_definite = (failed == 0) & row.isfinite().all(-1)  # if not, by rounding alone, it has no neighbours
        weights[i[is_definite]], scale[i[is_definite]] = row[is_definite, :-1], row[is_definite, -1]
    rows = torch.cat([own.expand_as(neighbours)[is_one], own.squeeze(-1)])
    columns = torch.cat([neighbours[is_one], own.squeeze(-1)])
    values = torch.cat([weights[is_one], scale])
    explained = float((1 - 1 / (scale.square() * variance))[has_some].mean())
    by_rows, by_columns = _Lists.of(rows, columns, values, n), _Lists.of(columns, rows, values, n)
    return NeighbourRoot(by_rows, by_columns, scale.log().sum(), explained)
