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
    held = _held.get()
    if held is not None:
        held.append((message, category))
        return
    frame, level = sys._getframe(1), 2  # level 2 is the caller of this function
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


@contextmanager
def held_warnings() -> Iterator[Held]:
    """Hold back what a block warns of: yield the list of (message, category), for :func:`warn_caller` or for nobody."""
    held: Held = []
    token = _held.set(held)
    try:
        yield held
    finally:
        _held.reset(token)
