"""Items in the order of their utility."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpext.plots.style import BLUE, GREY, RED, Vector, axes_or_new, name_axes, to_vectors

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def preference_ladder(
    mean: Vector,  # (P,)
    std: Vector,  # (P,)
    *,
    names: Sequence[str] | None = None,
    truth: Vector | None = None,  # (P,)
    width: float = 1.96,
    max_items: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the utilities of items as a ladder, the most preferred on top, each with its interval.

    Comparisons say nothing of a constant that is added to all utilities: they are drawn less their average over the
    items, and so is the truth. The intervals should be those of the same differences, which
    `gpext.designs.rows_of(torch.eye(P) - 1 / P)(model(x))` has; those of f itself also have the uncertainty of the
    constant. Whether one item is preferred to another depends on how the two are correlated, too, see `win_probability`
    of the pairwise likelihoods.

    Args:
        mean: posterior means of the utilities.
        std: posterior standard deviations, of the utilities less their average.
        names: of the items; their numbers, from 0, by default.
        truth: known utilities, as crosses.
        width: of an interval to either side, in standard deviations.
        max_items: draw this many, half of them the most and half the least preferred; all by default.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: the lengths differ, there are no items, or `max_items` is less than 2.

    Example:
        >>> import torch
        >>> utility, deviation = torch.tensor([0.5, -0.5]), torch.tensor([0.2, 0.2])
        >>> type(preference_ladder(utility, deviation, names=["tea", "coffee"])).__name__
        'Axes'
    """
    ax = axes_or_new(ax)
    mean, std = to_vectors(mean=mean, std=std)
    names = [str(i) for i in range(len(mean))] if names is None else list(names)
    if len(names) != len(mean) or len(mean) == 0:
        raise ValueError(f"expected at least one item and a name for each; got {len(mean)} and {len(names)} names.")
    if max_items is not None and max_items < 2:
        raise ValueError(f"max_items must be at least 2; got {max_items}.")
    order = np.argsort(mean, kind="stable")
    steps = np.arange(len(order), dtype=float)
    if max_items is not None and len(order) > max_items:
        best = max_items // 2
        worst = max_items - best
        order = np.concatenate([order[:worst], order[len(order) - best :]])
        steps = np.delete(np.arange(max_items + 1.0), worst)  # a gap for the others
        ax.axhline(worst, color=GREY, linewidth=1, linestyle=":")
    centre = mean.mean()
    ax.errorbar(
        mean[order] - centre,
        steps,
        xerr=width * std[order],
        fmt="o",
        color=BLUE,
        ecolor=BLUE,
        elinewidth=1.5,
        markersize=4,
        label=f"mean and {width:g} standard deviations",
    )
    if truth is not None:
        truth, _ = to_vectors(truth=truth, mean=mean)
        ax.plot(truth[order] - truth.mean(), steps, "x", color=RED, markersize=6, markeredgewidth=1.6, label="truth")
    ax.set_yticks(steps, [names[i] for i in order])
    ax.axvline(0, color=GREY, linewidth=1, zorder=0)
    name_axes(ax, "utility, less the average", "most preferred on top")
    ax.set_ylim(-0.5 - 0.17 * (steps[-1] + 1), steps[-1] + 0.5)  # with room for the legend, whatever the intervals
    ax.legend(loc="lower right")
    return ax
