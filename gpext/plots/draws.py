"""Draws of hyperparameters: their courses and their distributions, chain by chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gpext.plots.style import COLORS, Vector, to_array

_MOST = 12  # panels


def hyperparameter_draws(
    draws: Mapping[str, Vector],  # (chains, draws, ...) each
    *,
    names: Sequence[str] | None = None,
    num_bins: int = 30,
) -> np.ndarray:
    """Draw a row for each number in `draws`, its course on the left and its histogram on the right, a colour a chain.

    Chains whose histograms differ have not run long enough. The dashed lines are the mean over all chains.

    Args:
        draws: by name, as `HyperPosterior.draws` and `GibbsDraws.hyperparameters`; a parameter of several numbers takes
            several rows.
        names: which of them, in which order; all by default.
        num_bins: of a histogram.

    Returns:
        The axes (rows, 2) of a new figure.

    Raises:
        KeyError: a name that `draws` does not have.
        ValueError: no draws, fewer than two dimensions, or more than 12 numbers, which `names` can choose from.

    Example:
        >>> import torch
        >>> draws = {"noise": torch.rand(2, 50, generator=torch.Generator().manual_seed(0))}
        >>> hyperparameter_draws(draws).shape  # for each parameter its trace and its histogram
        (1, 2)
    """
    import matplotlib.pyplot as plt

    chosen = list(draws) if names is None else list(names)
    if unknown := [name for name in chosen if name not in draws]:
        raise KeyError(f"no draws of {', '.join(unknown)}; there are {', '.join(draws)}.")
    rows = [row for name in chosen for row in _numbers(name, to_array(draws[name]).astype(float))]
    if not rows:
        raise ValueError("expected draws of at least one parameter.")
    if len(rows) > _MOST:
        raise ValueError(f"expected at most {_MOST} numbers; got {len(rows)}. Choose some by names=[...].")
    _, axes = plt.subplots(len(rows), 2, figsize=(9, 0.6 + 1.9 * len(rows)), layout="constrained", squeeze=False)
    for (course, histogram), (name, values) in zip(axes, rows, strict=True):
        edges = np.histogram_bin_edges(values[np.isfinite(values)], num_bins)
        for chain, color in zip(range(len(values)), _colors(len(values)), strict=True):
            course.plot(values[chain], color=color, linewidth=0.8, label=f"chain {chain}")
            histogram.hist(
                values[chain], bins=edges, density=True, histtype="step", color=color, label=f"chain {chain}"
            )
        mean = float(np.mean(values))
        course.axhline(mean, color="black", linestyle="--", linewidth=0.8)
        histogram.axvline(mean, color="black", linestyle="--", linewidth=0.8, label=f"mean {mean:.3g}")
        course.set(xlabel="draw", ylabel=name)
        histogram.set(xlabel=name, ylabel="density")
        histogram.legend(fontsize=7)
    return axes


def _numbers(name: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return (chains, draws) for each number of a parameter, with its name."""
    if values.ndim < 2 or values.size == 0:
        raise ValueError(f"draws of {name} must have shape (chains, draws, ...), none of them 0; got {values.shape}.")
    short = name.removeprefix("likelihood.").removeprefix("covar_module.")
    flat = values.reshape(*values.shape[:2], -1)
    if flat.shape[2] == 1:
        return [(short, flat[..., 0])]
    return [(f"{short}[{i}]", flat[..., i]) for i in range(flat.shape[2])]


def _colors(num: int) -> list[str]:
    return [COLORS[k % len(COLORS)] for k in range(num)]
