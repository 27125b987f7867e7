"""Warnings that point at the line of the user's own code, however many calls lie between."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_BETWEEN = {"gpext", "torch", "gpytorch", "linear_operator", "pyro", "botorch", "scipy", "contextlib", "functools"}

Held = list[tuple[str, type[Warning]]]
_held: ContextVar[Held | None] = ContextVar("held", default=None)


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line that is neither gpext's nor of a library through which gpext is called.

    Args:
        message: of the warning.
        category: of the warning.
    """
    frame, level = sys._getframe(1), 2  # level 2 is the caller of this function
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    held = _held.get()
    if held is None:
        warnings.warn(message, category, stacklevel=level)
    elif _is_wanted(message, category, level + 1):
        held.append((message, category))


def _is_wanted(message: str, category: type[Warning], level: int) -> bool:
    """Return whether the filters in effect here let a warning through, or make it an error."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn(message, category, stacklevel=level)
    except category:
        return True
    return bool(caught)


@contextmanager
def held_warnings() -> Iterator[Held]:
    """Hold back the warnings of a block: yield a list of (message, category) for :func:`warn_caller`.

    Warnings that filters inside the block ignore are not in the list.
    """
    held: Held = []
    token = _held.set(held)
    try:
        yield held
    finally:
        _held.reset(token)
