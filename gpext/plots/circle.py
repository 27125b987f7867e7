"""Angles: predictions over an input, round a circle, and as arrows in the plane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpext.plots.style import BLUE, GREY, Vector, axes_or_new, name_axes, to_places, to_vectors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_QUARTERS = {-np.pi: "$-\\pi$", -np.pi / 2: "$-\\pi/2$", 0.0: "0", np.pi / 2: "$\\pi/2$", np.pi: "$\\pi$"}
_ARROW: dict[str, Any] = {
    "width": 0.012,
    "head_width": 0.05,
    "length_includes_head": True,
    "linewidth": 0,
    "zorder": 3,
}
_ARC: dict[str, Any] = {"linewidth": 3, "solid_capstyle": "butt", "alpha": 0.7}
_DOT: dict[str, Any] = {"marker": "o", "markersize": 6, "markeredgecolor": "white", "linestyle": "", "zorder": 4}


def angle_band(
    x: Vector,  # (S,)
    center: Vector,  # (S,) radians
    half_width: Vector,  # (S,) radians
    *,
    ax: Axes | None = None,
    label: str = "predicted direction",
    band_label: str = "95 % of new angles",
    color: str = BLUE,
) -> Axes:
    """Draw predicted angles and the arcs around them over a scalar input in any order, on an axis from -pi to pi.

    There are a legend and names of the axes. A curve or band that leaves at the top re-enters at the bottom. The inputs
    must be so close that the curve turns by less than half a circle from one to the next.

    Args:
        x: inputs.
        center: of the arcs, as `credible_arc` has them.
        half_width: of the arcs.
        ax: where to draw; a new figure if None.
        label: legend entry of the curve.
        band_label: legend entry of the band; say what it covers.
        color: of both.

    Raises:
        ValueError: the lengths differ.

    Example:
        >>> import torch
        >>> x = torch.linspace(0, 1, 5)
        >>> type(angle_band(x, 6 * x, 0.3 + 0 * x)).__name__
        'Axes'
    """
    ax = axes_or_new(ax)
    x, center, half_width = to_vectors(x=x, center=center, half_width=half_width)
    order = np.argsort(x)
    x, center, half_width = x[order], np.unwrap(center[order]), half_width[order]
    lowest, highest = (center - half_width).min(), (center + half_width).max()
    turns = np.arange(np.floor((lowest + np.pi) / (2 * np.pi)), np.floor((highest + np.pi) / (2 * np.pi)) + 1)
    for index, turn in enumerate(turns * 2 * np.pi):
        names: dict[str, Any] = {"label": band_label} if index == 0 else {}
        edges = center - half_width - turn, center + half_width - turn
        ax.fill_between(x, *edges, color=color, alpha=0.18, linewidth=0, **names)
        names = {"label": label} if index == 0 else {}
        ax.plot(x, center - turn, color=color, linewidth=2, **names)
    ax.set_ylim(-np.pi, np.pi)
    ax.set_yticks(list(_QUARTERS), list(_QUARTERS.values()))
    name_axes(ax, "x", "angle (radians)")
    ax.legend()
    return ax


def compass(
    center: Vector,  # (N,) radians
    half_width: Vector,  # (N,) radians
    length: Vector,  # (N,) in [0, 1]
    *,
    observed: Vector | None = None,  # (N,) radians
    colors: list[str] | None = None,
    ax: Axes | None = None,
    arc_label: str = "95 % of new angles",
) -> Axes:
    """Draw a few predicted angles as arrows in the unit circle, their arcs around it, and what was observed.

    Args:
        center: of the arcs, where the arrows point.
        half_width: of the arcs, drawn side by side outside the circle.
        length: of the arrows: the mean resultant length, 1 where the angle is certain, 0 where nothing is known.
        observed: dots on the arcs' own circles.
        colors: one a prediction; by default all are blue.
        ax: where to draw; a new figure if None.
        arc_label: legend entry of the arcs; say what they cover.

    Raises:
        ValueError: the lengths differ, or a `length` is outside [0, 1].

    Example:
        >>> import torch
        >>> type(compass(torch.tensor([0.0, 2.0]), torch.tensor([0.3, 0.5]), torch.tensor([0.9, 0.6]))).__name__
        'Axes'
    """
    ax = axes_or_new(ax)
    center, half_width, length = to_vectors(center=center, half_width=half_width, length=length)
    if not ((length >= 0) & (length <= 1)).all():
        raise ValueError(f"length must lie in [0, 1]; got {length.min():g} to {length.max():g}.")
    seen = None if observed is None else to_vectors(center=center, observed=observed)[1]
    shades = [BLUE] * len(center) if colors is None else colors
    turn = np.linspace(0, 2 * np.pi, 361)
    ax.plot(np.cos(turn), np.sin(turn), color=GREY, linewidth=1)
    for angle, name in _QUARTERS.items():
        if angle > -np.pi:
            ax.text(0.86 * np.cos(angle), 0.86 * np.sin(angle), name, ha="center", va="center", color=GREY, fontsize=9)
    for i, (angle, half, size, color) in enumerate(zip(center, half_width, length, shades, strict=True)):
        ax.arrow(0, 0, size * np.cos(angle), size * np.sin(angle), color=color, **_ARROW)
        radius = 1.07 + 0.07 * i
        arc = np.linspace(angle - half, angle + half, 181)
        first = {"arc": arc_label, "dot": "observed"} if i == 0 else {}
        ax.plot(radius * np.cos(arc), radius * np.sin(arc), color=color, label=first.get("arc"), **_ARC)
        if seen is not None:
            at = radius * np.cos(seen[i]), radius * np.sin(seen[i])
            ax.plot(*at, color=color, label=first.get("dot"), **_DOT)
    ax.set_aspect("equal")
    ax.axis("off")
    return ax


def headings(
    position: Vector,  # (N, 2)
    angle: Vector,  # (N,) radians
    length: Vector | None = None,  # (N,) in [0, 1]
    *,
    ax: Axes | None = None,
    label: str | None = None,
    color: str = BLUE,
    size: float | None = None,
    width: float = 0.004,
) -> Axes:
    """Draw angles at places in the plane as arrows through them, as long as the angle is certain.

    Args:
        position: places.
        angle: anticlockwise from the first axis.
        length: mean resultant lengths; 1 by default.
        ax: where to draw; a new figure if None.
        label: legend entry.
        color: of the arrows.
        size: of an arrow of length 1, in the units of `position`; by default so that neighbours do not touch.
        width: of the shafts, as a share of the width of the axes.

    Raises:
        ValueError: the lengths differ, or positions have not two coordinates.

    Example:
        >>> import torch
        >>> position = torch.tensor([[0.0, 0.0], [1.0, 0.5]])
        >>> type(headings(position, torch.tensor([0.0, 1.5]))).__name__
        'Axes'
    """
    ax = axes_or_new(ax)
    places = to_places(position=position)
    east, north, angle = to_vectors(east=places[:, 0], north=places[:, 1], angle=angle)
    sizes = np.ones_like(angle) if length is None else to_vectors(angle=angle, length=length)[1]
    if size is None:
        extent = max(np.ptp(east), np.ptp(north))
        size = extent / max(np.sqrt(len(angle)), 1.0) if extent else 1.0
    u, v = size * sizes * np.cos(angle), size * sizes * np.sin(angle)
    style: dict[str, Any] = {"angles": "xy", "scale_units": "xy", "scale": 1, "pivot": "mid", "width": width}
    ax.quiver(east, north, u, v, color=color, label=label, **style)
    ax.set_aspect("equal")
    ax.margins(0.1)
    return ax
