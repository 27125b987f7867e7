"""Checks that all subpackages share: tensors, finite values, whole numbers."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from torch import Tensor


def whole_number(name: str, value: Any, least: int, *, kind: str = "a whole number", remedy: str = "") -> int:
    """Return a count as an int: anything that has `__index__`, except a truth value.

    Args:
        name: of the argument, for the message.
        value: the given value.
        least: the smallest value allowed.
        kind: the kind of value expected, for the message.
        remedy: advice, appended to the message.

    Raises:
        TypeError: it is not a whole number.
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


def whole_number_or_none(name: str, value: Any, least: int, *, kind: str = "a whole number or None") -> int | None:
    """Return a count as an int, or None as it is; arguments as of :func:`whole_number`.

    Raises:
        TypeError, ValueError: as :func:`whole_number`.
    """
    return None if value is None else whole_number(name, value, least, kind=kind)


def check_tensor(name: str, values: object) -> None:
    """Raise TypeError unless the values are a tensor."""
    if not isinstance(values, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor; got {type(values).__qualname__}. Convert with torch.as_tensor(...)."
        )


def check_finite(name: str, values: Tensor, *, remedy: str = "") -> None:
    """Raise ValueError, with the first offending index and advice, if there are NaN or infinite values."""
    if not values.is_floating_point() or is_finite(values):
        return
    index = tuple((~values.isfinite()).nonzero()[0].tolist())
    advice = f" {remedy}" if remedy else ""
    raise ValueError(f"{name} must be finite; got {values[index].item()} at index {show_index(index)}.{advice}")


def is_finite(values: Tensor) -> bool:
    """Return whether values of floating point are neither NaN nor infinite, by their sum unless that overflows."""
    return math.isfinite(float(values.detach().sum())) or bool(values.isfinite().all())


def show_index(index: tuple[int, ...]) -> str:
    """Return an index as it is written: a number for vectors."""
    return str(index[0]) if len(index) == 1 else str(index)
