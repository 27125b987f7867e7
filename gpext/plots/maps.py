"""Maps: a function of two inputs as colours, and the classes of a plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpext.plots.classes import class_labels, to_shares
from gpext.plots.style import COLORS, GREY, MARKERS, Vector, axes_or_new, name_axes, to_array, to_places

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEVELS = 20
_DOTS, _INK = 28.0, 8000.0  # the largest area of a dot, and of all dots, in square points
_PALEST = 0.12  # opacity where all classes are as probable as each other


def surface_map(
    points: Vector,  # (S, 2)
    values: Vector,  # (S,)
    *,
    observed: Vector | None = None,  # (N, 2)
    targets: Vector | None = None,  # (N,)
    ax: Axes | None = None,
    label: str = "predictive mean",
    observed_label: str = "observations",
) -> Axes:
    """Draw a function of two inputs as colours between the points at which it is known, with a scale beside it.

    Args:
        points: anywhere in the plane, on a grid or not; at least three that are not on a line.
        values: of the function.
        observed: places of observations, as dots.
        targets: their values, in the colours of the map, whose ends they may pass; without them dots are grey.
        ax: where to draw; a new figure if None.
        label: of the scale.
        observed_label: legend entry of the dots.

    Raises:
        ValueError: the lengths differ, or points have not two coordinates.

    Example:
        >>> import torch
        >>> points = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0))
        >>> type(surface_map(points, points.sum(-1))).__name__
        'Axes'
    """
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    places, heights = _known(points, values)
    ax = axes_or_new(ax)
    low, high = heights.min(), heights.max()
    if not high - low > 1e-9 * max(abs(low), abs(high)):  # a constant
        low, high = low - 0.5, high + 0.5
    levels = MaxNLocator(_LEVELS).tick_values(low, high)  # round numbers
    norm = Normalize(levels[0], levels[-1])
    filled = ax.tricontourf(*places.T, heights, levels=levels, cmap="viridis", norm=norm, extend="both")
    if observed is not None:
        draw_observed(ax, observed, targets, observed_label, cmap="viridis", norm=norm)
    ax.figure.colorbar(filled, ax=ax, label=label)
    name_axes(ax, "$x_1$", "$x_2$")
    return ax


def class_map(
    points: Vector,  # (S, 2)
    probabilities: Vector,  # (S, K), or (S,) of class 1 of two
    *,
    observed: Vector | None = None,  # (N, 2)
    targets: Vector | None = None,  # (N,) in {0, ..., K - 1}
    labels: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the most probable class of each point of the plane, the paler the less certain, and observed classes.

    Args:
        points: on a rectangular grid, in any order.
        probabilities: of the classes, which sum to one.
        observed: places of observations.
        targets: their classes.
        labels: of the classes; "class 0", "class 1" and so on by default.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: the lengths differ, the points are no grid, the probabilities do not sum to one, or only one of
            `observed` and `targets` is given.

    Example:
        >>> import torch
        >>> points = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0))
        >>> type(class_map(points, torch.linspace(0, 1, 9))).__name__
        'Axes'
    """
    from matplotlib.colors import to_rgb

    shares = to_shares(probabilities)
    places, _ = _known(points, shares[:, 0])
    names = class_labels(labels, shares.shape[1])
    if (observed is None) != (targets is None):
        raise ValueError("observed and targets belong together; got only one of them.")
    axes = [np.unique(column) for column in places.T]
    shape = len(axes[1]), len(axes[0])
    order = np.lexsort((places[:, 0], places[:, 1]))
    if len(places) != shape[0] * shape[1] or min(shape) < 2:
        raise ValueError(f"points must be a grid of two or more values of each coordinate; got {len(places)} points.")
    ax = axes_or_new(ax)
    winner = shares.argmax(1)
    certain = (shares.max(1) * shares.shape[1] - 1) / (shares.shape[1] - 1)  # 0 where all are equal, 1 where sure
    palette = np.array([to_rgb(COLORS[k % len(COLORS)]) for k in range(len(names))])
    opacity = (_PALEST + (0.75 - _PALEST) * certain)[:, None]
    pixels = (1 - opacity + opacity * palette[winner])[order].reshape(*shape, 3)
    half = [0.5 * (axis[1] - axis[0]) for axis in axes]
    extent = (axes[0][0] - half[0], axes[0][-1] + half[0], axes[1][0] - half[1], axes[1][-1] + half[1])
    ax.imshow(pixels, origin="lower", extent=extent, aspect="auto", interpolation="bilinear")
    classes = np.full(0, 0) if targets is None else to_array(targets).astype(int)
    dots = np.zeros((0, 2)) if observed is None else to_places(observed=observed)
    if len(classes) != len(dots):
        raise ValueError(f"expected one class a place; got {len(classes)} classes and {len(dots)} places.")
    for k, name in enumerate(names):
        style: dict[str, Any] = {
            "color": palette[k],
            "marker": MARKERS[k % len(MARKERS)],
            "edgecolors": "white",
            "linewidths": 0.8,
        }
        ax.scatter(*dots[classes == k].T, label=name, zorder=3, **style)
    ax.set(xlim=extent[:2], ylim=extent[2:])
    name_axes(ax, "$x_1$", "$x_2$")
    ax.legend()
    return ax


def draw_observed(
    ax: Axes, observed: Vector, targets: Vector | None, label: str | None, *, cmap: str, norm: Any
) -> None:
    """Draw observations as dots, the smaller the more there are: grey, or in the colours of their targets.

    A label is that of a legend.

    Raises:
        ValueError: places without two coordinates, or not one target a place.
    """
    dots = to_places(observed=observed)
    size = min(_DOTS, max(1.0, _INK / max(len(dots), 1)))
    rim = 0.8 if size == _DOTS else 0.0
    style: dict[str, Any] = {"s": size, "edgecolors": "white", "linewidths": rim, "zorder": 3}
    if targets is None:
        ax.scatter(dots[:, 0], dots[:, 1], color=GREY, label=label, **style)
    else:
        _, colors = _known(observed, targets)
        ax.scatter(dots[:, 0], dots[:, 1], c=colors, cmap=cmap, norm=norm, label=label, **style)
    if label is not None:
        ax.legend(loc="best" if size == _DOTS else "upper right")  # it takes long to find the best of many dots


def _known(points: Vector, values: Vector) -> tuple[np.ndarray, np.ndarray]:
    """Return points (S, 2) and values (S,) as arrays."""
    places, heights = to_places(points=points), to_array(values).astype(float)
    if heights.shape != (len(places),):
        raise ValueError(f"expected one value a point; got {heights.shape} and {len(places)} points.")
    return places, heights
