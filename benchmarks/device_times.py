"""Times of work on a device, contestants in turns, and the device's own limits: its products and its copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

_MOST_ROUNDS = 50


@dataclass(frozen=True)
class Times:
    """Median and minimum seconds a unit of work of each contestant, and the errors of those without times."""

    seconds: dict[str, float]
    fastest: dict[str, float]
    rounds: int
    errors: dict[str, str] = field(default_factory=dict)


def wait_for(device: torch.device) -> None:
    """Return when the device has finished its operations; CUDA operations return before they are done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def said(error: BaseException) -> str:
    """Return the first line of an error, with its type."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".rstrip(": ")


def in_turns(
    calls: Mapping[str, tuple[Callable[[], object], float]],
    device: torch.device,
    *,
    most_seconds: float,
    first: str | None = None,
) -> Times:
    """Return median seconds a unit, contestants taking turns (A B C A B C ...), after two turns that do not count.

    The first of these compiles and fills caches, and the second brings the allocator to the state of the later turns. A
    contestant that raises is omitted, with its error.

    Args:
        calls: for each contestant the call to time, and the number of units of work in one call.
        device: synchronised before the clock is read.
        most_seconds: no turn begins later than this; each contestant that does not raise has one turn in any case.
        first: the contestant whose error is raised instead of recorded.
    """
    begun, times, errors = time.perf_counter(), {name: [] for name in calls}, {}
    turn = 0
    while True:
        for name, (call, units) in calls.items():
            if name in errors:
                continue
            wait_for(device)
            start = time.perf_counter()
            try:
                call()
                wait_for(device)
            except Exception as error:  # of any kind: the other contestants continue
                if name == first:
                    raise
                errors[name] = said(error)
                continue
            times[name].append((time.perf_counter() - start) / units)
        turn += 1
        spent = time.perf_counter() - begun
        if turn >= _MOST_ROUNDS + 2 or (turn >= 3 and spent > most_seconds) or (turn >= 2 and spent > 3 * most_seconds):
            break
    medians = {
        name: statistics.median(values[2:] or values[1:]) for name, values in times.items() if name not in errors
    }
    return Times(medians, {name: min(times[name]) for name in medians}, max(turn - 2, 1), errors)


def limits(
    device: torch.device, dtype: torch.dtype, *, size: int, copied: int, most_seconds: float
) -> dict[str, float]:
    """Return flops a second of a product of two square matrices, and bytes a second that a copy reads and writes.

    A product has 2 n^3 flops, and a copy counts its bytes twice, once read and once written; the fastest turn is used,
    since other programs only slow it down. Both are measured, as a program does not reach a card's nominal figures.
    Products in float32 follow torch's settings, by default without TF32. Other work can be faster than a product that
    does not use the whole device, and cannot use units that serve products alone.

    Args:
        device: to measure.
        dtype: of the numbers.
        size: n; on a busy CPU so small that some product finishes without being interrupted.
        copied: bytes to copy; more than any cache holds.
        most_seconds: for all turns.

    Raises:
        RuntimeError: the device cannot do either.
    """
    generator = torch.Generator(device).manual_seed(0)  # a card multiplies matrices of equal numbers faster
    A, B = torch.randn(2, size, size, dtype=dtype, device=device, generator=generator)
    source = torch.ones(copied // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "flops": (lambda: torch.mm(A, B), 2.0 * size**3),
        "bandwidth": (lambda: target.copy_(source), 2.0 * source.numel() * source.element_size()),
    }
    found = in_turns(calls, device, most_seconds=most_seconds)
    if found.errors:
        raise RuntimeError(f"the limits of {device} cannot be measured: {found.errors}")
    return {name: 1 / seconds for name, seconds in found.fastest.items()}
