"""The tables and the critical-difference figure of benchmarks/estimators."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.estimators import CLASSES, NUMBERS
from benchmarks.tables import table
from gpext.plots.style import BLUE, GREY

Scores = dict[str, dict[str, dict[int, dict[str, float]]]]  # by set, method and fold


def read_scores(path: Path, methods: Sequence[str]) -> Scores:
    """Return the runs of these methods in a ledger that ended with finite numbers."""
    scores: Scores = defaultdict(lambda: defaultdict(dict))
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["method"] in methods and np.isfinite(row.get("log_density", np.nan)):
            scores[row["set"]][row["method"]][row["fold"]] = row
    return scores


def means(scores: Scores, name: str, column: str) -> dict[str, tuple[float, float]]:
    """Return by method the mean of a column over the folds that all of a set's methods have, and its standard error."""
    by_method = scores[name]
    folds = set.intersection(*(set(each) for each in by_method.values()))
    found = {}
    for method, each in by_method.items():
        values = np.array([each[fold][column] for fold in sorted(folds)])
        if len(values):
            error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
            found[method] = float(values.mean()), error
    return found


def ranks(scores: Scores, sets: Sequence[str], methods: Sequence[str]) -> np.ndarray:
    """Return the ranks (S, M) of methods by log density, 1 the best, on the sets that all of them have."""
    rows = []
    for name in sets:
        found = means(scores, name, "log_density")
        if all(method in found for method in methods):
            values = np.array([found[method][0] for method in methods])
            rows.append(1 + np.argsort(np.argsort(-values)))
    return np.array(rows, float).reshape(-1, len(methods))


def report(path: Path, methods: Sequence[str]) -> str:
    """Return the tables of log densities, errors, calibration and seconds of methods, gpext the first, and their ranks.

    A number is the mean over the folds that all of the methods with any run on a set have.
    """
    scores = read_scores(path, methods)
    parts = []
    for title, column, digits in (
        ("Log density", "log_density", 3),
        ("Error (share of errors, or root mean squared error)", "error", 3),
        ("Calibration (expected calibration error, or share in 90 % intervals)", "calibration", 3),
        ("CPU seconds", "cpu_seconds", 1),
    ):
        rows = []
        for name in (*CLASSES, *NUMBERS):
            if name not in scores:
                continue
            found = means(scores, name, column)
            best = max(found, key=lambda method: found[method][0]) if column == "log_density" and found else ""
            cells = []
            for method in methods:
                if method not in found:
                    cells.append("")
                    continue
                shown = f"{found[method][0]:.{digits}f}"
                cells.append(f"**{shown}**" if method == best else shown)
            rows.append([name, *cells])
        parts.append(f"### {title}\n\n" + table(["set", *methods], rows))
    rows = []
    for title, sets in (("classification", [*CLASSES]), ("regression", [*NUMBERS]), ("all", [*CLASSES, *NUMBERS])):
        found = ranks(scores, [name for name in sets if name in scores], methods)
        if len(found):
            last = str(int((found[:, 0] == len(methods)).sum()))
            rows.append([title, str(len(found)), *(f"{value:.2f}" for value in found.mean(0)), last])
    parts.append("### Mean ranks by log density\n\n" + table(["sets", "number", *methods, "gpext last"], rows))
    return "\n".join(parts)


def draw(path: Path, figure_path: Path, methods: Sequence[str]) -> None:
    """Draw mean ranks, methods joined that differ by less than the critical difference of Nemenyi's test at 5 %."""
    from scipy.stats import studentized_range

    scores = read_scores(path, methods)
    found = ranks(scores, [name for name in (*CLASSES, *NUMBERS) if name in scores], methods)
    count, mean = len(methods), found.mean(0)
    critical = studentized_range.ppf(0.95, count, np.inf) / np.sqrt(2) * np.sqrt(count * (count + 1) / (6 * len(found)))
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    ax = figure.add_subplot()
    order = np.argsort(mean)
    for place, index in enumerate(order):
        ax.plot([mean[index]] * 2, [0, -1 - place], color=GREY, linewidth=0.8)
        ax.plot(mean[index], 0, "o", color=BLUE)
        ax.annotate(
            f"{methods[index]}  {mean[index]:.2f}",
            (mean[index], -1 - place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    for place, index in enumerate(order):
        near = [other for other in order[place:] if mean[other] - mean[index] < critical]
        if len(near) > 1:
            ax.plot([mean[near[0]], mean[near[-1]]], [0.6 + 0.35 * place] * 2, color="black", linewidth=2.5)
    ax.set(xlim=(1, count + 0.8), ylim=(-count - 0.8, 0.6 + 0.4 * count), yticks=[], xlabel="")
    ax.xaxis.set_ticks_position("top")
    ax.set_title(f"Mean rank by log density on {len(found)} sets; bars: no difference (Nemenyi, 5 %)", fontsize=10)
    ax.spines[["left", "right", "bottom"]].set_visible(False)
    figure.savefig(figure_path, dpi=150)
