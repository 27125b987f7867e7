"""Fronts of a sparse factor that are eliminated at once.

On a CPU a batch is one front. A GPU waits between small operations: there fronts of one level, which are independent,
make batches. Fronts of a batch have as many indices as the largest of them: what is missing is the index n, one more
row and column of every matrix, and ones on its diagonal. A level is divided, by size, where this would more than double
its matrices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_PADDED = 2.0  # times their entries
_MOST_ENTRIES = 2**26  # of the matrices of a batch, 0.5 GiB


@dataclass(frozen=True)
class Front:
    """A node of the tree, on the CPU."""

    own: Tensor  # indices that are eliminated here (s,)
    boundary: Tensor  # indices of separators above that these and those below are connected with (b,)
    level: int  # below its root
    parent: int | None  # its place in the list of fronts, after this one
    above: Tensor  # places of the boundary in the parent's own and boundary (b,)
    parts: tuple[tuple[Tensor, Tensor], ...]  # of each list, the groups added here (R,), in own and boundary (R, E)

    @property
    def size(self) -> int:
        """The number of its indices."""
        return len(self.own) + len(self.boundary)


@dataclass(frozen=True)
class Part:
    """The groups of a list that are added to the fronts of a batch."""

    groups: Tensor  # (R,)
    front: Tensor | None  # the place of each one's front in the batch (R,); None for the first
    places: Tensor  # of its indices in own and boundary (R, E)


@dataclass(frozen=True)
class Children:
    """Fronts of an earlier batch, of what they leave to fronts of this one."""

    batch: int
    front: Tensor | None  # their places in their batch (C,); None for all in order
    parent: Tensor | None  # the places of their parents in this batch (C,); None for the first
    above: Tensor  # places of their boundaries in their parents' own and boundary (C, b)


@dataclass(frozen=True)
class Batch:
    """Fronts of s own indices and b of the boundary each, n for what is missing."""

    own: Tensor  # (B, s)
    boundary: Tensor  # (B, b)
    size: int  # s + b, and one more if anything may be missing
    parts: tuple[Part, ...]  # of each list
    children: tuple[Children, ...]
    fronts: tuple[int, ...]


def batches_of(fronts: Sequence[Front], missing: int, device: torch.device, *, together: bool) -> tuple[Batch, ...]:
    """Return the batches, from the leaves to the root.

    Args:
        fronts: from the leaves to the root.
        missing: n, the index of what is missing.
        device: of the batches.
        together: whether fronts of a level make batches; else each is one.
    """
    members = _levels(fronts) if together else [[i] for i in range(len(fronts))]
    place = {i: (j, k) for j, batch in enumerate(members) for k, i in enumerate(batch)}
    s = [max(len(fronts[i].own) for i in batch) for batch in members]
    b = [max(len(fronts[i].boundary) for i in batch) for batch in members]
    children: list[list[Children]] = [[] for _ in members]
    for child, batch in enumerate(members):
        families = defaultdict[int, list[tuple[int, int]]](list)  # by the batch of the parents
        for i in batch:
            parent = fronts[i].parent
            if parent is not None:
                families[place[parent][0]].append((i, parent))
        for j, pairs in families.items():
            above = [_padded(_shifted(fronts[i].above, fronts[up], s[j]), b[child], s[j] + b[j]) for i, up in pairs]
            of_child = _places([place[i][1] for i, _ in pairs], range(len(batch)), device)
            of_parent = _places([place[up][1] for _, up in pairs], [0] * len(pairs), device)
            children[j].append(Children(child, of_child, of_parent, torch.stack(above).to(device)))
    batches = []
    for j, batch in enumerate(members):
        own = torch.stack([_padded(fronts[i].own, s[j], missing) for i in batch]).to(device)
        boundary = torch.stack([_padded(fronts[i].boundary, b[j], missing) for i in batch]).to(device)
        parts = tuple(_part(fronts, batch, which, s[j], device) for which in range(len(fronts[0].parts)))
        batches.append(Batch(own, boundary, s[j] + b[j] + together, parts, tuple(children[j]), tuple(batch)))
    return tuple(batches)


def _places(places: list[int], usual: Sequence[int], device: torch.device) -> Tensor | None:
    """Return places (C,), or None for the usual ones."""
    return None if places == list(usual) else torch.tensor(places, device=device)


def _levels(fronts: Sequence[Front]) -> list[list[int]]:
    """Return the fronts of each level, the largest first, in batches whose matrices do not grow too much."""
    batches: list[list[int]] = []
    for level in sorted({front.level for front in fronts}, reverse=True):
        members = [i for i, front in enumerate(fronts) if front.level == level]
        batch: list[int] = []
        entries = 0
        for i in sorted(members, key=lambda i: -fronts[i].size):
            entries += fronts[i].size ** 2
            padded = (len(batch) + 1) * fronts[batch[0] if batch else i].size ** 2
            if batch and (padded > _MOST_PADDED * entries or padded > _MOST_ENTRIES):
                batches.append(batch)
                batch, entries = [], fronts[i].size ** 2
            batch.append(i)
        batches.append(batch)
    return batches


def _padded(index: Tensor, size: int, value: int) -> Tensor:
    return torch.nn.functional.pad(index, (0, size - len(index)), value=value)


def _shifted(places: Tensor, front: Front, s: int) -> Tensor:
    """Return places in a front's own and boundary where its batch has s places for its own."""
    return torch.where(places < len(front.own), places, places + s - len(front.own))


def _part(fronts: Sequence[Front], batch: Sequence[int], which: int, s: int, device: torch.device) -> Part:
    groups = [fronts[i].parts[which][0] for i in batch]
    places = [_shifted(fronts[i].parts[which][1], fronts[i], s) for i in batch]
    owner = None
    if len(batch) > 1:
        counts = torch.tensor([len(each) for each in groups], device="cpu")
        owner = torch.arange(len(batch), device="cpu").repeat_interleave(counts).to(device)
    return Part(torch.cat(groups).to(device), owner, torch.cat(places).to(device))
