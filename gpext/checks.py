"""Checks that every room shares: whole numbers, of Python, NumPy or torch."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np


def whole_number(name: str, value: Any, least: int, *, kind: str = "a whole number", remedy: str = "") -> int:
    """Return a count as an int: anything that has `__index__` but a truth value.

    Args:
        name: of the argument, for the message.
        value: what came.
        least: the smallest that is allowed.
        kind: what is expected, for the message.
        remedy: what to do, appended to the message.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is smaller than `least`.
    """
    advice = f" {remedy}" if remedy else ""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be {kind}; got {value!r}.{advice}")
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be {kind}; got {value!r}.{advice}") from error
    if number < least:
        raise ValueError(f"{name} must {f'be at least {least}' if least else 'not be negative'}; got {number}.{advice}")
    return number


def whole_number_or_none(name: str, value: Any, least: int) -> int | None:
    """Return a count as an int, or None as it is.

    Raises:
        TypeError, ValueError: as :func:`whole_number`.
    """
    return None if value is None else whole_number(name, value, least, kind="a whole number or None")
