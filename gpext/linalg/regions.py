"""Division of space into boxes that hold equally many points."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Region:
    """A box, the points in it and others that belong to it; the boxes of all regions fill the space."""

    points: Tensor  # indices (n,)
    others: Tensor  # indices (m,)

    def with_margin(self, points: Tensor, width: float) -> Tensor:
        """Return the indices of the points in the box around its own ones, widened on each side.

        Args:
            points: of all regions (N, d).
            width: in the typical distances of neighbouring points of this region.
        """
        own = points[self.points]
        low, high = own.amin(0), own.amax(0)
        extent = (high - low).clamp_min(torch.finfo(own.dtype).tiny)
        spacing = extent.log().mean().exp() / len(own) ** (1 / own.size(-1))
        margin = width * spacing
        return ((points >= low - margin) & (points <= high + margin)).all(-1).nonzero().squeeze(-1)


def regions(points: Tensor, others: Tensor, size: int) -> Iterator[Region]:
    """Yield regions of at most so many points each, by halving along the widest axis.

    Equal points may keep a region larger.

    Args:
        points: (N, d).
        others: further points (S, d), divided by the same planes.
        size: the largest number of points of a region.
    """
    everything = torch.arange(len(points), device=points.device), torch.arange(len(others), device=others.device)
    waiting = [everything]
    while waiting:
        index, further = waiting.pop()
        own = points[index]
        axis = int((own.amax(0) - own.amin(0)).argmax())
        x, middle = own[:, axis], own[:, axis].median()
        below = x <= middle
        if len(index) <= size or bool(below.all()):
            yield Region(index, further)
            continue
        left = others[further, axis] <= middle
        waiting += [(index[~below], further[~left]), (index[below], further[left])]
