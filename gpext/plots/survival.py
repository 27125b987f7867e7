"""Survival functions and hazards with their limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpext.plots.style import COLORS, Vector, axes_or_new, name_axes, to_array, to_vectors

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def survival_curves(
    times: Vector,  # (T,)
    survival: Vector,  # (T,) or (S, T)
    lower: Vector | None = None,  # like survival
    upper: Vector | None = None,
    *,
    labels: Sequence[str] | None = None,
    step: bool = False,
    ax: Axes | None = None,
    colors: Sequence[str] = COLORS,
) -> Axes:
    """Draw survival functions over time, one colour a subject, each with the band between its limits if there are any.

    Args:
        times: increasing.
        survival: probabilities of no event until then, a row a subject.
        lower: limits, such as those of :class:`gpext.survival.Band`; nan is left out.
        upper: likewise.
        labels: legend entries, one a subject; without them there is no legend.
        step: constant from each time to the next, as a :class:`gpext.survival.SurvivalEstimate` is.
        ax: where to draw; a new figure if None.
        colors: of the subjects, used in turn.

    Raises:
        ValueError: shapes that differ, or only one of the limits.

    Example:
        >>> import torch
        >>> t = torch.linspace(0, 3, 50)
        >>> ax = survival_curves(t, torch.exp(-t), torch.exp(-1.2 * t), torch.exp(-0.8 * t), labels=["constant hazard"])
    """
    (times,) = to_vectors(times=times)
    curves, low, high = _curves(survival, lower, upper, len(times))
    ax = axes_or_new(ax)
    for row, label in enumerate(_labels(labels, len(curves))):
        color = colors[row % len(colors)]
        if low is not None and high is not None:
            known = np.isfinite(low[row]) & np.isfinite(high[row])
            band = times[known], low[row][known], high[row][known]
            ax.fill_between(*band, color=color, alpha=0.18, linewidth=0, step="post" if step else None)
        ax.plot(
            times, curves[row], color=color, linewidth=2, label=label, drawstyle="steps-post" if step else "default"
        )
    ax.set_ylim(0, 1.03)
    ax.set_xlim(left=0)
    name_axes(ax, "time", "probability of no event")
    if labels is not None:
        ax.legend()
    return ax


def hazard(
    breaks: Vector,  # (J + 1,)
    rates: Vector,  # (J,) or (S, J)
    lower: Vector | None = None,  # like rates
    upper: Vector | None = None,
    *,
    labels: Sequence[str] | None = None,
    ax: Axes | None = None,
    colors: Sequence[str] = COLORS,
) -> Axes:
    """Draw piecewise constant hazards over time, one colour a subject, on a logarithmic scale.

    Args:
        breaks: ends of the intervals.
        rates: hazards in the intervals, a row a subject; positive.
        lower: limits, such as those of :meth:`gpext.survival.PiecewiseHazard.hazard`.
        upper: likewise.
        labels: legend entries, one a subject; without them there is no legend.
        ax: where to draw; a new figure if None.
        colors: of the subjects, used in turn.

    Raises:
        ValueError: shapes that differ, or only one of the limits.

    Example:
        >>> import torch
        >>> ax = hazard(torch.tensor([0.0, 1.0, 4.0]), torch.tensor([[2.0, 0.5], [1.0, 0.3]]), labels=["old", "young"])
    """
    (breaks,) = to_vectors(breaks=breaks)
    curves, low, high = _curves(rates, lower, upper, len(breaks) - 1)
    ax = axes_or_new(ax)
    for row, label in enumerate(_labels(labels, len(curves))):
        color = colors[row % len(colors)]
        if low is not None and high is not None:
            ax.stairs(high[row], breaks, baseline=low[row], fill=True, color=color, alpha=0.18, linewidth=0)
        ax.stairs(curves[row], breaks, baseline=None, color=color, linewidth=2, label=label)
    ax.set_yscale("log")
    name_axes(ax, "time", "hazard, events per unit of time")
    if labels is not None:
        ax.legend()
    return ax


def _curves(
    values: Vector, lower: Vector | None, upper: Vector | None, number: int
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Return curves and limits as float arrays (S, number)."""
    if (lower is None) != (upper is None):
        raise ValueError("lower and upper belong together; got only one of them.")
    shape = to_array(values).shape
    if len(shape) not in (1, 2) or shape[-1] != number:
        raise ValueError(f"expected {number} values a curve, ({number},) or (S, {number}); got shape {shape}.")
    for limit in (lower, upper):
        if limit is not None and to_array(limit).shape != shape:
            raise ValueError(f"expected limits {shape}, like the curves; got shape {to_array(limit).shape}.")
    curves, low, high = (
        None if each is None else np.atleast_2d(to_array(each).astype(float)) for each in (values, lower, upper)
    )
    assert curves is not None
    return curves, low, high


def _labels(labels: Sequence[str] | None, number: int) -> Sequence[str | None]:
    """Return a legend entry for each curve, or None."""
    if labels is None:
        return [None] * number
    if isinstance(labels, str) or len(labels) != number:
        raise ValueError(f"expected {number} labels, one a curve; got {labels!r}.")
    return labels
