"""Rules of few data run on one thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from gpytorch.distributions import MultivariateNormal

from gpext.threads import factor_flops, threads_for

_P = ParamSpec("_P")
_R = TypeVar("_R")


def on_few_threads(infer: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return `infer(self, prior, ...)`, on one thread where the covariance is small: see :mod:`gpext.threads`.

    A prior of low rank counts as if it were dense: where one thread is taken, everything is small.
    """

    @wraps(infer)
    def on_few(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        prior: Any = args[1] if len(args) > 1 else kwargs.get("prior")
        if not isinstance(prior, MultivariateNormal):
            return infer(*args, **kwargs)  # which says what is missing
        size = prior.loc.shape[-1]
        with threads_for(factor_flops(size, number=prior.loc.numel() // max(size, 1))):
            return infer(*args, **kwargs)

    return on_few
