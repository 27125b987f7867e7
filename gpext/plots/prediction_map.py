"""Maps of predictions: mean, standard deviation and exceedance probability, on grids and at scattered places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from gpext.checks import check_finite
from gpext.plots.map_numbers import Quantity, numbers_of, numbers_of_model, quantity_name
from gpext.plots.maps import draw_observed
from gpext.plots.style import COLOR_MAPS, Vector, name_axes, to_array, to_places

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Kind = Literal["mean", "sd", "exceedance"]
Style = Literal["image", "points", "triangles"]

_CELLS = 100  # along each side of the grid that is made for a model
_FILLED = 0.25  # of the cells of a grid, at least
_EXTEND = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
_INK = 2e4  # square points, of all places drawn as dots


def map(
    predicted: Any,
    inputs: Vector | Sequence[Vector] | None = None,  # (S, d); or (n_x,), (n_y,)
    *,
    show: Kind | Sequence[Kind] | None = None,
    of: Quantity = None,
    threshold: float | None = None,
    places: Vector | None = None,  # (S, 2)
    mask: Vector | None = None,  # (S,) or (n_x, n_y)
    style: Style | None = None,
    observed: Vector | None = None,  # (N, 2)
    targets: Vector | None = None,  # (N,)
    midpoint: float | None = None,
    limits: tuple[float, float] | None = None,
    name: str | None = None,
    aspect: float | Literal["auto", "equal"] = "equal",
    axes: Axes | Sequence[Axes] | None = None,
    progress: bool = True,
) -> list[Axes]:
    r"""Draw maps of predictions: means, standard deviations, and probabilities P(u > t) of exceeding a threshold.

    u is a latent function f, a function g(f) such as a rate or a probability, or an observation y. A model predicts
    2000 inputs at a time, with a bar that shows the remaining time.

    Args:
        predicted: a model of one latent function in eval mode, or a distribution of S values.
        inputs: those of the model; or the two coordinates of a rectangular grid, whose S = n_x n_y inputs are those of
            `torch.cartesian_prod`. None for a grid of 100 by 100 over the training inputs of a model.
        show: what to draw, a panel each; mean and standard deviation by default, and the exceedance probability if
            there is a threshold.
        of: None for f, or for the given distribution itself; a function g, such as `torch.exp`, for g(f), by quadrature
            (the exceedance probability takes an increasing or decreasing one); a likelihood for y.
        threshold: t, in the units of u.
        places: of the inputs in the plane, if these have other coordinates or more than two columns.
        mask: True where to predict and to draw.
        style: "image", a coloured cell an input, which is the default where the places are a grid, or a quarter of one
            or more; "points", a dot an input; or "triangles", with colours interpolated between the inputs.
        observed: places of data, as dots.
        targets: their values, in the colours of the mean.
        midpoint: a value of the mean from which colours diverge, equally to both sides.
        limits: lowest and highest value of the mean that have colours of their own; all values by default.
        name: of u, for the labels of the scales.
        aspect: of a unit of the second coordinate to one of the first: "equal" is 1; 1 / cos(latitude) for degrees of
            longitude and latitude; "auto" where their units have nothing to do with each other.
        axes: where to draw, one a panel; a new figure if None.
        progress: False for no bar.

    Returns:
        The axes, one a panel.

    Raises:
        RuntimeError: a model in train mode.
        TypeError: neither a model nor a distribution, or predictions that are not one number an input.
        ValueError: shapes that do not match, inputs that are not finite, an empty mask, places that are no grid for an
            image or are on a line for triangles, an unknown kind or style, predictions that are not finite, or no
            threshold for an exceedance probability.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> f = MultivariateNormal(torch.arange(12.0), torch.eye(12))
        >>> axes = map(f, (torch.arange(4.0), torch.arange(3.0)), threshold=5.0)
        >>> [ax.collections[0].get_array().shape for ax in axes]
        [(3, 4), (3, 4), (3, 4)]
    """
    kinds = _kinds(show, threshold)
    level = math.nan if threshold is None else float(threshold)
    if "exceedance" in kinds and not math.isfinite(level):
        raise ValueError(f"an exceedance probability takes a threshold, a finite number; got {threshold!r}.")
    if midpoint is not None and limits is not None:
        raise ValueError("midpoint and limits exclude each other; give one of them.")
    if limits is not None and not limits[0] < limits[1]:
        raise ValueError(f"limits must be a lower and a higher number; got {limits!r}.")
    is_model = isinstance(predicted, torch.nn.Module)
    if not is_model and not isinstance(predicted, Distribution):
        raise TypeError(f"expected a model in eval mode, or a distribution; got {type(predicted).__name__}.")
    if is_model and predicted.training:
        raise RuntimeError("the model is in train mode; call model.eval() to predict.")
    x = _inputs(predicted if is_model else None, inputs)
    where = to_places(inputs=x) if places is None else to_places(places=places)
    if len(where) != len(x):
        raise ValueError(f"expected a place of each input, ({len(x)}, 2); got {where.shape}.")
    kept = _kept(mask, len(x))
    grid = _grid(where)
    style = _style(style, where[kept], grid)

    if is_model:
        wanted = x[torch.from_numpy(kept).to(x.device)]
        found = numbers_of_model(predicted, wanted, kinds, of, level, progress=progress)
    else:
        found = numbers_of(predicted, kinds, of, level)
        if len(found[kinds[0]]) != len(x):
            raise ValueError(f"expected a distribution of {len(x)} values, one an input; got {len(found[kinds[0]])}.")
        found = {kind: values[torch.from_numpy(kept)] for kind, values in found.items()}

    name = quantity_name(of, is_model=is_model) if name is None else name
    panels = _panels(axes, kinds, where[kept], aspect)
    for panel, (kind, ax) in enumerate(zip(kinds, panels, strict=True)):
        values = to_array(found[kind]).astype(float)
        look = _look(kind, values, midpoint, limits)
        if style == "image" and grid is not None:
            drawn = _draw_cells(ax, grid, kept, values, look)
        elif style == "triangles":
            drawn = ax.tripcolor(*where[kept].T, values, shading="gouraud", rasterized=True, **look)
        else:
            size = min(30.0, max(1.0, _INK / len(values)))
            x_1, x_2 = where[kept].T
            drawn = ax.scatter(x_1, x_2, c=values, s=size, linewidths=0, rasterized=True, **look)
        ax.set_aspect(aspect)
        if observed is not None:
            view = ax.get_xlim(), ax.get_ylim()
            label = None if panel else "observations"
            draw_observed(ax, observed, targets if kind == "mean" else None, label, **look)
            ax.set(xlim=view[0], ylim=view[1])
        beyond = bool(values.min() < look["norm"].vmin), bool(values.max() > look["norm"].vmax)
        extend = "neither" if limits is None else _EXTEND[beyond]
        ax.figure.colorbar(drawn, ax=ax, label=_label(kind, name, level), extend=extend)
        name_axes(ax, "$x_1$", "$x_2$")
    return panels


def _kinds(show: Any, threshold: float | None) -> list[Kind]:
    if show is None:
        return ["mean", "sd"] if threshold is None else ["mean", "sd", "exceedance"]
    kinds: list[Kind] = [show] if isinstance(show, str) else list(show)  # type: ignore[list-item]
    if not kinds or any(kind not in COLOR_MAPS for kind in kinds):
        raise ValueError(f"show must be one or more of {', '.join(COLOR_MAPS)}; got {show!r}.")
    return kinds


def _inputs(model: Any, inputs: Vector | Sequence[Vector] | None) -> Tensor:
    """Return inputs (S, d); arrays in the dtype and on the device of the model's training inputs, or its parameters."""
    known = None if model is None else (getattr(model, "train_inputs", None) or (None,))[0]
    if inputs is None:
        if known is None or known.dim() != 2 or known.size(-1) != 2:
            raise ValueError(
                "a grid is made over training inputs (N, 2) of a model; give inputs (S, d) instead, and places (S, 2) "
                "if these have more than two columns."
            )
        inputs = [torch.linspace(float(c.min()), float(c.max()), _CELLS, dtype=c.dtype) for c in known.unbind(-1)]
    is_array = isinstance(inputs, Tensor | np.ndarray)
    lines = [torch.as_tensor(each) for each in ([inputs] if is_array else inputs)]
    if not is_array and (len(lines) != 2 or any(line.dim() != 1 for line in lines)):
        shapes = ", ".join(str(tuple(line.shape)) for line in lines)
        raise ValueError(f"expected inputs (S, d), or the two coordinates (n_x,) and (n_y,) of a grid; got {shapes}.")
    x = lines[0] if is_array else torch.cartesian_prod(*lines)
    if x.dim() != 2 or not len(x):
        raise ValueError(f"expected inputs (S, d), one or more; got shape {tuple(x.shape)}.")
    check_finite("inputs", x)
    if model is None or isinstance(inputs, Tensor):
        return x
    return x.to(next(model.parameters(), x) if known is None else known)


def _kept(mask: Vector | None, number: int) -> np.ndarray:
    if mask is None:
        return np.ones(number, bool)
    kept = to_array(mask)
    if kept.dtype != bool or kept.size != number:
        raise ValueError(f"expected a mask of {number} truth values, one an input; got {kept.dtype} of {kept.shape}.")
    if not kept.any():
        raise ValueError("the mask leaves no input to draw: it must be True in one or more.")
    return kept.reshape(-1)


def _grid(where: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
    """Return the coordinates of the grid that places are on, and the indices of each; None if they are not on one."""
    lines, indices = zip(*(np.unique(column, return_inverse=True) for column in where.T), strict=True)
    n_x, n_y = (len(line) for line in lines)
    if min(n_x, n_y) < 2 or len(where) < _FILLED * n_x * n_y:
        return None
    is_distinct = len(np.unique(indices[0] * n_y + indices[1])) == len(where)
    return (list(lines), list(indices)) if is_distinct else None


def _style(style: Any, where: np.ndarray, grid: Any) -> Style:
    """Return how to draw values at places."""
    if style not in (None, "image", "points", "triangles"):
        raise ValueError(f"style must be 'image', 'points' or 'triangles'; got {style!r}.")
    if style == "image" and grid is None:
        raise ValueError(
            "an image takes places on a rectangular grid, each once and a quarter of them at least, with two or more "
            "values of each coordinate; draw these with style='points' or 'triangles'."
        )
    if style == "triangles" and np.linalg.matrix_rank(where - where.mean(0)) < 2:
        raise ValueError("triangles take three places or more that are not on a line; draw these with style='points'.")
    if style is None:
        return "points" if grid is None else "image"
    return style


def _draw_cells(ax: Axes, grid: Any, kept: np.ndarray, values: np.ndarray, look: dict[str, Any]) -> Any:
    """Draw cells about places, with edges halfway between coordinates; those without a value are left white."""
    lines, (i, j) = grid
    cells = np.ma.masked_all([len(line) for line in reversed(lines)])
    cells[j[kept], i[kept]] = values
    middles = [(line[1:] + line[:-1]) / 2 for line in lines]
    edges = [np.r_[2 * a[0] - m[0], m, 2 * a[-1] - m[-1]] for a, m in zip(lines, middles, strict=True)]
    return ax.pcolormesh(*edges, cells, rasterized=True, **look)


def _look(kind: Kind, values: np.ndarray, midpoint: float | None, limits: tuple[float, float] | None) -> dict[str, Any]:
    """Return the colours of one kind of number and their range."""
    from matplotlib.colors import Normalize

    cmap, low, high = COLOR_MAPS[kind], float(values.min()), float(values.max())
    if kind == "exceedance":
        low, high = 0.0, 1.0
    elif kind == "sd":
        low = 0.0
    elif limits is not None:
        low, high = limits
    elif midpoint is not None:
        far = max(high - midpoint, midpoint - low)
        cmap, low, high = COLOR_MAPS["exceedance"], midpoint - far, midpoint + far
    if not high - low > 1e-9 * max(abs(low), abs(high)):  # a constant
        low, high = (0.0, 1.0) if kind == "sd" else (low - 0.5, high + 0.5)
    return {"cmap": cmap, "norm": Normalize(low, high)}


def _label(kind: Kind, name: str | None, threshold: float) -> str:
    if kind == "exceedance":
        return f"probability of exceeding {threshold:g}" if name is None else f"P({name} > {threshold:g})"
    if name is None:
        return {"mean": "mean", "sd": "standard deviation"}[kind]
    return f"{kind} of {name}"


def _panels(axes: Any, kinds: list[Kind], where: np.ndarray, aspect: float | str) -> list[Axes]:
    if axes is not None:
        panels = list(axes) if isinstance(axes, Sequence | np.ndarray) else [axes]
        if len(panels) != len(kinds):
            raise ValueError(f"expected axes for {len(kinds)} panels, {', '.join(kinds)}; got {len(panels)}.")
        return panels
    import matplotlib.pyplot as plt

    spans = np.ptp(where, 0)
    unit = 1.0 if isinstance(aspect, str) else aspect
    height = 0.8 if aspect == "auto" or not spans.all() else float(np.clip(unit * spans[1] / spans[0], 0.2, 2.0))
    rows, columns = (1, len(kinds)) if height > 0.6 else (len(kinds), 1)  # wide maps are above one another
    size = (4.6 if rows == 1 else 7.0) * columns, (3.6 if rows == 1 else 5.6) * height * rows + 0.6
    return list(plt.subplots(rows, columns, figsize=size, layout="compressed", squeeze=False)[1].flat)
