"""Maps of numbers in the cells of a rectangular grid: intensities of point processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gpext.plots.style import COLOR_MAPS, RED, Vector, axes_or_new, name_axes, to_array, to_places, to_vectors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KINDS: dict[str, dict[str, Any]] = {
    "mean": {"cmap": COLOR_MAPS["mean"], "vmin": 0},
    "sd": {"cmap": COLOR_MAPS["sd"], "vmin": 0},
    "exceedance": {"cmap": COLOR_MAPS["exceedance"], "vmin": 0, "vmax": 1},
}
_LABELS = {
    "mean": "expected points per unit of area",
    "sd": "standard deviation of the intensity",
    "exceedance": "probability of exceeding the threshold",
}


def intensity(
    edges: Sequence[Vector],  # (n_x + 1,), (n_y + 1,)
    values: Vector,  # (n_x, n_y)
    *,
    kind: Literal["mean", "sd", "exceedance"] = "mean",
    points: Vector | None = None,  # (N, 2)
    outline: Vector | None = None,  # (V, 2)
    ax: Axes | None = None,
    label: str | None = None,
) -> Axes:
    """Draw a number in each cell of a grid as its colour, with a scale beside it; cells of nan are left white.

    Args:
        edges: of the cells along both coordinates, such as `grid.edges` of a :class:`gpext.point_process.Grid`.
        values: such as `grid.place(intensity.mean)`.
        kind: of the numbers, for the colours and the label of the scale: a mean or a standard deviation begins at 0, an
            exceedance probability is between 0 and 1.
        points: to draw as dots.
        outline: of the window, to draw as a line.
        ax: where to draw; a new figure if None.
        label: of the scale.

    Raises:
        ValueError: not two vectors of edges, values of another shape, no finite value, or another kind.

    Example:
        >>> import torch
        >>> edges = torch.linspace(0, 1, 3), torch.linspace(0, 2, 5)
        >>> ax = intensity(edges, torch.rand(2, 4), kind="exceedance")
    """
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, _KINDS))}; got {kind!r}.")
    if len(edges) != 2:
        raise ValueError(f"expected edges along two coordinates; got {len(edges)}.")
    (x,), (y,) = (to_vectors(edges=axis) for axis in edges)
    heights = to_array(values).astype(float)
    if heights.shape != (len(x) - 1, len(y) - 1):
        raise ValueError(f"expected a value of each cell, ({len(x) - 1}, {len(y) - 1}); got shape {heights.shape}.")
    if not np.isfinite(heights).any():
        raise ValueError("expected a finite value in one cell or more; got none.")
    ax = axes_or_new(ax)
    mesh = ax.pcolormesh(x, y, np.ma.masked_invalid(heights.T), **_KINDS[kind])
    if outline is not None:
        corners = to_places(outline=outline)
        ax.plot(*np.vstack([corners, corners[:1]]).T, color=RED, linewidth=1.6)
    if points is not None:
        dots = to_places(points=points)
        ax.scatter(dots[:, 0], dots[:, 1], s=9, color="white", edgecolors="black", linewidths=0.6, zorder=3)
    ax.set_aspect("equal")
    ax.figure.colorbar(mesh, ax=ax, label=_LABELS[kind] if label is None else label)
    name_axes(ax, "$x_1$", "$x_2$")
    return ax
