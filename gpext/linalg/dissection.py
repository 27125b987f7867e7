r"""Nested dissection of a sparse symmetric matrix whose indices are points in space [George 1973].

The matrix is a sum of products of sparse rows, Q = sum_i c_i r_i r_i' + diag(t): indices in one row are connected. The
points are halved along an axis; a separator, taken from one side of it, holds every index that shares a row with the
other side, so that without it Q is a matrix of two independent blocks, which are halved in turn:

    Q = [Q_1   0   Q_1s; 0   Q_2   Q_2s; Q_s1   Q_s2   Q_ss]

Eliminated from the smallest blocks upwards, a node of this binary tree fills in its own indices and its boundary alone:
the indices of separators above it that share a row with it or with a node below it. In two dimensions a separator of n
points whose rows are local has O(sqrt(n)) indices, so that a Cholesky factor takes O(n^(3/2)) operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LEAF = 96  # indices that are not divided further
_LARGE = 0.5  # share of a block above which a separator is not worth its division


@dataclass(frozen=True)
class Front:
    """A node of the tree."""

    own: Tensor  # indices that are eliminated here (s,)
    boundary: Tensor  # indices of separators above that these and those below are connected with (b,)
    parent: int | None  # its place in the list of fronts, after this one
    above: Tensor  # places of the boundary in the parent's own and boundary (b,)
    rows: Tensor  # that are added here (R,)
    places: Tensor  # of the entries of these rows in own and boundary (R, E)


@dataclass(frozen=True)
class Dissection:
    """The tree, from its leaves to the root, of an n x n matrix; of use for any values of its entries."""

    size: int  # n
    fronts: tuple[Front, ...]
    node: Tensor  # the front that eliminates each index (n,)

    @classmethod
    def of(cls, points: Tensor, rows: Tensor) -> Dissection:
        """Return a tree for rows that connect points.

        Args:
            points: (n, d), in whose space connected points are near each other; any d columns if there is no space.
            rows: indices of the points of each row (R, E), repeated where a row has fewer.
        """
        level, cell = _partition(points.double().cpu(), rows.cpu())
        return _tree(level, cell, rows.cpu(), points.device)

    def paths(self, index: Tensor) -> set[int]:
        """Return the fronts that eliminate these indices, and all above them."""
        waiting, found = self.node[index].unique().tolist(), set[int]()
        while waiting:
            i = waiting.pop()
            parent = self.fronts[i].parent
            if i not in found:
                found.add(i)
                if parent is not None:
                    waiting.append(parent)
        return found

    @property
    def work(self) -> float:
        """The number of multiplications of a Cholesky factor."""
        return sum(
            s**3 / 6 + s**2 * b / 2 + s * b**2 for s, b in ((len(f.own), len(f.boundary)) for f in self.fronts)
        )

    @property
    def stored(self) -> int:
        """The number of entries of a factor."""
        return sum(len(f.own) * (len(f.own) + len(f.boundary)) for f in self.fronts)


def _partition(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each index the level of the separator or leaf that it belongs to, the root's being 0, and its cell."""
    n = len(points)
    cell = torch.zeros(n, dtype=torch.long)
    level = torch.full((n,), -1)
    depth = 0
    while bool((level < 0).any()):
        active = level < 0
        count = torch.bincount(cell[active], minlength=2**depth)
        best = count.clone()
        side, separator = torch.zeros(n, dtype=torch.bool), active.clone()
        for axis in range(points.size(-1)):
            upper = _upper_halves(points[:, axis], cell, active, count)
            low, high = _connected(upper, active, rows)
            sizes = torch.stack([torch.bincount(cell[marked], minlength=2**depth) for marked in (low, high)])
            smaller, which = sizes.min(0)
            takes = (smaller < best) & (count > _LEAF) & (smaller < _LARGE * count)
            best = torch.where(takes, smaller, best)
            of_axis = takes[cell]
            side = torch.where(of_axis, upper, side)
            separator = torch.where(of_axis, torch.where(which[cell] == 0, low, high), separator)
        level[separator] = depth
        remains = active & ~separator
        cell[remains] = 2 * cell[remains] + side[remains].long()
        depth += 1
    return level, cell


def _upper_halves(x: Tensor, cell: Tensor, active: Tensor, count: Tensor) -> Tensor:
    """Return which active indices are above the median of their cell (n,)."""
    index = active.nonzero().squeeze(-1)
    order = index[x[index].argsort(stable=True)]
    order = order[cell[order].argsort(stable=True)]
    of_cell = cell[order]
    rank = torch.arange(len(order)) - (count.cumsum(0) - count)[of_cell]
    upper = torch.zeros_like(active)
    upper[order] = 2 * rank >= count[of_cell]
    return upper


def _connected(upper: Tensor, active: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return which active indices of the lower and of the upper halves share a row with the other half (n,)."""
    there, above = active[rows], upper[rows]
    across = (there & above).any(-1) & (there & ~above).any(-1)
    marked = torch.zeros_like(active)
    marked[rows[across].flatten()] = True
    return marked & active & ~upper, marked & active & upper


def _tree(level: Tensor, cell: Tensor, rows: Tensor, device: torch.device) -> Dissection:
    n, depth = len(level), int(level.max()) + 1
    deepest, which = level[rows].max(-1)  # of each row: all its indices are on one path to the root
    at = cell[rows.gather(-1, which.unsqueeze(-1)).squeeze(-1)]
    fronts: list[Front] = []
    found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    names: dict[tuple[int, int], int] = {}
    for depth_of_front in reversed(range(depth)):
        below = deepest >= depth_of_front
        t = at[below] >> (deepest[below] - depth_of_front)
        keys = (t.unsqueeze(-1) * n + rows[below])[level[rows[below]] < depth_of_front].unique()
        boundary = _grouped(keys % n, keys // n)
        index = (level == depth_of_front).nonzero().squeeze(-1)
        own = _grouped(index, cell[index])
        for c in sorted({*own, *boundary}):
            none = torch.zeros(0, dtype=torch.long)
            found[depth_of_front, c] = own.get(c, none), boundary.get(c, none)
            names[depth_of_front, c] = len(names)
    own_rows = _grouped(torch.arange(len(rows)), deepest << 40 | at)
    place, node = torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long)
    for (depth_of_front, c), (own_index, boundary_index) in found.items():
        node[own_index] = names[depth_of_front, c]
        parent = (depth_of_front - 1, c >> 1)
        above = torch.zeros(0, dtype=torch.long)
        if parent in found:
            both = torch.cat(found[parent])
            place[both] = torch.arange(len(both))
            above = place[boundary_index]
        both = torch.cat([own_index, boundary_index])
        place[both] = torch.arange(len(both))
        added = own_rows.get(depth_of_front << 40 | c, torch.zeros(0, dtype=torch.long))
        parts = (own_index, boundary_index, above, added, place[rows[added]])
        own_index, boundary_index, above, added, places = (part.to(device) for part in parts)
        fronts.append(Front(own_index, boundary_index, names.get(parent), above, added, places))
    return Dissection(n, tuple(fronts), node.to(device))


def _grouped(values: Tensor, groups: Tensor) -> dict[int, Tensor]:
    """Return the values of each group, by its number."""
    order = groups.argsort(stable=True)
    numbers, counts = groups[order].unique_consecutive(return_counts=True)
    return dict(zip(numbers.tolist(), values[order].split(counts.tolist()), strict=True))
