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
    """Median and least seconds a unit of work of each contestant, and the errors of those that have none."""

    seconds: dict[str, float]
    fastest: dict[str, float]
    rounds: int
    errors: dict[str, str] = field(default_factory=dict)


def wait_for(device: torch.device) -> None:
    """Return when the device has done what was asked of it; CUDA's operations return before they are done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def said(error: BaseException) -> str:
    """The first line of an error, with its type."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".rstrip(": ")


def in_turns(
    calls: Mapping[str, tuple[Callable[[], object], float]],
    device: torch.device,
    *,
    most_seconds: float,
    first: str | None = None,
) -> Times:
    """Median seconds a unit, contestants taking turns (A B C A B C ...), two turns of each before not counted.

    The first of them compiles and fills caches and the second finds the allocator as the others will. A contestant that
    raises is left out, with its error.

    Args:
        calls: of each contestant what to time, and how many units of work one call is.
        device: waited for before the clock is read.
        most_seconds: no turn begins later than this; each contestant that does not raise has one turn in any case.
        first: the contestant whose error is raised instead of kept.
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
    """Flops a second of a product of two square matrices, and bytes a second that a copy reads and writes.

    2 n^3 flops, and of a copy its bytes twice, once read and once written; the fastest turn, since what else runs only
    takes from it. Neither is looked up: what a card is sold with is not what a program gets. Products in float32 go as
    torch's settings have it, by default without TF32. Other work can be faster than a product that does not use all of
    a device, and has no way to a part that serves products alone.

    Args:
        device: to measure.
        dtype: of the numbers.
        size: n; on a busy CPU so small that some product is over before it is interrupted.
        copied: bytes of what is copied; more than any cache holds.
        most_seconds: for all turns.

    Raises:
        RuntimeError: the device cannot do either.
    """
    generator = torch.Generator(device).manual_seed(0)  # of equal numbers a card makes products faster
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
