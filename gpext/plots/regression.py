"""Predictive bands and observations over a scalar input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpext.plots.style import BLUE, GREY, RED, Vector, axes_or_new, name_axes, to_array, to_vectors

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def predictive_band(
    x: Vector,  # (S,)
    center: Vector,  # (S,)
    lower: Vector,  # (S,)
    upper: Vector,  # (S,)
    *,
    ax: Axes | None = None,
    label: str = "predictive median",
    band_label: str = "95 % of new observations",
    color: str = BLUE,
) -> Axes:
    """Draw a curve and the band around it, over a scalar input in any order, with a legend and names of the axes.

    Args:
        x: inputs.
        center: the curve, a mean or median.
        lower: lower edge of the band.
        upper: upper edge of the band.
        ax: where to draw; a new figure if None.
        label: legend entry of the curve.
        band_label: legend entry of the band; say what it covers.
        color: of both.

    Raises:
        ValueError: the lengths differ.

    Example:
        >>> import torch
        >>> x = torch.linspace(0, 1, 5)
        >>> type(predictive_band(x, x, x - 1, x + 1)).__name__
        'Axes'
    """
    ax = axes_or_new(ax)
    x, center, lower, upper = to_vectors(x=x, center=center, lower=lower, upper=upper)
    order = np.argsort(x)
    ax.fill_between(x[order], lower[order], upper[order], color=color, alpha=0.18, linewidth=0, label=band_label)
    ax.plot(x[order], center[order], color=color, linewidth=2, label=label)
    name_axes(ax, "x", "y")
    ax.legend()
    return ax


def observations(
    x: Vector,  # (N,)
    y: Vector,  # (N,)
    *,
    outliers: Vector | None = None,  # (N,) bool
    ax: Axes | None = None,
    label: str = "observations",
    outlier_label: str = "flagged as outlier",
) -> Axes:
    """Draw observations over a scalar input, the flagged ones as crosses, with a legend and names of the axes.

    Args:
        x: inputs.
        y: targets.
        outliers: which to flag; for a robust likelihood, those whose weight E[w_i] is a small share of the largest.
        ax: where to draw; a new figure if None.
        label: legend entry of the ordinary observations.
        outlier_label: legend entry of the flagged ones; their number is added.

    Raises:
        ValueError: the lengths differ.

    Example:
        >>> import torch
        >>> ax = observations(torch.arange(3.0), torch.tensor([1.0, 2.0, 0.0]))
        >>> ax.get_legend_handles_labels()[1] or type(ax).__name__
        ['observations']
    """
    ax = axes_or_new(ax)
    x, y = to_vectors(x=x, y=y)
    flagged = np.zeros(len(x), dtype=bool) if outliers is None else to_array(outliers).astype(bool)
    if flagged.shape != x.shape:
        raise ValueError(f"outliers must have the shape of x; got {flagged.shape} and {x.shape}.")
    ax.plot(x[~flagged], y[~flagged], ".", color=GREY, markersize=5, alpha=0.6, label=label)
    if flagged.any():
        name = f"{outlier_label} ({int(flagged.sum())})"
        ax.plot(x[flagged], y[flagged], "x", color=RED, markersize=7, markeredgewidth=1.8, label=name)
    name_axes(ax, "x", "y")
    ax.legend()
    return ax
