"""Three shares that sum to one, in a triangle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gpext.plots.style import BLUE, GREY, Vector, axes_or_new, to_array, to_vectors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEIGHT = np.sqrt(3) / 2
_CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, _HEIGHT]])
_FRAME = "simplex"


def ternary_frame(labels: Sequence[str] = ("1", "2", "3"), *, ax: Axes | None = None) -> Axes:
    """Draw the triangle of three shares: at a corner its share is 1, on the opposite side 0, thin lines at fifths.

    Args:
        labels: of the corners: left, right, top.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: not three labels.

    Example:
        >>> type(ternary_frame(["sand", "silt", "clay"])).__name__
        'Axes'
    """
    if len(labels) != 3:
        raise ValueError(f"expected three labels; got {len(labels)}.")
    ax = axes_or_new(ax)
    for share in np.arange(1, 5) / 5:
        for corner in range(3):
            ends = np.zeros((2, 3))
            ends[:, corner] = share
            ends[0, corner - 1] = ends[1, corner - 2] = 1 - share
            ax.plot(*_flat(ends), color=GREY, linewidth=0.5, alpha=0.35, zorder=0)
    ax.fill(*_CORNERS.T, facecolor="none", edgecolor=GREY, linewidth=1.2, gid=_FRAME, zorder=1)
    for (x, y), label, side, level in zip(_CORNERS, labels, ("right", "left", "center"), (-1, -1, 1), strict=True):
        ha = "center" if side == "center" else side
        ax.text(x, y + 0.03 * level, label, ha=ha, va="top" if level < 0 else "bottom")
    ax.set_aspect("equal")
    ax.axis("off")
    return ax


def ternary_points(
    points: Vector,  # (N, 3)
    *,
    ax: Axes | None = None,
    label: str | None = None,
    color: str | Sequence[str] = BLUE,
    marker: str = "o",
    size: float = 25,
    alpha: float = 0.8,
) -> Axes:
    """Draw points of the simplex, in a frame of their own if there is none.

    Args:
        points: shares that sum to one.
        ax: where to draw; a new figure if None.
        label: legend entry.
        color: one, or one a point.
        marker: of the points.
        size: of the markers, their area in square points.
        alpha: their opacity.

    Raises:
        ValueError: not three shares, or they do not sum to one.

    Example:
        >>> from gpext.plots import simplex_grid
        >>> type(ternary_points(simplex_grid(3))).__name__
        'Axes'
    """
    shares = _shares(points)
    ax = _framed(ax)
    x, y = _flat(shares)
    ax.scatter(x, y, s=size, c=color, marker=marker, alpha=alpha, label=label, edgecolors="none", zorder=3)
    return ax


def ternary_region(
    points: Vector,  # (M, 3)
    excess: Vector,  # (M,)
    *,
    ax: Axes | None = None,
    label: str | None = None,
    color: str = BLUE,
) -> Axes:
    """Shade where a function on the simplex is positive, as the log density less its threshold is in a credible region.

    Args:
        points: at which the function is known, such as :func:`simplex_grid`.
        excess: its values.
        ax: where to draw; a new figure if None.
        label: legend entry.
        color: of shade and edge.

    Raises:
        ValueError: not three shares, they do not sum to one, or the lengths differ.

    Example:
        >>> from gpext.plots import simplex_grid
        >>> points = simplex_grid(10)
        >>> type(ternary_region(points, points[:, 0] - 0.5)).__name__  # where the first share is at least a half
        'Axes'
    """
    shares = _shares(points)
    (values,) = to_vectors(excess=excess)
    if len(values) != len(shares):
        raise ValueError(f"expected one value a point; got {len(values)} and {len(shares)} points.")
    ax = _framed(ax)
    if values.max() > 0:
        x, y = _flat(shares)
        ax.tricontourf(x, y, values, levels=[0, np.inf], colors=[color], alpha=0.2, zorder=2)
        ax.tricontour(x, y, values, levels=[0], colors=[color], linewidths=1.5, zorder=2)
    if label is not None:
        ax.fill([], [], facecolor=color, alpha=0.3, edgecolor=color, label=label)
    return ax


def simplex_grid(num_steps: int) -> Tensor:
    """Return the points (M, 3), float64, inside a triangular lattice whose sides have `num_steps` steps.

    Raises:
        ValueError: fewer than three steps, which have no point inside.

    Example:
        >>> simplex_grid(4).shape
        torch.Size([3, 3])
    """
    if num_steps < 3:
        raise ValueError(f"num_steps must be at least 3; got {num_steps}.")
    line = torch.arange(1, num_steps)
    pairs = torch.cartesian_prod(line, line)
    pairs = pairs[pairs.sum(-1) < num_steps]
    return torch.cat([pairs, num_steps - pairs.sum(-1, keepdim=True)], -1).double() / num_steps


def _framed(ax: Axes | None) -> Axes:
    if ax is None or not any(patch.get_gid() == _FRAME for patch in ax.patches):
        return ternary_frame(ax=ax)
    return ax


def _shares(points: Vector) -> np.ndarray:
    shares = to_array(points).astype(float)
    if shares.ndim != 2 or shares.shape[1] != 3:
        raise ValueError(f"points must have shape (N, 3); got {shares.shape}.")
    totals = shares.sum(1)
    if len(totals) and np.abs(totals - 1).max() > 1e-3:
        raise ValueError(f"the shares of each point must sum to 1; got {totals[np.abs(totals - 1).argmax()]:g}.")
    return shares


def _flat(shares: np.ndarray) -> np.ndarray:
    """Return the coordinates (2, N) of points of the simplex (N, 3)."""
    return (shares @ _CORNERS).T
