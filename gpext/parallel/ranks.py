"""The ranks of a process group: each holds a part of the data, all need sums over the whole.

A sum is one all-reduce of one float64 buffer; every rank gets the same bits. Where a rank fails on its own, the others
would wait for it: so work that may fail is done `together`, which raises on every rank at the same place.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")
Item = TypeVar("Item")


class RankError(RuntimeError):
    """Another rank has failed, or cannot be reached."""


@dataclass
class Traffic:
    """What a rank has put into collective operations."""

    operations: int = 0
    numbers: int = 0
    seconds: float = 0.0


class Ranks:
    """A process group; without one, a single rank to which every operation is trivial.

    Args:
        group: torch.distributed's; its default one, if that is initialised, for None.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        is_open = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size(group) if is_open else 1
        self.rank = dist.get_rank(group) if is_open else 0
        self.traffic = Traffic()

    @classmethod
    def alone(cls) -> Ranks:
        """Return the single rank, whatever torch.distributed says."""
        ranks = cls.__new__(cls)
        ranks._group, ranks.size, ranks.rank, ranks.traffic = None, 1, 0, Traffic()
        return ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a copy of a model stays with the same processes

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return (Ranks.alone if self.size == 1 else Ranks), ()  # where it is read, that process's default group

    def together(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns on this rank.

        Raises:
            Exception: its error, or that of the first rank where it fails, `from` a RankError that says which.
            RankError: a rank cannot be reached.
        """
        if self.size == 1:
            return work()
        result, error = _tried(work)
        if self.any(error is not None):
            self._fail(error)
        return result[0]

    def sum(self, work: Callable[[], Sequence[Tensor]], like: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums over ranks of the tensors that `work` returns, in their dtypes.

        Args:
            work: what makes them.
            like: tensors of their shapes, the same on each rank.

        Raises:
            Exception, RankError: as :meth:`together`.
        """
        if self.size == 1:
            return list(work())
        result, error = _tried(work)
        parts = [torch.zeros_like(t) for t in like] if error is not None else [t.detach() for t in result[0]]
        failed = torch.tensor([float(error is not None)], dtype=torch.float64, device=parts[0].device)
        buffer = torch.cat([failed, *(t.double().flatten() for t in parts)])
        self._timed(lambda: dist.all_reduce(buffer, group=self._group), buffer.numel())
        if bool(buffer[0] > 0):
            self._fail(error)
        sums = buffer[1:].split([t.numel() for t in parts])
        return [total.view(t.shape).to(t.dtype) for total, t in zip(sums, parts, strict=True)]

    def _fail(self, error: Exception | None) -> NoReturn:
        """Raise what has failed on this rank, or else the error of the first rank where it has."""
        errors = self.gather(None if error is None else _portable(error))
        if error is not None:
            raise error
        rank, first = next((rank, each) for rank, each in enumerate(errors) if each is not None)
        raise first from RankError(f"this failed on rank {rank} of {self.size}, and no rank goes on without it")

    def any(self, here: bool) -> bool:
        """Return whether something holds on any rank."""
        return self.most(int(here)) > 0

    def most(self, here: int) -> int:
        """Return the largest number of any rank."""
        if self.size == 1:
            return here
        number = torch.tensor([float(here)], dtype=torch.float64, device=self._device)
        self._timed(lambda: dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group), 1)
        return int(number)

    def gather(self, item: Item) -> list[Item]:
        """Return the items of all ranks, in their order."""
        items: list[Any] = [item] * self.size
        if self.size > 1:
            self._timed(lambda: dist.all_gather_object(items, item, group=self._group), 0)
        return items

    def require_same(self, what: str, here: str) -> None:
        """Raise on every rank unless all say the same.

        Raises:
            ValueError: they do not.
        """
        texts = self.gather(here)
        others = [rank for rank, text in enumerate(texts) if text != texts[0]]
        if others:
            raise ValueError(
                f"expected the same {what} on every rank; rank 0 has {texts[0]}, rank {others[0]} {texts[others[0]]}."
            )

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with those of rank 0."""
        if self.size == 1:
            return
        source = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        for tensor in tensors:
            held = tensor.contiguous()
            self._timed(partial(dist.broadcast, held, source, group=self._group), held.numel())
            tensor.copy_(held)

    @property
    def _device(self) -> torch.device:
        """Where the group's tensors have to be."""
        return torch.device("cuda" if "nccl" in dist.get_backend(self._group) else "cpu")

    def _timed(self, operation: Callable[[], object], numbers: int) -> None:
        started = time.perf_counter()
        try:
            operation()
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"rank {self.rank} of {self.size} has lost another one, or waited for it longer than the group's "
                f"timeout ({error}). Start all of them again from the last checkpoint, as torchrun --max-restarts does."
            ) from error
        self.traffic.operations += 1
        self.traffic.numbers += numbers
        self.traffic.seconds += time.perf_counter() - started


def _tried(work: Callable[[], Result]) -> tuple[list[Result], Exception | None]:
    """Return the result, in a list, or the error: whatever it is, the other ranks must not wait for this one."""
    try:
        return [work()], None
    except Exception as error:
        return [], error


def _portable(error: Exception) -> Exception:
    """Return the error, or if it cannot be sent, its text in another."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # of any kind: constructors of exceptions may do anything
        return RankError(f"{type(error).__name__}: {error}")
    return error
