"""Orderings of points, and the nearest neighbours of each point among those before it.

Nearest by distance in O(n log n), or strongest by any function of two points in O(n^2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

_SPREAD = 20_000  # points of which each is the farthest from those before; the others follow at random
_ENTRIES = 2**22  # of a function of two points, at a time
_AT_ONCE = 8  # times the number of neighbours, a set that is searched without division

Ordering = Literal["maximin", "random", "coordinate", "middle"]
Strength = Callable[[Tensor, Tensor], Tensor]
"""Indices of points (r,) and (c,) -> how strongly each of the first goes with each of the second (r, c)."""


def maximin_order(points: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return an order of points (n, d) in which each is far from all before: a coarse grid, then finer ones.

    Each is the farthest from those before, and the first is the nearest to the mean [Guinness 2018]. It takes O(n^2)
    operations, so that of more than 20,000 points a random subset is in this order, and the others are after it.
    """
    chosen = torch.randperm(len(points), generator=generator, device="cpu")
    x = points.double().cpu()[chosen[:_SPREAD]].numpy()  # by NumPy: torch's threads would wait for each other at a step
    order = np.empty(len(x), dtype=np.int64)
    i = int(np.square(x - x.mean(0)).sum(-1).argmin())
    distance = np.full(len(x), np.inf)
    columns = np.ascontiguousarray(x.T)
    moved, new = np.empty_like(columns), np.empty_like(distance)
    for step in range(len(x)):
        order[step] = i
        np.subtract(columns, columns[:, i : i + 1], out=moved)
        np.square(moved, out=moved).sum(0, out=new)
        np.minimum(distance, new, out=distance)
        distance[i] = -1.0
        i = int(distance.argmax())
    return torch.cat([chosen[:_SPREAD][torch.from_numpy(order)], chosen[_SPREAD:]]).to(points.device)


def ordered(points: Tensor, ordering: Ordering, seed: int) -> Tensor:
    """Return an order of points (n, d).

    Args:
        points: (n, d).
        ordering: "maximin", see :func:`maximin_order`; "random"; "coordinate", along the widest axis; or "middle", from
            the mean outwards.
        seed: of the random parts.
    """
    generator = torch.Generator().manual_seed(seed)
    if ordering == "maximin":
        return maximin_order(points, generator)
    if ordering == "random":
        return torch.randperm(len(points), generator=generator, device="cpu").to(points.device)
    if ordering == "middle":
        return (points - points.mean(0)).square().sum(-1).argsort(stable=True)
    widest = int((points.amax(0) - points.amin(0)).argmax())
    return points[:, widest].argsort(stable=True)


def nearest_to_each(points: Tensor, number: int) -> Tensor:
    """Return the nearest others to each of distinct points (n, d): (n, m), m `number` or n - 1 if that is smaller."""
    from scipy.spatial import KDTree

    x, sought = points.double().cpu().numpy(), min(number, len(points) - 1) + 1
    _, near = KDTree(x).query(x, sought)
    return torch.as_tensor(near, dtype=torch.long, device=points.device).view(len(points), sought)[:, 1:]


def previous_neighbours(points: Tensor, order: Tensor, number: int) -> Tensor:
    """Return the nearest neighbours of each point among those before it in an order (n, m), nearest first.

    m is `number`, or n - 1 if that is smaller. The i-th point of the order has at most i - 1 neighbours; places that
    are left repeat its own index.

    Args:
        points: (n, d).
        order: a permutation (n,).
        number: of neighbours of a point.
    """
    x = points.double().cpu()[order.cpu()]
    found = nearest_before(x, min(number, len(x) - 1))
    result = torch.empty_like(found)
    order = order.cpu()
    result[order] = order[found]
    return result.to(points.device)


def nearest_before(points: Tensor, number: int, slack: float = 0.0) -> Tensor:
    """Return the indices of the nearest points among those before each (n, number), padded with its own.

    Args:
        points: (n, d), on the CPU.
        number: of neighbours.
        slack: neighbours may be farther by this share than the nearest, and then fewer than there are; 0 for the
            nearest.
    """
    from scipy.spatial import KDTree

    x, n = points.numpy(), len(points)
    found = torch.arange(n, device="cpu").unsqueeze(-1).repeat(1, number)
    stop = n
    while stop > 1 and number:  # the second half of what is left, then of the first
        start, sought = (stop // 2, 3 * number + 1) if stop > _AT_ONCE * number else (1, stop)
        tree, wanting = KDTree(x[:stop]), torch.arange(start, stop, device="cpu")
        while len(wanting):
            _, near = tree.query(x[wanting.numpy()], sought, eps=slack)
            near = torch.as_tensor(near, dtype=torch.long, device="cpu").view(len(wanting), -1)
            before = near < wanting.unsqueeze(-1)
            enough = (before.sum(-1) >= wanting.clamp(max=number)) | (slack > 0)
            first = (~before).to(torch.int8).argsort(dim=-1, stable=True)[:, :number]
            chosen = torch.where(before.gather(-1, first), near.gather(-1, first), wanting.unsqueeze(-1))
            found[wanting[enough], : chosen.size(-1)] = chosen[enough]
            wanting, sought = wanting[~enough], min(2 * sought, stop)
        stop = start
    return found


def strongest_before(strength: Strength, order: Tensor, number: int) -> Tensor:
    """Return the strongest of those before each point in an order (n, m), as :func:`previous_neighbours` the nearest.

    Args:
        strength: of the connection of points.
        order: a permutation (n,).
        number: of neighbours of a point.
    """
    n = len(order)
    result = torch.arange(n, device=order.device).unsqueeze(-1).repeat(1, min(number, n - 1))
    for place in _tiles(torch.arange(1, n, device=order.device), n):
        stop = int(place[-1])  # none is before itself
        found = strength(order[place], order[:stop])
        found = found.masked_fill(place.unsqueeze(-1) <= torch.arange(stop, device=order.device), -torch.inf)
        best = found.topk(min(number, stop), -1)
        near = torch.where(best.values > -torch.inf, order[best.indices], order[place].unsqueeze(-1))
        result[order[place], : near.size(-1)] = near
    return result


def strongest(strength: Strength, rows: Tensor, columns: Tensor, number: int) -> Tensor:
    """Return the places (r, number) of the strongest columns (c,) of each of the rows (r,), the strongest first."""
    found = [strength(some, columns).topk(number, -1).indices for some in _tiles(rows, len(columns))]
    return torch.cat(found) if found else columns.new_zeros(0, number)


def _tiles(rows: Tensor, columns: int) -> Iterator[Tensor]:
    """Yield some of the rows at a time, so that they and all columns make a few million entries."""
    yield from (tile for tile in rows.split(max(_ENTRIES // columns, 1)) if len(tile))
