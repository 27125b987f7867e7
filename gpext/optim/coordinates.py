r"""The coordinates in which L-BFGS moves parameters: nearly logarithms of large ones.

    z = x   where x <= 1,    z = 4 x^(1/4) - 3   beyond,    dx/dz = max(1, x)^(3/4)

Behind a softplus a large parameter is a scale, and one far below zero the logarithm of a scale already. An evidence may
rise until an outputscale is in the thousands, which takes many steps of one length in x, and few in z. In a logarithm
they would be fewer still, and longer: more of them lead to lower maxima.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Any  # a NumPy array

_POWER = 0.25


def to_coordinates(x: Array) -> Array:
    """Return z (P,).

    Example:
        >>> to_coordinates(np.array([-0.5, 1.0, 16.0]))
        array([-0.5,  1. ,  5. ])
    """
    return np.where(x > 1, 1 + (np.maximum(x, 1) ** _POWER - 1) / _POWER, x)


def from_coordinates(z: Array) -> Array:
    """Return x (P,); infinite where it overflows.

    Example:
        >>> from_coordinates(np.array([-0.5, 1.0, 5.0]))
        array([-0.5,  1. , 16. ])
    """
    with np.errstate(over="ignore"):
        return np.where(z > 1, (1 + _POWER * np.maximum(z - 1, 0)) ** (1 / _POWER), z)


def stretch(x: Array) -> Array:
    """Return dx/dz (P,) at x.

    Example:
        >>> stretch(np.array([-0.5, 1.0, 16.0]))
        array([1., 1., 8.])
    """
    return np.maximum(1, x) ** (1 - _POWER)


def usual_step(x: Array) -> Array:
    """Return the length in z of a step in proportion to x (P,), or of one where |x| <= 1.

    Example:
        >>> usual_step(np.array([-9.0, -0.5, 1.0, 16.0]))
        array([9., 1., 1., 2.])
    """
    return np.where(x > 0, np.maximum(1, x) ** _POWER, np.maximum(1, -x))


def flatten(tensors: Sequence[Tensor]) -> Array:
    """Return all numbers of some tensors (P,), float64.

    Example:
        >>> flatten([torch.ones(2), torch.zeros(1, 1)])
        array([1., 1., 0.])
    """
    if not tensors:
        return np.empty(0)
    return np.concatenate([t.detach().double().cpu().numpy().ravel() for t in tensors])


@torch.no_grad()
def unflatten(numbers: Array, tensors: Sequence[Tensor]) -> None:
    """Copy numbers (P,) into tensors.

    Example:
        >>> x = torch.zeros(1, 2)
        >>> unflatten(np.array([1.0, 2.0]), [x])
        >>> x
        tensor([[1., 2.]])
    """
    start = 0
    for tensor in tensors:
        chunk = numbers[start : start + tensor.numel()]
        tensor.copy_(torch.from_numpy(chunk.copy()).view(tensor.shape))
        start += tensor.numel()
