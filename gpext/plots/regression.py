"""Predictive bands, observations, and what single data contribute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpext.plots.style import BLUE, GREY, RED, Vector, axes_or_new, to_array, to_vectors

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
    """Draw a curve and the band around it, over a scalar input in any order.

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
    """
    ax = axes_or_new(ax)
    x, center, lower, upper = to_vectors(x=x, center=center, lower=lower, upper=upper)
    order = np.argsort(x)
    ax.fill_between(x[order], lower[order], upper[order], color=color, alpha=0.18, linewidth=0, label=band_label)
    ax.plot(x[order], center[order], color=color, linewidth=2, label=label)
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
    """Draw observations over a scalar input, the flagged ones as crosses.

    Args:
        x: inputs.
        y: targets.
        outliers: which to flag; for a robust likelihood, those whose weight E[w_i] is a small share of the largest.
        ax: where to draw; a new figure if None.
        label: legend entry of the ordinary observations.
        outlier_label: legend entry of the flagged ones; their number is added.

    Raises:
        ValueError: the lengths differ.
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
    return ax


def outliers(
    log_loo: Vector,  # (N,)
    precision: Vector,  # (N,)
    *,
    x: Vector | None = None,  # (N,)
    num_named: int = 5,
    ax: Axes | None = None,
) -> Axes:
    """Draw leave-one-out log densities, coloured by how much each datum contributes.

    Crosses are data whose site has a negative precision and widens the posterior, circles the others.

    Args:
        log_loo: leave-one-out log densities; what is nan is left out.
        precision: of the sites, relative to that of a regular datum: blue towards 1, white at 0, red towards -0.25 (a
            Student-t curves by at most -1/8 of what it does at its centre).
        x: inputs; the index of the datum by default.
        num_named: how many of the most surprising to name by their index.
        ax: where to draw; a new figure if None. The scale of the colours is drawn beside it.

    Raises:
        ValueError: the lengths differ, or no density is finite.
    """
    from matplotlib.colors import TwoSlopeNorm

    ax = axes_or_new(ax)
    index = np.arange(len(to_array(log_loo)))
    log_loo, precision, x = to_vectors(log_loo=log_loo, precision=precision, x=index if x is None else x)
    known = np.isfinite(log_loo)
    if not known.any():
        raise ValueError("log_loo must have at least one finite value.")
    norm = TwoSlopeNorm(0, vmin=-0.25, vmax=1)
    for widens, marker, name in ((False, "o", "narrows the posterior"), (True, "X", "widens the posterior")):
        which = known & ((precision < 0) == widens)
        style: dict[str, Any] = {"marker": marker, "edgecolors": GREY, "linewidths": 0.6, "cmap": "RdBu", "norm": norm}
        if which.any():
            label = f"{name} ({int(which.sum())})"
            drawn = ax.scatter(x[which], log_loo[which], s=45, c=precision[which], label=label, zorder=3, **style)
    for i in index[known][np.argsort(log_loo[known], kind="stable")][:num_named]:
        ax.annotate(str(i), (x[i], log_loo[i]), textcoords="offset points", xytext=(6, -3), fontsize=8, color=GREY)
    ax.figure.colorbar(drawn, ax=ax, label="site precision, relative to a regular datum's", extend="both")
    ax.set_ylabel("leave-one-out log density (nats)")
    return ax
