"""Methods against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gpext.plots.style import COLORS, GREY, MARKERS, Vector, axes_or_new, to_vectors

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def log_density_trace(
    traces: Mapping[str, tuple[Vector, Vector]],
    *,
    tolerance: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw log density against training time on a logarithmic axis, one line a method.

    Args:
        traces: by method, seconds (T,) and log density (T,); times of zero are left out, the axis being logarithmic.
        tolerance: shade what lies within this of the best value of any method.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: there is nothing to draw, or the lengths differ.

    Example:
        >>> import torch
        >>> seconds = torch.tensor([1.0, 2.0, 4.0])
        >>> type(log_density_trace({"gpext": (seconds, torch.tensor([-1.0, -0.5, -0.4]))})).__name__
        'Axes'
    """
    ax = axes_or_new(ax)
    if not traces:
        raise ValueError("traces is empty: expected at least one method.")
    best = -np.inf
    for index, (name, (seconds, values)) in enumerate(traces.items()):
        seconds, values = to_vectors(seconds=seconds, log_density=values)
        best = max(best, values.max(initial=-np.inf))
        style: dict[str, Any] = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}
        later = seconds > 0
        ax.plot(seconds[later], values[later], markersize=4, linewidth=1.8, label=name, **style)
    if tolerance is not None and np.isfinite(best):
        ax.axhspan(best - tolerance, best, color=GREY, alpha=0.25, linewidth=0, label=f"within {tolerance:g} of best")
    ax.set_xscale("log")
    ax.set_xlabel("training time (seconds)")
    ax.set_ylabel("mean test log density (nats)")
    return ax
