"""A plot of how surprising each datum is, and how much it contributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpext.plots.style import GREY, Vector, axes_or_new, name_axes, to_array, to_vectors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEAST, _MOST = 0.0, 1.0  # relative precisions of the darkest and of the palest colour
_OFFSETS = [(7, -3), (7, 6), (7, -12), (-7, -3), (-7, 6), (-7, -12)]  # of names, in points
_OFFSETS += [(side * 7, 9 * step) for step in (2, -2, 3, -3, 4, -4, 5, -5, 6, -6) for side in (1, -1)]


def outliers(
    log_loo: Vector,  # (N,)
    precision: Vector,  # (N,)
    *,
    x: Vector | None = None,  # (N,)
    order: Vector | None = None,  # (N,)
    num_named: int = 5,
    ax: Axes | None = None,
) -> Axes:
    """Draw leave-one-out log densities, the darker the less a datum contributes, with names of the most surprising.

    Crosses are data whose site has a negative precision and widens the posterior, circles the others. Data of log
    density -inf are triangles on the lower edge, each with its name; the legend counts them, and those that are nan.

    Args:
        log_loo: leave-one-out log densities.
        precision: of the sites, relative to that of a regular datum: pale at 1 and more, darkest at 0 and less.
        x: inputs; the index of the datum by default.
        order: indices of the data, the most surprising first, as `OutlierReport.index`; by log density by default.
        num_named: how many of the most surprising to name by their index.
        ax: where to draw; a new figure if None. The scale of the colours is drawn beside it.

    Raises:
        ValueError: the lengths differ, or no density is finite.

    Example:
        >>> import torch
        >>> type(outliers(torch.tensor([-0.2, -5.0, -0.1]), torch.tensor([9.0, -2.0, 10.0]))).__name__
        'Axes'
    """
    from matplotlib.colors import Normalize

    ax = axes_or_new(ax)
    index = np.arange(len(to_array(log_loo)))
    name_axes(ax, "datum" if x is None else "x", "leave-one-out log density (nats)")
    log_loo, precision, x = to_vectors(log_loo=log_loo, precision=precision, x=index if x is None else x)
    known = np.isfinite(log_loo)
    if not known.any():
        raise ValueError("log_loo must have at least one finite value.")
    ranked = np.argsort(log_loo, kind="stable") if order is None else to_array(order).astype(int)
    if ranked.shape != index.shape or (np.sort(ranked) != index).any():
        raise ValueError(f"order must hold each index of the {len(index)} data once; got {ranked.size} indices.")
    style: dict[str, Any] = {"edgecolors": GREY, "linewidths": 0.6, "cmap": "YlOrRd_r"}
    for widens, marker, name in ((False, "o", "narrows the posterior"), (True, "X", "widens the posterior")):
        which = known & ((precision < 0) == widens)
        if which.any():
            label, norm = f"{name} ({int(which.sum())})", Normalize(_LEAST, _MOST)
            drawn = ax.scatter(
                x[which],
                log_loo[which],
                s=45,
                c=precision[which],
                norm=norm,
                marker=marker,
                label=label,
                zorder=3,
                **style,
            )
    ax.figure.colorbar(drawn, ax=ax, label="site precision, relative to a regular datum's", extend="both")
    places = [(x[i], log_loo[i]) for i in range(len(x))]
    impossible = np.isneginf(log_loo)
    if impossible.any():
        floor = ax.get_ylim()[0]
        label = f"log density $-\\infty$ ({int(impossible.sum())})"
        ax.plot(
            x[impossible], np.full(impossible.sum(), floor), "v", color="black", markersize=7, label=label, zorder=4
        )
        places = [(a, floor if b == -np.inf else b) for a, b in places]
        ax.set_ylim(bottom=floor - 0.08 * (ax.get_ylim()[1] - floor))
    if missing := int(np.isnan(log_loo).sum()):
        ax.plot([], [], linestyle="", label=f"no prediction, not drawn ({missing})")
    of_inf = [int(i) for i in ranked if impossible[i]]
    named = of_inf + [int(i) for i in ranked if known[i]][: max(num_named - len(of_inf), 0)]
    ax.legend()
    _name(ax, [(str(i), places[i]) for i in named])
    return ax


def _name(ax: Axes, named: list[tuple[str, tuple[float, float]]]) -> None:
    """Write names beside places, each at the first of some offsets at which it covers none of the names before it."""
    ax.figure.canvas.figure.draw_without_rendering()  # makes the layout, so that extents are known
    taken: list[Any] = []
    for name, place in named:
        text = ax.annotate(name, place, textcoords="offset points", xytext=(0, 0), fontsize=8, color="black", zorder=5)
        text.set_in_layout(False)
        for offset in _OFFSETS:
            text.set_position(offset)
            text.set_horizontalalignment("left" if offset[0] > 0 else "right")
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
