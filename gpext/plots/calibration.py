"""Whether predicted probabilities are those of what happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpext.plots.style import BLUE, GREY, Vector, axes_or_new, to_vectors

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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

    Example:
        >>> import torch
        >>> p = torch.rand(200, generator=torch.Generator().manual_seed(0))
        >>> ax = reliability(torch.bernoulli(p), p)
        >>> ax.get_xlabel()
        'predicted probability of class 1'
    """
    ax = axes_or_new(ax)
    targets, probabilities = to_vectors(targets=targets, probabilities=probabilities)
    if not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise ValueError(f"probabilities must lie in [0, 1]; got {probabilities.min():g} to {probabilities.max():g}.")
    order = np.argsort(probabilities, kind="stable")
    bins = [part for part in np.array_split(order, num_bins) if len(part)]
    predicted = np.array([probabilities[part].mean() for part in bins])
    observed = np.array([targets[part].mean() for part in bins])
    low, high = wilson_interval(observed, np.array([len(part) for part in bins]))
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

    The grey stripe holds 90 % of the bins of one. A hump means predictions that are too wide, a U too narrow ones.

    Args:
        pit: predictive cumulative probabilities of what was observed.
        num_bins: bins.
        ax: where to draw; a new figure if None.
        label: legend entry.
        color: of the steps.

    Raises:
        ValueError: a value is outside [0, 1].

    Example:
        >>> import torch
        >>> pit = torch.rand(100, generator=torch.Generator().manual_seed(0))  # P(Y <= y) of each datum
        >>> type(pit_histogram(pit)).__name__
        'Axes'
    """
    from scipy.stats import binom

    ax = axes_or_new(ax)
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

    Example:
        >>> import torch
        >>> pit = torch.rand(100, generator=torch.Generator().manual_seed(0))  # P(Y <= y) of each datum
        >>> type(coverage(pit)).__name__
        'Axes'
    """
    ax = axes_or_new(ax)
    needed = np.sort(np.abs(2 * _probabilities(pit) - 1))  # the level from which on y_i is inside
    levels = np.concatenate([[0], needed, [1]])
    shares = np.concatenate([[0], np.arange(1, len(needed) + 1) / len(needed), [1]])
    _diagonal(ax)
    ax.step(levels, shares, where="post", color=color, linestyle=linestyle, linewidth=1.8, label=label)
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.set_xlabel("level of the central predictive interval")
    ax.set_ylabel("share of observations inside")
    return ax


def _probabilities(pit: Vector) -> np.ndarray:
    (values,) = to_vectors(pit=pit)
    if len(values) == 0 or not ((values >= 0) & (values <= 1)).all():
        raise ValueError("pit must hold at least one value, all of them in [0, 1].")
    return values


def wilson_interval(share: np.ndarray, count: np.ndarray, z: float = 1.645) -> tuple[np.ndarray, np.ndarray]:
    """Return Wilson's score interval of binomial shares."""
    center = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    return center - half, center + half


def _diagonal(ax: Axes) -> None:
    """Draw the line of perfect calibration, once."""
    name = "calibrated"
    if name not in [line.get_label() for line in ax.lines]:
        ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", label=name, zorder=0)
