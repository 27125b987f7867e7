"""A decorator of `fit`: where training fails, the estimator stays as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")


def all_or_nothing(fit: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Return a method that sets the attributes of an estimator all together, or, where it raises, none of them.

    Predictions of a model from one table would otherwise be by the columns, classes and units of another.
    """

    @functools.wraps(fit)
    def kept(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        before = self.__dict__.copy()
        try:
            return fit(self, *args, **kwargs)
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    return kept
