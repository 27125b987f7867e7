"""The ranks of a process group: each holds a part of the data, all need sums over the whole.

Before any operation the ranks meet: each sends, in four numbers, whether it has failed and what it will do next. So an
error of one rank is raised on all, wherever the others are, and ranks about to do different things raise an error where
a backend would hang or abort.

A sum is one all-reduce of one float64 buffer; every rank gets the same bits. The reduction proceeds while the rank
computes what it adds. Where that fails, the rank adds zeros, for which the others wait, and says so in the last number.
"""

from __future__ import annotations

import math
import pickle
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpext.parallel.fingerprint import fingerprint

Result = TypeVar("Result")
Item = TypeVar("Item")


class RankError(RuntimeError):
    """Another rank has failed, or cannot be reached.

    Example:
        >>> issubclass(RankError, RuntimeError)
        True
    """


@dataclass
class Traffic:
    """Counts of the collective operations of a rank.

    Example:
        >>> traffic = Traffic(operations=2, numbers=10, seconds=0.5)
        >>> traffic.numbers / traffic.operations
        5.0
    """

    operations: int = 0
    numbers: int = 0
    seconds: float = 0.0


class Ranks:
    """A process group; without one, a single rank to which every operation is trivial.

    Args:
        group: torch.distributed's; its default one, if that is initialised, for None.

    Raises:
        TypeError: no such group.

    Example:
        >>> Ranks().size, Ranks().rank  # alone, without torch.distributed
        (1, 0)
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            raise TypeError(f"expected a process group of torch.distributed; got {group!r}.")
        self._group = group
        is_open = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size(group) if is_open else 1
        self.rank = dist.get_rank(group) if is_open else 0
        self._talks = self.size > 1
        self.traffic = Traffic()

    @classmethod
    def alone(cls) -> Ranks:
        """Return the single rank, even if torch.distributed has a process group."""
        ranks = cls.__new__(cls)
        ranks._group, ranks.size, ranks.rank, ranks._talks, ranks.traffic = None, 1, 0, False, Traffic()
        return ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a copy of a model stays with the same processes

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return (Ranks.alone if self.size == 1 else Ranks), ()  # where it is read, that process's default group

    def together(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns on this rank. The work may itself wait for other ranks.

        Raises:
            Exception: its error, or that of the first rank where it fails, `from` a RankError that names the rank.
            RankError: a rank cannot be reached, or does something else.
        """
        if not self._talks:
            return work()
        result, error = _tried(work)
        self._meet("continue", error=error)
        return result[0]

    def on_first(self, work: Callable[[], object]) -> None:
        """Do work on rank 0; no rank continues before it is done.

        Raises:
            Exception, RankError: as :meth:`together`.
        """
        self.together(lambda: work() if self.rank == 0 else None)

    def sum(
        self,
        work: Callable[[], Sequence[Tensor]],
        like: Sequence[Tensor],
        *,
        alike: Sequence[Tensor] = (),
        of: str = "",
    ) -> list[Tensor]:
        """Return the sums over ranks of the tensors that `work` returns, in their dtypes.

        Args:
            work: what makes them.
            like: tensors of their shapes, the same on each rank.
            alike: floating-point tensors that have to be the same on each rank up to rounding.
            of: what is summed, in words that have to be the same on each rank.

        Raises:
            ValueError: they are not, or there are NaN in those of one rank and not of another.
            Exception, RankError: as :meth:`together`.
        """
        if not self._talks:
            return list(work())
        meet = self._call(f"sum {sum(t.numel() for t in like)} numbers{of and f' of {of}'}", alike=alike)
        result, error = _tried(work)
        meet(error)
        parts = [t.detach() for t in result[0]] if error is None else [torch.zeros_like(t) for t in like]
        last = torch.tensor(float(error is not None), device=like[0].device if like else self._device)
        buffer = torch.cat([t.double().flatten() for t in (*parts, last)])
        self._reducing(buffer, dist.ReduceOp.SUM)()
        *sums, failed = buffer.split([t.numel() for t in (*parts, last)])
        if failed:
            self._fail(error)
        return [total.view(t.shape).to(t.dtype) for total, t in zip(sums, parts, strict=True)]

    def any(self, here: bool) -> bool:
        """Return whether something holds on any rank."""
        return self.most(lambda: int(here)) > 0

    def most(self, work: Callable[[], int]) -> int:
        """Return the largest of the numbers that `work` returns on the ranks.

        Raises:
            Exception, RankError: as :meth:`together`.
        """
        if not self._talks:
            return work()
        result, error = _tried(work)
        most, _ = self._meet("take the largest number", error=error, number=float(sum(result)))
        return int(most)

    def gather(self, item: Item) -> list[Item]:
        """Return the items of all ranks, in their order; tensors have to be on the CPU."""
        if not self._talks:
            return [item]
        self._meet("gather")
        return self._gathered(item)

    def own(self, items: Sequence[Item]) -> list[Item]:
        """Return those of the items, the same on all ranks, that are this rank's: every `size`-th."""
        return list(items[self.rank :: self.size])

    def everyones(self, own: Sequence[Item]) -> list[Item]:
        """Return what :meth:`own` has shared out, or what was made of each, of all ranks and in the order it had."""
        parts = self.gather(list(own))
        number = sum(len(part) for part in parts)
        return [parts[i % self.size][i // self.size] for i in range(number)]

    def require_same(self, what: str, *here: str) -> None:
        """Raise on every rank unless all say the same.

        Args:
            what: is said, for the error.
            here: parts of it; the error shows those that differ.

        Raises:
            ValueError: they do not.
        """
        said = self.gather(here)
        others = [rank for rank, parts in enumerate(said) if parts != said[0]]
        if others:
            first, other = said[0], said[others[0]]
            ours, theirs = (", ".join(p for p in a if p not in b) for a, b in ((first, other), (other, first)))
            raise ValueError(
                f"expected the same {what} on every rank; rank 0 has {ours or 'less'}, rank {others[0]} "
                f"{theirs or 'less'}."
            )

    def require_alike(self, tensors: Sequence[Tensor]) -> None:
        """Raise on every rank unless all have these tensors, of floating point, up to rounding.

        Raises:
            ValueError: they do not, or there are NaN in those of one rank and not of another.
        """
        if self._talks:
            self._call("compare", alike=tensors)(None)

    @torch.no_grad()
    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with those of rank 0."""
        if not self._talks:
            return
        self._meet(f"broadcast {sum(t.numel() for t in tensors)} numbers")
        source = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        for tensor in tensors:
            held = tensor.contiguous()
            self._timed(partial(dist.broadcast, held, source, group=self._group), held.numel())
            tensor.copy_(held)

    def _meet(self, operation: str, *, error: Exception | None = None, number: float = 0.0) -> tuple[float, float]:
        """Wait for all ranks, before an operation; return the largest and the smallest number of any.

        Raises:
            Exception: one has failed: its error.
            RankError: they are not about to do the same.
        """
        return self._call(operation, failed=error is not None, number=number)(error)

    def _call(
        self, operation: str, *, failed: bool = False, number: float = 0.0, alike: Sequence[Tensor] = ()
    ) -> Callable[[Exception | None], tuple[float, float]]:
        """Call a meeting; return what ends it as :meth:`_meet`, given the error of this rank if it has failed by then.

        Of tensors that have to be `alike` the number is the fingerprint; a ValueError ends a meeting where they are
        not.
        """
        code = float(zlib.crc32(operation.encode()))
        number = fingerprint(alike) if alike else number
        here = [math.inf, math.inf, 0.0, 0.0] if failed else [code, -code, number, -number]
        header = torch.tensor(here, dtype=torch.float64, device=self._device)
        complete = self._reducing(header, dist.ReduceOp.MAX)

        def meet(error: Exception | None) -> tuple[float, float]:
            complete()
            highest, lowest, most, least = header.tolist()
            if math.isinf(highest):
                self._fail(error)
            if highest != -lowest:
                raise RankError(
                    f"rank {self.rank} of {self.size} was about to {operation}, and another one was not: all have to "
                    "call the same in the same order, with data, kernels, options and random numbers that lead them to "
                    "it."
                ) from error
            if alike and not (most == -least or most + least <= torch.finfo(alike[0].dtype).eps ** 0.5):
                raise ValueError(
                    "expected the same inputs and vectors on every rank, and random numbers from generators seeded "
                    f"alike; those of rank {self.rank} have the fingerprint {number:.9g}, and fingerprints are from "
                    f"{-least:.9g} to {most:.9g} (inf for NaN)."
                ) from error
            return most, -least

        return meet

    def _fail(self, error: Exception | None) -> NoReturn:
        """Raise the error of the first rank that has failed, or of this one, `from` a RankError that names the rank."""
        errors = self._gathered(None if error is None else _portable(error))
        rank, first = next((rank, each) for rank, each in enumerate(errors) if each is not None)
        here, rank = (first, rank) if error is None else (error, self.rank)
        told = RankError(f"this failed on rank {rank} of {self.size}, and no rank goes on without it")
        told.__cause__ = here.__cause__
        raise here from told

    def _gathered(self, item: Item) -> list[Item]:
        items: list[Any] = [None] * self.size
        self._timed(lambda: dist.all_gather_object(items, item, group=self._group), 0)
        return items

    @property
    def _device(self) -> torch.device:
        """The device on which the group's tensors have to be."""
        return torch.device("cuda" if "nccl" in dist.get_backend(self._group) else "cpu")

    def _reducing(self, tensor: Tensor, operation: Any) -> Callable[[], object]:
        """Begin to overwrite a tensor with what an operation makes of it over ranks; return what waits for that."""
        begin = partial(dist.all_reduce, tensor, operation, group=self._group, async_op=True)
        under_way = self._timed(begin, tensor.numel())
        return lambda: self._watched(under_way.wait)

    def _timed(self, operation: Callable[[], Any], numbers: int) -> Any:
        """Return what an operation returns, and count it."""
        self.traffic.operations += 1
        self.traffic.numbers += numbers
        return self._watched(operation)

    def _watched(self, operation: Callable[[], Any]) -> Any:
        """Return what an operation, or waiting for one, returns.

        Raises:
            RankError: a rank cannot be reached.
        """
        started = time.perf_counter()
        try:
            return operation()
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"rank {self.rank} of {self.size} has lost another one, or waited for it longer than the group's "
                f"timeout ({error}). Start all of them again from the last checkpoint, as torchrun --max-restarts does."
            ) from error
        finally:
            self.traffic.seconds += time.perf_counter() - started


def check_ranks(ranks: Ranks | None) -> None:
    """Raise TypeError unless these are ranks, or None.

    Example:
        >>> from gpext.parallel import Ranks
        >>> check_ranks(Ranks())  # nothing is raised
    """
    if not isinstance(ranks, Ranks | None):
        raise TypeError(f"expected gpext.parallel.Ranks(), the processes that take part; got {ranks!r}.")


def _tried(work: Callable[[], Result]) -> tuple[list[Result], Exception | None]:
    """Return the result, in a list, or the error: whatever it is, the other ranks must not wait for this one."""
    try:
        return [work()], None
    except Exception as error:
        if isinstance(error, RankError) or isinstance(error.__cause__, RankError):
            raise  # all ranks have it, or all that are left: there is no other to tell
        return [], error


def _portable(error: Exception) -> Exception:
    """Return the error, or if it cannot be sent, its text in another."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # of any kind: constructors of exceptions may do anything
        return RankError(f"{type(error).__name__}: {error}")
    return error
