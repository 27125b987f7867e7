r"""Nested dissection of a sparse symmetric matrix whose indices are points in space [George 1973].

The matrix is a sum of small blocks, each on a few indices, which it connects. The points are halved by a straight cut;
a separator, the fewest indices without which no block has indices on both sides, leaves two independent blocks, which
are halved in turn:

    Q = [Q_1   0   Q_1s; 0   Q_2   Q_2s; Q_s1   Q_s2   Q_ss]

Eliminated from the leaves upwards, a node of this binary tree fills in its own indices and its boundary alone: the
indices of separators above it that share a block with it or with a node below it. In two dimensions a separator of n
points whose blocks are local has O(sqrt(n)) indices, so that a Cholesky factor takes O(n^(3/2)) operations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpext.linalg.front_batches import Batch, Front, batches_of

Array = Any  # a NumPy array: torch's threads would wait for each other at every small step

_LEAF = 96  # indices that are not divided further
_LARGE = 0.5  # share of a block above which a separator is not worth its division


@dataclass(frozen=True)
class Dissection:
    """The tree, from its leaves to the root, of an n x n matrix; of use for any values of its entries."""

    size: int  # n
    fronts: tuple[Front, ...]
    node: Tensor  # the front that eliminates each index (n,)
    together: bool  # whether fronts of a level are eliminated at once

    @classmethod
    def of(
        cls, points: Tensor, *groups: Tensor, region: Tensor | None = None, together: bool | None = None
    ) -> Dissection:
        """Return a tree, or one of each region, for lists of groups that connect points.

        Args:
            points: (n, d), in whose space connected points are near each other; any d columns if there is no space.
            groups: indices of the points of each group (R, E), repeated where one has fewer.
            region: the number from 0 of each point's region (n,), where no group connects points of two; None for one.
            together: whether fronts of a level are eliminated at once; None for where this is faster, not on a CPU.
        """
        together = points.device.type != "cpu" if together is None else together
        lists = [group.cpu().numpy() for group in groups]
        start = np.zeros(len(points), dtype=np.int64) if region is None else region.cpu().numpy()
        level, cell = _partition(points.double().cpu().numpy(), start, lists)
        fronts, node = _tree(level, cell, lists)
        return cls(len(points), fronts, torch.from_numpy(node).to(points.device), together)

    @classmethod
    def of_regions(cls, region: Tensor, together: bool | None = None) -> Dissection:
        """Return a tree for each region, of one front; see :meth:`of`."""
        together = region.device.type != "cpu" if together is None else together
        order = region.argsort(stable=True).cpu()
        parts = order.split(torch.bincount(region.cpu()).tolist())
        fronts = tuple(Front(own, own[:0], 0, None, own[:0], ()) for own in parts)
        return cls(len(region), fronts, region, together)

    def repeat(self, times: int) -> Dissection:
        """Return the tree of D values at each point: value d of point p has the index d n + p.

        That of the i-th point of a front is its (D i + d)-th.
        """

        def spread(index: Tensor, step: int, shift: int) -> Tensor:
            return (step * index.unsqueeze(-1) + shift * torch.arange(times, device=index.device)).flatten()

        fronts = tuple(
            Front(
                spread(front.own, 1, self.size),
                spread(front.boundary, 1, self.size),
                front.level,
                front.parent,
                spread(front.above, times, 1),
                (),
            )
            for front in self.fronts
        )
        return Dissection(times * self.size, fronts, self.node.repeat(times), self.together)

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """The fronts as they are eliminated."""
        return batches_of(self.fronts, self.size, self.node.device, together=self.together)

    def batches_on_paths(self, index: Tensor) -> list[int]:
        """Return the batches that hold any of the :meth:`paths`."""
        visited = self.paths(index)
        return [j for j, batch in enumerate(self.batches) if not visited.isdisjoint(batch.fronts)]

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

    def meeting(self, index: Tensor) -> Tensor:
        """Return the first front below which, or in whose own and boundary, all indices of a group are.

        On the way up from the lowest of the fronts that eliminate them.

        Args:
            index: (S, K).

        Returns:
            (S,), -1 where there is none: in trees of several roots.
        """
        given, up = index.cpu().numpy(), self._lineage
        node, level = self.node.cpu().numpy()[given], np.array([front.level for front in self.fronts])
        parent = np.array([-1 if front.parent is None else front.parent for front in self.fronts])
        bounds = [front.boundary.numpy() + i * self.size for i, front in enumerate(self.fronts)]
        bounded = np.sort(np.concatenate(bounds))
        top = np.take_along_axis(node, level[node].argmax(-1, keepdims=True), -1)[:, 0]
        waiting = np.arange(len(given))
        while len(waiting):
            t = top[waiting, None]
            held = (up[node[waiting], level[t]] == t) | _contains(bounded, t * self.size + given[waiting])
            waiting = waiting[~held.all(-1)]
            top[waiting] = parent[top[waiting]]
            waiting = waiting[top[waiting] >= 0]
        return torch.from_numpy(top).to(self.node.device)

    def ways(self, index: Tensor, top: int) -> list[int]:
        """Return the fronts below a top one through which the ways from indices (K,) lead there, the lowest first."""
        up, found = self._lineage, set[int]()
        at = self.fronts[top].level
        for i in self.node[index].unique().tolist():
            if up[i, at] == top:
                found.update(up[i, at + 1 : self.fronts[i].level + 1].tolist())
        return sorted(found)

    @cached_property
    def _lineage(self) -> Array:
        """The front of each level above each front, itself included; -1 below it (F, levels)."""
        up = np.full((len(self.fronts), 1 + max(front.level for front in self.fronts)), -1)
        for i in reversed(range(len(self.fronts))):
            front = self.fronts[i]
            if front.parent is not None:
                up[i] = up[front.parent]
            up[i, front.level] = i
        return up

    @property
    def work(self) -> float:
        """The number of multiplications of a Cholesky factor."""
        return sum(s**3 / 6 + s**2 * b / 2 + s * b**2 for s, b in ((len(f.own), len(f.boundary)) for f in self.fronts))

    @property
    def stored(self) -> int:
        """The number of entries of a factor."""
        return sum(len(f.own) * (len(f.own) + len(f.boundary)) for f in self.fronts)


def _partition(points: Array, cell: Array, lists: list[Array]) -> tuple[Array, Array]:
    """Return for each index the level of the separator or leaf that it belongs to, the roots' being 0, and its cell.

    Args:
        points: (n, d).
        cell: that each index starts in, of the root of its region (n,).
        lists: of the groups.
    """
    n, roots = len(points), int(cell.max()) + 1
    level = np.full(n, -1)
    depth, cell, along = 0, cell.copy(), _directions(points)
    while (level < 0).any():
        active, cells = level < 0, roots * 2**depth
        count = np.bincount(cell[active], minlength=cells)
        fewest, upper = count, np.zeros(n, dtype=bool)
        for x in along:
            halves = _upper_halves(x, cell, active, count)
            sides = _connected(halves, active, lists)
            smaller = np.minimum(*(np.bincount(cell[marked], minlength=cells) for marked in sides))
            upper = np.where((smaller < fewest)[cell], halves, upper)
            fewest = np.minimum(smaller, fewest)
        cover = _smallest_cover(upper, active, lists)
        divides = (count > _LEAF) & (np.bincount(cell[cover], minlength=cells) < _LARGE * count)
        separator = np.where(divides[cell], cover, active)
        level[separator] = depth
        remains = active & ~separator
        cell[remains] = 2 * cell[remains] + upper[remains]
        depth += 1
    return level, cell


def _directions(points: Array) -> list[Array]:
    """Return the coordinates of the points (n,) along each direction in which they may be halved."""
    if points.shape[1] != 2:
        return list(points.T)
    x, y = points.T
    return [x, y, x + y, x - y]


def _upper_halves(x: Array, cell: Array, active: Array, count: Array) -> Array:
    """Return which active indices are above the median of their cell (n,)."""
    index = np.flatnonzero(active)
    order = index[np.lexsort((x[index], cell[index]))]
    of_cell = cell[order]
    rank = np.arange(len(order)) - (count.cumsum() - count)[of_cell]
    upper = np.zeros_like(active)
    upper[order] = 2 * rank >= count[of_cell]
    return upper


def _connected(upper: Array, active: Array, lists: list[Array]) -> tuple[Array, Array]:
    """Return which active indices of the lower and of the upper halves share a group with the other half (n,)."""
    marked = np.zeros_like(active)
    for groups in lists:
        marked[_crossing(upper, active, groups)[0]] = True
    return marked & active & ~upper, marked & active & upper


def _crossing(upper: Array, active: Array, groups: Array) -> tuple[Array, Array, Array]:
    """Return the groups with active indices in both halves, and which of these indices are in the lower and the upper.

    All are (R, E).
    """
    there, above = active[groups], upper[groups]
    low, high = there & ~above, there & above
    both = low.any(-1) & high.any(-1)
    return groups[both], low[both], high[both]


def _smallest_cover(upper: Array, active: Array, lists: list[Array]) -> Array:
    """Return the fewest active indices that share in every connection between the halves (n,).

    They are as many as the connections of a largest matching. Of all walks from its unmatched lower indices, upwards
    along any connection and back along the matching, they are the lower indices that none reaches, and the upper ones
    that one does [Konig 1931].
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_bipartite_matching

    n = len(active)
    pairs = []
    for groups in lists:
        crossing, low, high = _crossing(upper, active, groups)
        group, i, j = np.nonzero(low[:, :, None] & high[:, None, :])
        pairs.append(crossing[group, i] * n + crossing[group, j])
    low, high = np.divmod(np.unique(np.concatenate(pairs)), n)
    connected = csr_matrix((np.ones(len(low), dtype=bool), (low, high)), shape=(n, n))
    matched = maximum_bipartite_matching(connected, perm_type="column")  # of each lower index, or -1
    lower, reached = np.zeros(n, dtype=bool), np.zeros(n + 1, dtype=bool)
    lower[low] = True
    free, back = np.flatnonzero(lower & (matched < 0)), np.flatnonzero(matched >= 0)
    start = np.full(len(free), n)  # one more node, before the free ones
    rows, columns = np.concatenate([low, matched[back], start]), np.concatenate([high, back, free])
    walks = csr_matrix((np.ones(len(rows), dtype=bool), (rows, columns)), shape=(n + 1, n + 1))
    reached[breadth_first_order(walks, n, return_predecessors=False)] = True
    return np.where(upper, reached[:n], lower & ~reached[:n])


def _tree(level: Array, cell: Array, lists: list[Array]) -> tuple[tuple[Front, ...], Array]:
    """Return the fronts, from the leaves to the root, and the one that eliminates each index (n,)."""
    n, depth = len(level), int(level.max()) + 1
    none = np.zeros(0, dtype=np.int64)
    lowest = [_lowest(level, cell, groups) for groups in lists]
    found: dict[tuple[int, int], tuple[Array, Array]] = {}  # own and boundary, by level and cell
    for at_level in reversed(range(depth)):
        pairs = []
        for groups, (deepest, at) in zip(lists, lowest, strict=True):
            below = deepest >= at_level
            front, members = at[below] >> (deepest[below] - at_level), groups[below]
            pairs.append((front[:, None] * n + members)[level[members] < at_level])
        front, members = np.divmod(np.unique(np.concatenate(pairs)), n)
        boundary = _grouped(members, front)
        index = np.flatnonzero(level == at_level)
        own = _grouped(index, cell[index])
        for c in sorted({*own, *boundary}):
            found[at_level, c] = own.get(c, none), boundary.get(c, none)
    number = {name: i for i, name in enumerate(_branch_by_branch(found))}
    added = [_grouped(np.arange(len(at)), deepest << 40 | at) for deepest, at in lowest]
    place, node = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    fronts: list[Front] = []
    for at_level, c in number:
        own_index, boundary_index = found[at_level, c]
        parent, above = (at_level - 1, c >> 1), none
        if parent in found:
            _number(place, np.concatenate(found[parent]))
            above = place[boundary_index]
        node[own_index] = number[at_level, c]
        _number(place, np.concatenate([own_index, boundary_index]))
        here = [each.get(at_level << 40 | c, none) for each in added]
        parts = tuple(
            (torch.from_numpy(i), torch.from_numpy(place[groups[i]])) for i, groups in zip(here, lists, strict=True)
        )
        sides = torch.from_numpy(own_index), torch.from_numpy(boundary_index)
        fronts.append(Front(*sides, at_level, number.get(parent), torch.from_numpy(above), parts))
    return tuple(fronts), node


def _branch_by_branch(names: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return fronts, by level and cell, each after those below it, and these next to it.

    So what a walk along them has to remember is of one branch, not of a whole level.
    """
    below = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for level, cell in names:
        below[level - 1, cell >> 1].append((level, cell))
    waiting = [name for name in names if (name[0] - 1, name[1] >> 1) not in names]
    found = []
    while waiting:
        found.append(waiting.pop())
        waiting.extend(below[found[-1]])
    return found[::-1]


def _lowest(level: Array, cell: Array, groups: Array) -> tuple[Array, Array]:
    """Return the level and the cell of the lowest index of each group: all of a group are on one path to the root."""
    which = np.take_along_axis(groups, level[groups].argmax(-1, keepdims=True), -1)[:, 0]
    return level[which], cell[which]


def _contains(ordered: Array, values: Array) -> Array:
    """Return whether each of the values is among the ordered ones."""
    if not len(ordered):
        return np.zeros(values.shape, dtype=bool)
    return ordered[np.searchsorted(ordered, values).clip(max=len(ordered) - 1)] == values


def _number(place: Array, index: Array) -> None:
    place[index] = np.arange(len(index))


def _grouped(values: Array, groups: Array) -> dict[int, Array]:
    """Return the values of each group, by its number."""
    order = groups.argsort(kind="stable")
    numbers, starts = np.unique(groups[order], return_index=True)
    ends = [*starts[1:], len(order)]
    return {c: values[order[i:j]] for c, i, j in zip(numbers.tolist(), starts, ends, strict=False)}
