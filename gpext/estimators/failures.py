"""A decorator of `fit`, by which an estimator stays as it was where training fails, and a block without warnings."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

from gpext.inference import InferenceWarning

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


@contextmanager
def without_inference_warnings() -> Iterator[None]:
    """Leave out the warnings of inferences that need not converge: their status is looked at, or is in the report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferenceWarning)
        yield
