"""Probabilities of classes over a scalar input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpext.plots.style import COLORS, Vector, axes_or_new, name_axes, to_array, to_vectors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ERROR = 1e-3  # of a sum of probabilities


def class_probabilities(
    x: Vector,  # (S,)
    probabilities: Vector,  # (S, K), or (S,) of class 1 of two
    *,
    labels: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the probabilities of the classes over a scalar input in any order, as bands stacked from 0 to 1.

    Args:
        x: inputs.
        probabilities: of the classes, which sum to one.
        labels: of the classes; "class 0", "class 1" and so on by default.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: the lengths differ, or the probabilities do not sum to one.

    Example:
        >>> import torch
        >>> p = torch.linspace(0, 1, 5)
        >>> type(class_probabilities(torch.arange(5.0), torch.stack([p, 1 - p], -1), labels=["a", "b"])).__name__
        'Axes'
    """
    shares = to_shares(probabilities)
    ax = axes_or_new(ax)
    x, _ = to_vectors(x=x, probabilities=shares[:, 0])
    names = class_labels(labels, shares.shape[1])
    order = np.argsort(x)
    edges = np.concatenate([np.zeros((len(x), 1)), np.cumsum(shares, 1)], 1)[order]
    for k, name in enumerate(names):
        color = COLORS[k % len(COLORS)]
        hatch = "//" if k >= len(COLORS) else None
        style: dict[str, Any] = {
            "facecolor": color,
            "alpha": 0.55,
            "edgecolor": "white",
            "linewidth": 0.8,
            "hatch": hatch,
        }
        ax.fill_between(x[order], edges[:, k], edges[:, k + 1], label=name, **style)
    ax.set_ylim(0, 1)
    name_axes(ax, "x", "probability")
    ax.legend()
    return ax


def to_shares(probabilities: Vector) -> np.ndarray:
    """Return probabilities (S, K) of classes, given as such or as (S,) of class 1 of two.

    Raises:
        ValueError: another shape, one outside [0, 1], or they do not sum to one.
    """
    shares = to_array(probabilities).astype(float)
    if shares.ndim == 1:
        shares = np.stack([1 - shares, shares], 1)
    if shares.ndim != 2:
        raise ValueError(f"probabilities must have shape (S, K), or (S,) of class 1; got {shares.shape}.")
    if not ((shares >= -_ERROR) & (np.abs(shares.sum(1, keepdims=True) - 1) < _ERROR)).all():
        raise ValueError("the probabilities of each point must be at least 0 and sum to 1.")
    return shares


def class_labels(labels: Sequence[str] | None, num_classes: int) -> list[str]:
    """Return the names of the classes.

    Raises:
        ValueError: another number of names.
    """
    names = [f"class {k}" for k in range(num_classes)] if labels is None else list(labels)
    if len(names) != num_classes:
        raise ValueError(f"expected {num_classes} labels, one a class; got {len(names)}.")
    return names
