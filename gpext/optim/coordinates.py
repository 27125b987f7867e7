r"""The coordinates in which L-BFGS moves parameters: as they are, or as logarithms of what a softplus makes of them.

    phi = log softplus(x),     x = v + log(1 - exp(-v)),  v = exp(phi),     dx / dphi = v / (1 - exp(-v))

A raw parameter is its own logarithm far below zero, and the value itself far above: there, steps of one length are
proportional changes in phi alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Any  # a NumPy array

_SMALL = -30.0  # below it log softplus(x) is x, to rounding


class Coordinates:
    """The parameters as one vector (P,) of float64.

    Args:
        parameters: of any shapes.
        positive: those of them that a softplus makes positive, whose coordinates are logarithms.

    Example:
        >>> import torch
        >>> raw = torch.tensor([100.0], dtype=torch.float64)
        >>> coordinates = Coordinates([raw], positive=[raw])
        >>> point = coordinates.get()
        >>> coordinates.set(point + 1)
        >>> raw / 100  # one e-fold
        tensor([2.7183], dtype=torch.float64)
    """

    def __init__(self, parameters: Sequence[Tensor], positive: Sequence[Tensor] = ()) -> None:
        self.parameters = parameters
        which = {id(p) for p in positive}
        is_log = [np.full(p.numel(), id(p) in which) for p in parameters]
        self._is_log = np.concatenate(is_log) if is_log else np.empty(0, bool)
        # The parameters are put back as they were, to the bit.
        self._start = flatten(parameters)
        self._start_point = self._point(self._start)

    def get(self) -> Array:
        """Return the point (P,) where the parameters are."""
        return self._point(flatten(self.parameters))

    def set(self, point: Array) -> None:
        """Move the parameters to a point (P,)."""
        is_start = np.array_equal(point, self._start_point)
        _unflatten(self._start if is_start else self._raw(point), self.parameters)

    def gradient(self) -> Array:
        """Return the gradient (P,) from the parameters' `.grad`, zero where there is none."""
        slopes = flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        raw = flatten(self.parameters)
        usual = self._is_log & (raw > _SMALL)
        value = np.logaddexp(0, np.where(usual, raw, 0.0))
        with np.errstate(invalid="ignore"):  # of an infinite parameter
            return np.where(usual, value / -np.expm1(-value), 1.0) * slopes

    def scale(self, point: Array) -> Array:
        """Return the length of a usual step from a point, (P,): proportional to a large parameter."""
        return np.where(self._is_log, 1.0, np.maximum(1, np.abs(point)))

    def _point(self, raw: Array) -> Array:
        usual = self._is_log & (raw > _SMALL)
        return np.where(usual, np.log(np.logaddexp(0, np.where(usual, raw, 0.0))), raw)

    def _raw(self, point: Array) -> Array:
        usual = self._is_log & (point > _SMALL)
        with np.errstate(over="ignore"):  # an infinite parameter is one that the line search steps back from
            value = np.exp(np.where(usual, point, 0.0))
        return np.where(usual, value + np.log(-np.expm1(-value)), point)


def flatten(tensors: Sequence[Tensor]) -> Array:
    """Return all numbers of some tensors (P,), float64.

    Example:
        >>> import torch
        >>> flatten([torch.ones(2), torch.zeros(1, 1)])
        array([1., 1., 0.])
    """
    if not tensors:
        return np.empty(0)
    return np.concatenate([t.detach().double().cpu().numpy().ravel() for t in tensors])


@torch.no_grad()
def _unflatten(numbers: Array, parameters: Sequence[Tensor]) -> None:
    start = 0
    for parameter in parameters:
        chunk = numbers[start : start + parameter.numel()]
        parameter.copy_(torch.from_numpy(chunk.copy()).view(parameter.shape))
        start += parameter.numel()
