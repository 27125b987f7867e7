"""Descriptions of stored values, against which they are checked before anything is loaded.

Each has one method, `check(value, name)`, which returns nothing or raises a ValueError that names the entry, what was
expected there and what was found.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_REAL = (torch.float32, torch.float64)


class Schema(ABC):
    """A description of a stored value."""

    @abstractmethod
    def check(self, value: Any, name: str) -> None:
        """Raise unless a value matches this description.

        Args:
            value: the stored value.
            name: its name in messages.

        Raises:
            ValueError: it does not match.
        """


class Anything(Schema):
    """Any value: it is checked elsewhere."""

    def check(self, value: Any, name: str) -> None:
        """Accept it."""


class Nothing(Schema):
    """None."""

    def check(self, value: Any, name: str) -> None:
        """See :meth:`Schema.check`."""
        _require(value is None, name, "None", value)


@dataclass(frozen=True)
class Maybe(Schema):
    """None, or a value that another schema describes."""

    schema: Schema

    def check(self, value: Any, name: str) -> None:
        """See :meth:`Schema.check`."""
        if value is not None:
            self.schema.check(value, name)


class Text(Schema):
    """A string."""

    def check(self, value: Any, name: str) -> None:
        """See :meth:`Schema.check`."""
        _require(isinstance(value, str), name, "a string", value)


class Flag(Schema):
    """True or False."""

    def check(self, value: Any, name: str) -> None:
        """See :meth:`Schema.check`."""
        _require(isinstance(value, bool), name, "True or False", value)


@dataclass(frozen=True)
class Number(Schema):
    """A number, at least `least`; finite unless it may be infinite, and never NaN."""

    whole: bool = False
    least: float = -math.inf
    finite: bool = True

    def check(self, value: Any, name: str) -> None:
        """See :meth:`Schema.check`."""
        kind = "a whole number" if self.whole else "a finite number" if self.finite else "a number"
        is_number = isinstance(value, int if self.whole else int | float) and not isinstance(value, bool)
        _require(is_number and (self.whole or not math.isnan(value)), name, kind, value)
        _require(self.whole or not self.finite or math.isfinite(value), name, kind, value)
        _require(value >= self.least, name, f"{kind}, at least {self.least:g}", value)


@dataclass(frozen=True)
class Numbers(Schema):
    """A finite tensor of a shape, in which None stands for any length, and a dtype; None for float32 or float64."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype | None

    def check(self, value: Any, name: str) -> None:
        """See :meth:`Schema.check`."""
        lengths = ", ".join("any" if length is None else str(length) for length in self.shape)
        expected = f"a {'float32 or float64' if self.dtype is None else _of(self.dtype)} tensor ({lengths})"
        _require(isinstance(value, Tensor), name, expected, value)
        _require(value.dtype in (_REAL if self.dtype is None else (self.dtype,)), name, expected, value)
        fits = value.dim() == len(self.shape) and all(
            length in (None, found) for length, found in zip(self.shape, value.shape, strict=True)
        )
        _require(fits, name, expected, value)
        if not bool(value.isfinite().all()):
            raise ValueError(f"{name} must be finite; got NaN or an infinite number in it.")


@dataclass(frozen=True)
class GeneratorState(Schema):
    """The state of a torch.Generator of a device."""

    device: torch.device

    def check(self, value: Any, name: str) -> None:
        """See :meth:`Schema.check`."""
        expected = f"the state of a torch.Generator on {self.device}"
        _require(isinstance(value, Tensor) and value.dtype == torch.uint8, name, expected, value)
        try:
            torch.Generator(self.device).set_state(value)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"{name} must be {expected}: {error}") from error


@dataclass(frozen=True)
class Record(Schema):
    """A dictionary with these entries and no others."""

    entries: Mapping[Any, Schema]

    def check(self, value: Any, name: str) -> None:
        """See :meth:`Schema.check`."""
        _require(isinstance(value, dict), name, "a dictionary", value)
        for key in self.entries:
            if key not in value:
                raise ValueError(f"{name} must have an entry {key!r}; got {sorted(map(str, value))}.")
        for key in value:
            if key not in self.entries:
                raise ValueError(f"{name} must have the entries {sorted(map(str, self.entries))} alone; got {key!r}.")
        for key, schema in self.entries.items():
            schema.check(value[key], f"{name}[{key!r}]")


@dataclass(frozen=True)
class Each(Schema):
    """A list or tuple of items with one schema."""

    item: Schema
    length: int | None = None

    def check(self, value: Any, name: str) -> None:
        """See :meth:`Schema.check`."""
        expected = "a list" if self.length is None else f"a list of {self.length}"
        _require(isinstance(value, list | tuple) and self.length in (None, len(value)), name, expected, value)
        for index, item in enumerate(value):
            self.item.check(item, f"{name}[{index}]")


@dataclass(frozen=True)
class Items(Schema):
    """A list or tuple with a schema for each item."""

    items: tuple[Schema, ...]

    def check(self, value: Any, name: str) -> None:
        """See :meth:`Schema.check`."""
        Each(Anything(), len(self.items)).check(value, name)
        for index, (schema, item) in enumerate(zip(self.items, value, strict=True)):
            schema.check(item, f"{name}[{index}]")


def like(value: Any) -> Schema:
    """Return the schema of values of the same types, keys, lengths and shapes as this one.

    Raises:
        TypeError: it contains a value of a type that is not stored.
    """
    if isinstance(value, Tensor):
        return Numbers(tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return like_record(value)
    if isinstance(value, list | tuple):
        return Items(tuple(like(each) for each in value))
    plain: dict[type, Schema] = {
        type(None): Nothing(),
        str: Text(),
        bool: Flag(),
        int: Number(whole=True),
        float: Number(),
    }
    if type(value) not in plain:
        raise TypeError(f"expected tensors, numbers, words, and lists and dictionaries of them; got {value!r}.")
    return plain[type(value)]


def like_record(value: Mapping[Any, Any], **others: Schema) -> Record:
    """Return the schema of dictionaries with entries like these, and `others`."""
    return Record({**{key: like(each) for key, each in value.items() if key not in others}, **others})


def _require(condition: bool, name: str, expected: str, value: Any) -> None:
    if not condition:
        raise ValueError(f"{name} must be {expected}; got {_described(value)}.")


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {_of(value.dtype)} tensor {tuple(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
