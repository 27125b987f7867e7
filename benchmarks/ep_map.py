"""The map of lengthscale by magnitude: settings, the stage that converged at each, and the figure [JVV11 Fig. 4]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from benchmarks.ep_problems import EXAMPLES, Example

AROUND = (np.exp(0.75), np.exp(1.5))  # log l^2 within 1.5 of the best, log m^2 within 3
FAR = ((0.3, 5.0), (0.14, 20.0))
KINDS = {
    "from a neighbour": "#f4f4ec",
    "from half-way": "#cfe3c4",
    "sweeps": "#dbe9f6",
    "second-order steps": "#7fb2dd",
    "from CAVI's sites": "#1f6fb0",
    "from a wider likelihood": "#0b3c6b",
    "up from a lower power": "#7b5ea7",
    "power in [0.5, 1)": "#f6b26b",
    "power below 0.5": "#c0392b",
    "not matched": "#000000",
}
MATCHED = 1e-4
TITLES = {"map/near": ", each setting from cold", "map/far": ", a larger region", "walk/near": ", from its neighbour"}
TICKS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
DEPTHS = (1, 3, 10, 20, 30, 50)


def grid(example: Example, region: str, side: int) -> list[tuple[int, int, float, float]]:
    """Return (i, j, lengthscale, magnitude), evenly spaced in the logarithms; the best setting if there is but one."""
    centre = (example.lengthscale, example.magnitude)
    if region == "near":
        ends = [(middle / factor, middle * factor) for middle, factor in zip(centre, AROUND, strict=True)]
    else:
        ends = list(FAR)
    if side == 1:
        return [(0, 0, *centre)]
    first, second = (np.geomspace(*pair, side).tolist() for pair in ends)
    return [(i, j, a, b) for i, a in enumerate(first) for j, b in enumerate(second)]


def stage_of(message: str) -> str:
    """Return the last way in that a result's message tells of."""
    for part, name in (
        ("up from power", "up from a lower power"),
        ("from wider", "from a wider likelihood"),
        ("steps of CAVI", "from CAVI's sites"),
        ("second-order steps", "second-order steps"),
        ("sweeps", "sweeps"),
        ("from an earlier result", "from a neighbour"),
    ):
        if part in message:
            return name
    return "sweeps"


def is_matched(row: Mapping[str, Any]) -> bool:
    """Whether moments match at the power that a row states, whatever its status says."""
    return row["finite"] and row["residual"] < MATCHED


def kind_of(row: Mapping[str, Any]) -> str:
    """Return the colour's name of a row of the map."""
    if not is_matched(row):
        return "not matched"
    if row["power"] == 1:
        return row["stage"]
    return "power in [0.5, 1)" if row["power"] >= 0.5 else "power below 0.5"


def draw_map(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw contours of the evidence over the stage that converged, a panel for each example and region, and save it."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    regions = [r for r in ("map/near", "map/far", "walk/near") if any(row["key"].startswith(r) for row in rows)]
    figure, axes = plt.subplots(len(regions), 2, figsize=(11, 4.6 * len(regions)), layout="constrained", squeeze=False)
    names, seen = list(KINDS), set()
    for ax, (region, number) in zip(axes.flat, ((r, n) for r in regions for n in EXAMPLES), strict=True):
        found = [row for row in rows if row["key"].startswith(f"{region}/{number}/")]
        side = round(len(found) ** 0.5)
        kinds, evidence = np.zeros((side, side), int), np.full((side, side), np.nan)
        x, y = np.zeros(side), np.zeros(side)
        for row in found:
            i, j = row["at"]
            kinds[j, i], x[i], y[j] = names.index(kind_of(row)), row["lengthscale"], row["magnitude"]
            if kind_of(row) != "not matched":
                evidence[j, i] = row["evidence"]
        seen |= {names[k] for k in np.unique(kinds)}
        ax.pcolormesh(
            x, y, kinds, cmap=ListedColormap(list(KINDS.values())), vmin=-0.5, vmax=len(KINDS) - 0.5, rasterized=True
        )
        best = np.nanmax(evidence)
        top = np.unravel_index(np.nanargmax(evidence), evidence.shape)
        lines = ax.contour(
            x, y, evidence, levels=sorted(best - d for d in DEPTHS), colors="black", linewidths=0.8, linestyles="-"
        )
        ax.clabel(lines, fmt=lambda level, best=best: f"{level - best:.0f}", fontsize=7)
        ax.plot(x[top[1]], y[top[0]], "x", color="black", markersize=9, markeredgewidth=2)
        ax.set(xscale="log", yscale="log", xlabel="lengthscale", ylabel="magnitude")
        for axis, ends in ((ax.xaxis, x), (ax.yaxis, y)):
            ticks = [tick for tick in TICKS if ends.min() <= tick <= ends.max()]
            axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.minorticks_off()
        ax.set_title(f"example {number}" + TITLES[region])
    figure.legend(
        handles=[
            Patch(facecolor=color, edgecolor="#888888", label=name) for name, color in KINDS.items() if name in seen
        ],
        loc="outside lower center",
        ncols=3,
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
