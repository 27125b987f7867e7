"""Figures: predictive bands with outliers flagged, log density against time, calibration.

Every function takes plain tensors or arrays and an optional matplotlib `Axes`, draws on it and returns it, so figures
can be combined; nothing here knows a model. matplotlib is imported when a figure is drawn, not with the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Vector = Tensor | np.ndarray

# Okabe & Ito's palette: told apart with any colour vision, and in grey.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#555555"
COLORS = (BLUE, ORANGE, GREEN, RED, "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")


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
    ax = _axes(ax)
    x, center, lower, upper = _vectors(x=x, center=center, lower=lower, upper=upper)
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
    ax = _axes(ax)
    x, y = _vectors(x=x, y=y)
    flagged = np.zeros(len(x), dtype=bool) if outliers is None else _array(outliers).astype(bool)
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

    ax = _axes(ax)
    index = np.arange(len(_array(log_loo)))
    log_loo, precision, x = _vectors(log_loo=log_loo, precision=precision, x=index if x is None else x)
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
    """
    ax = _axes(ax)
    if not traces:
        raise ValueError("traces is empty: expected at least one method.")
    best = -np.inf
    for index, (name, (seconds, values)) in enumerate(traces.items()):
        seconds, values = _vectors(seconds=seconds, log_density=values)
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


def reliability(
    targets: Vector,  # (N,) in {0, 1}
    probabilities: Vector,  # (N,)
    *,
    num_bins: int = 8,
    ax: Axes | None = None,
    label: str | None = None,
    color: str = BLUE,
    marker: str = "o",
) -> Axes:
    """Draw the observed share of class 1 against its predicted probability, in bins of equally many data.

    The bars are 90 % Wilson intervals for the share: a calibrated forecaster crosses the diagonal with most of them.

    Args:
        targets: classes.
        probabilities: predicted p(y = 1).
        num_bins: bins; each has about N / num_bins data.
        ax: where to draw; a new figure if None.
        label: legend entry.
        color: of the points.
        marker: of the points.

    Raises:
        ValueError: the lengths differ, or a probability is outside [0, 1].
    """
    ax = _axes(ax)
    targets, probabilities = _vectors(targets=targets, probabilities=probabilities)
    if not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise ValueError(f"probabilities must lie in [0, 1]; got {probabilities.min():g} to {probabilities.max():g}.")
    order = np.argsort(probabilities, kind="stable")
    bins = [part for part in np.array_split(order, num_bins) if len(part)]
    predicted = np.array([probabilities[part].mean() for part in bins])
    observed = np.array([targets[part].mean() for part in bins])
    low, high = _wilson(observed, np.array([len(part) for part in bins]))
    errors = np.maximum(np.stack([observed - low, high - observed]), 0)  # rounding at shares of 0 and 1
    _diagonal(ax)
    ax.errorbar(
        predicted,
        observed,
        yerr=errors,
        color=color,
        marker=marker,
        markersize=6,
        linewidth=0.8,
        capsize=2,
        label=label,
    )
    ax.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    ax.set_xlabel("predicted probability of class 1")
    ax.set_ylabel("observed share of class 1")
    return ax


def pit_histogram(
    pit: Vector,  # (N,) in [0, 1]
    *,
    num_bins: int = 10,
    ax: Axes | None = None,
    label: str | None = None,
    color: str = BLUE,
) -> Axes:
    """Draw the histogram of probability integral transforms F(y_i), which is flat for a calibrated forecaster.

    The grey stripe holds 90 % of the bins of one. A hump says that predictions are too wide, a U too narrow.

    Args:
        pit: predictive cumulative probabilities of what was observed.
        num_bins: bins.
        ax: where to draw; a new figure if None.
        label: legend entry.
        color: of the steps.

    Raises:
        ValueError: a value is outside [0, 1].
    """
    from scipy.stats import binom

    ax = _axes(ax)
    pit = _probabilities(pit)
    counts, edges = np.histogram(pit, bins=num_bins, range=(0, 1))
    scale = num_bins / len(pit)
    low, high = (binom.ppf(p, len(pit), 1 / num_bins) * scale for p in (0.05, 0.95))
    if not ax.patches:  # once, however many histograms share the axes
        ax.axhspan(low, high, color=GREY, alpha=0.2, linewidth=0, label="90 % of bins if calibrated")
        ax.axhline(1, color=GREY, linewidth=1)
    ax.stairs(counts * scale, edges, color=color, linewidth=2, label=label)
    ax.set_xlim(0, 1)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("predictive cumulative probability of the observation")
    ax.set_ylabel("density")
    return ax


def coverage(
    pit: Vector,  # (N,) in [0, 1]
    *,
    ax: Axes | None = None,
    label: str | None = None,
    color: str = BLUE,
    linestyle: str = "-",
) -> Axes:
    """Draw how often the central predictive intervals of each level held what was observed.

    Args:
        pit: predictive cumulative probabilities of what was observed; y_i is in the central interval of level p if
            |2 pit_i - 1| <= p.
        ax: where to draw; a new figure if None.
        label: legend entry.
        color: of the curve.
        linestyle: of the curve.

    Raises:
        ValueError: a value is outside [0, 1].
    """
    ax = _axes(ax)
    needed = np.sort(np.abs(2 * _probabilities(pit) - 1))  # the level from which on y_i is inside
    levels = np.concatenate([[0], needed, [1]])
    shares = np.concatenate([[0], np.arange(1, len(needed) + 1) / len(needed), [1]])
    _diagonal(ax)
    ax.step(levels, shares, where="post", color=color, linestyle=linestyle, linewidth=1.8, label=label)
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.set_xlabel("level of the central predictive interval")
    ax.set_ylabel("share of observations inside")
    return ax


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(layout="constrained")[1]


def _array(values: Vector) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def _vectors(**named: Vector) -> list[np.ndarray]:
    """Return the arguments as one-dimensional float arrays of one length."""
    arrays = {name: _array(values).astype(float) for name, values in named.items()}
    if any(a.ndim != 1 for a in arrays.values()) or len({len(a) for a in arrays.values()}) != 1:
        shapes = ", ".join(f"{name} {a.shape}" for name, a in arrays.items())
        raise ValueError(f"expected vectors of one length; got {shapes}.")
    return list(arrays.values())


def _probabilities(pit: Vector) -> np.ndarray:
    (values,) = _vectors(pit=pit)
    if len(values) == 0 or not ((values >= 0) & (values <= 1)).all():
        raise ValueError("pit must hold at least one value, all of them in [0, 1].")
    return values


def _wilson(share: np.ndarray, count: np.ndarray, z: float = 1.645) -> tuple[np.ndarray, np.ndarray]:
    """Return Wilson's score interval of binomial shares."""
    center = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    return center - half, center + half


def _diagonal(ax: Axes) -> None:
    """Draw the line of perfect calibration, once."""
    name = "calibrated"
    if name not in [line.get_label() for line in ax.lines]:
        ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", label=name, zorder=0)
