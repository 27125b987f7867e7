"""Checks of survival data: times, events, times of entry."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpext.checks import check_finite, check_tensor


def check_survival(time: Tensor, event: Tensor, entry: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return times, events (bool) and times of entry, zero by default, as vectors (N,) of one floating dtype.

    Raises:
        TypeError: something else than tensors.
        ValueError: other shapes, no datum, times that are not finite and positive, events other than 0 and 1, or an
            entry that is negative or not before the time.
    """
    given = {"time": time, "event": event} if entry is None else {"time": time, "event": event, "entry": entry}
    for name, values in given.items():
        check_tensor(name, values)
        if values.dim() != 1 or values.shape != time.shape or len(values) == 0:
            shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in given.items())
            raise ValueError(f"expected vectors of one length, at least 1; got {shapes}.")
        check_finite(name, values)
    _refuse(time <= 0, time, "times must be positive; got", "Add half of the unit that times are rounded to.")
    _refuse((event != 0) & (event != 1), event, "events must be 1, or 0 where censored; got")
    dtype = time.dtype if time.is_floating_point() else torch.get_default_dtype()
    time = time.to(dtype).contiguous()
    if entry is None:
        return time, event == 1, torch.zeros_like(time)
    entry = entry.to(time)
    _refuse(entry < 0, entry, "times of entry must not be negative; got")
    _refuse(entry >= time, entry, "a subject must enter before its time; got an entry of")
    return time, event == 1, entry


def check_breaks(breaks: Tensor) -> None:
    """Raise unless these are the ends of intervals: two or more numbers, not negative, each above the one before.

    Raises:
        TypeError: something else than a tensor.
        ValueError: anything else.
    """
    check_tensor("breaks", breaks)
    check_finite("breaks", breaks)
    if breaks.dim() != 1 or len(breaks) < 2:
        raise ValueError(f"breaks must be a vector (J + 1,) of the ends of J intervals; got {tuple(breaks.shape)}.")
    if bool((breaks.diff() <= 0).any()) or float(breaks[0]) < 0:
        raise ValueError(
            f"breaks must begin at 0 or later and increase; got {breaks.tolist()}. Sort them, and leave out duplicates."
        )


def check_grid(times: Tensor, least: float, most: float = math.inf) -> None:
    """Raise unless times (T,) are within the interval.

    Raises:
        TypeError: something else than a tensor.
        ValueError: another shape, or a time that is not within the interval.
    """
    check_tensor("times", times)
    check_finite("times", times)
    if times.dim() != 1:
        raise ValueError(f"times must be a vector (T,), the same for all subjects; got {tuple(times.shape)}.")
    _refuse((times < least) | (times > most), times, f"times must be from {least:g} to {most:g}; got")


def _refuse(wrong: Tensor, values: Tensor, sentence: str, remedy: str = "") -> None:
    """Raise ValueError with the first value that is wrong."""
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise ValueError(f"{sentence} {float(values[index]):g} at index {index}. {remedy}".rstrip())
