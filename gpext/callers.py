"""Warnings that point at the line of the user's own code, however many calls lie between."""

from __future__ import annotations

import sys
import warnings

_BETWEEN = {"gpext", "torch", "gpytorch", "linear_operator", "pyro", "contextlib", "functools"}


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line that is neither gpext's nor of a library through which gpext is called.

    Args:
        message: of the warning.
        category: of the warning.
    """
    frame, level = sys._getframe(1), 2  # level 2 is the caller of this function
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
