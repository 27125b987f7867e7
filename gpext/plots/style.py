"""The common style of all figures: colours, axes, and arguments as arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Vector = Tensor | np.ndarray

# Okabe & Ito's palette: told apart with any colour vision, and in grey.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#555555"
COLORS = (BLUE, ORANGE, GREEN, RED, "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
COLOR_MAPS = {"mean": "viridis", "sd": "cividis", "exceedance": "PuOr_r"}  # each of one kind of number


def axes_or_new(ax: Axes | None) -> Axes:
    """Return the axes, or those of a new figure."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(layout="constrained")[1]


def name_axes(ax: Axes, x: str, y: str) -> None:
    """Name the axes, unless they have names, or no numbers, as those have that share them with their neighbours."""
    if not ax.get_xlabel() and ax.xaxis.get_tick_params()["labelbottom"]:
        ax.set_xlabel(x)
    if not ax.get_ylabel() and ax.yaxis.get_tick_params()["labelleft"]:
        ax.set_ylabel(y)


def to_array(values: Vector) -> np.ndarray:
    """Return a tensor or array as an array on the CPU."""
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def to_places(**named: Vector) -> np.ndarray:
    """Return places in the plane as a float array (N, 2); the name of the one argument is for the error."""
    ((name, values),) = named.items()
    places = to_array(values).astype(float)
    if places.ndim != 2 or places.shape[1] != 2:
        raise ValueError(f"{name} must have shape (N, 2); got {places.shape}.")
    return places


def to_vectors(**named: Vector) -> list[np.ndarray]:
    """Return the arguments as one-dimensional float arrays of one length."""
    arrays = {name: to_array(values).astype(float) for name, values in named.items()}
    if any(a.ndim != 1 for a in arrays.values()) or len({len(a) for a in arrays.values()}) != 1:
        shapes = ", ".join(f"{name} {a.shape}" for name, a in arrays.items())
        raise ValueError(f"expected vectors of one length; got {shapes}.")
    return list(arrays.values())


def check_one_number(predictive: Distribution) -> None:
    """Raise TypeError unless a distribution is one of S numbers."""
    is_normal = isinstance(predictive, MultivariateNormal)
    if len(predictive.batch_shape + predictive.event_shape) != 1 or (predictive.event_shape and not is_normal):
        raise TypeError(
            f"a {type(predictive).__name__} of batch shape {tuple(predictive.batch_shape)} and event shape "
            f"{tuple(predictive.event_shape)} has no such figure; see gpext.plots for those of proportions and angles."
        )
