"""Angles: headings of triangles [Cha13 Sec. 4.2], and directions of the wind.

headings  A trial has a triangle, three points of N(0, I) in the plane, with a heading uniform on the circle. A datum
          is the triangle rotated by a uniform angle, its points with noise of sd 0.1 in a fixed order, and the heading
          after the rotation. 50 trials of 100 test triangles; the training sets of a trial are nested. Kernels are
          linear and RBF, the von Mises means zero, and the direction predicted is the circular mean. The paper's text
          does not give the training sizes of its figure; these are ours.
wind      Col de la Roa (310 data, by time), Texas (1752, by time and hour; 300 for training), JFK airport (8342, by
          season, hour and weather; 300 for training), each in 10 folds. All methods have Matern-3/2 kernels with a
          length scale for every feature, constant means, and three starts, from long to very short length scales.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import torch
from scipy import stats
from torch import Tensor
from tqdm import tqdm

from benchmarks.angle_methods import (
    BY_KERNEL,
    WITHOUT_KERNEL,
    Method,
    Prediction,
    Starts,
    absolute_error,
    constant,
    linear,
    matern,
    on_the_angle,
    on_the_coordinates,
    rbf,
    von_mises,
)
from benchmarks.datasets import Dataset, load
from benchmarks.ledger import Ledger, Row
from gpext.inference import Laplace, Taylor
from gpext.plots import COLORS, GREY, MARKERS

SIZES = (4, 8, 12, 16, 24, 32, 48)
TRIALS, TESTS, NOISE = 50, 100, 0.1
HEADING_KERNELS: dict[str, Starts] = {"linear": (linear,), "RBF": (rbf,)}
PAIRS = (
    ("VM Laplace", "GP angle"),
    ("VM Taylor", "GP angle"),
    ("VM Laplace", "NN"),
    ("VM Taylor", "NN"),
    ("VM Laplace", "GP products"),
    ("VM Laplace", "GP (cos, sin)"),
    ("VM Taylor", "VM Laplace"),
)
WINDS = {"wind_col_de_la_roa": 300, "wind_texas": 300, "wind_jfk": 300}  # maximum number of training data
WIND_KERNEL: Starts = [partial(matern, length=length) for length in (1.0, 0.1, 0.01)]
FOLDS = 10
WIND_METHODS: dict[str, Method] = {
    "VM Laplace": partial(von_mises, rule=Laplace(), has_mean=True),
    "VM Taylor": partial(von_mises, rule=Taylor(), has_mean=True),
    "GP angle, wrapped": on_the_angle,
    "GP (cos, sin), projected": on_the_coordinates,
    "constant von Mises": lambda data, _: constant(data),
}


def triangles(trial: int, *, num_train: int, num_test: int = TESTS) -> Dataset:
    """Draw a triangle and its rotated, noisy copies; smaller training sets are the first part of larger ones."""
    generator = torch.Generator().manual_seed(trial)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def angles(size: int) -> Tensor:
        return math.pi * (2 * torch.rand(size, generator=generator, dtype=torch.float64) - 1)

    corners, heading = torch.view_as_complex(normal(3, 2)), angles(1)

    def observe(size: int) -> tuple[Tensor, Tensor]:
        turn = angles(size)
        points = torch.polar(torch.ones_like(turn), turn).unsqueeze(-1) * corners
        seen = torch.view_as_real(points) + NOISE * normal(size, 3, 2)
        return seen.flatten(1), torch.remainder(heading + turn + math.pi, 2 * math.pi) - math.pi

    test_x, test_y = observe(num_test)
    train_x, train_y = observe(max(SIZES))
    return Dataset("headings", "angles", train_x[:num_train], train_y[:num_train], test_x, test_y, 0.0, 1.0)


def run_headings(ledger: Ledger, options: argparse.Namespace) -> None:
    """Run every method on every trial, with a row for each size and trial."""
    sizes, trials, tests = ((4,), 2, 5) if options.quick else (SIZES, TRIALS, TESTS)
    for trial in tqdm(range(trials), desc="headings", disable=None):
        for size in sizes:

            def measure(trial: int = trial, size: int = size) -> Row:
                data = triangles(trial, num_train=size, num_test=tests)
                row: Row = {"size": size, "trial": trial, "error": {}, "density": {}, "seconds": {}, "stopped": []}
                for name, method in BY_KERNEL.items():
                    for kernel, starts in HEADING_KERNELS.items():
                        _record(row, f"{name}/{kernel}", method(data, starts), data)
                for name, plain in WITHOUT_KERNEL.items():
                    _record(row, f"{name}/", plain(data), data)
                return row

            ledger.get(f"headings/{tests}/{size}/{trial}", measure)


def _record(row: Row, name: str, found: Prediction, data: Dataset) -> None:
    row["error"][name] = absolute_error(found.direction, data.test_y).mean().item()
    row["seconds"][name] = found.seconds
    if found.log_density is not None:
        row["density"][name] = found.log_density.mean().item()
    if not found.converged:
        row["stopped"].append(name)


def run_wind(ledger: Ledger, options: argparse.Namespace) -> None:
    """Run every method on every fold of every set."""
    winds = {"synthetic_angles": 12} if options.quick else WINDS
    starts = WIND_KERNEL[:1] if options.quick else WIND_KERNEL
    for name, most in winds.items():
        for fold in tqdm(range(2 if options.quick else FOLDS), desc=name, disable=None):
            data = load(name, fold=(fold, FOLDS), max_train=most)
            for method, run in WIND_METHODS.items():
                about: Row = {"dataset": name, "fold": fold, "method": method}

                def measure(data: Dataset = data, about: Row = about, run: Method = run) -> Row:
                    found = run(data, starts)
                    assert found.log_density is not None
                    return about | {
                        "size": len(data.train_y),
                        "tests": len(data.test_y),
                        "error": absolute_error(found.direction, data.test_y).mean().item(),
                        "density": found.log_density.mean().item(),
                        "seconds": found.seconds,
                        "converged": found.converged,
                    }

                ledger.get(f"wind/{name}/{fold}/{method}", measure)


Errors = dict[str, np.ndarray]


def best_errors(rows: Sequence[Row]) -> tuple[Errors, dict[str, str]]:
    """Return, for rows of one size, each method's errors (trials,) with its better kernel, and that kernel."""
    errors: Errors = {}
    kernels: dict[str, str] = {}
    for name in rows[0]["error"]:
        method, kernel = name.split("/")
        found = np.array([row["error"][name] for row in rows])
        if method not in errors or found.mean() < errors[method].mean():
            errors[method], kernels[method] = found, kernel
    return errors, kernels


def by_size(ledger: Ledger) -> dict[int, list[Row]]:
    """Return the rows of the headings."""
    rows = ledger.of("headings/")
    return {size: [row for row in rows if row["size"] == size] for size in sorted({row["size"] for row in rows})}


def report_headings(ledger: Ledger) -> str:
    """Return the tables of errors, of tests, and of densities and times."""
    groups = {size: best_errors(rows) for size, rows in by_size(ledger).items()}
    methods = list(next(iter(groups.values()))[0])
    lines = [
        "Mean absolute error in radians with its standard error over the trials; with the better kernel, l or R.",
        "",
        *_head("N", methods),
    ]
    for size, (errors, kernels) in groups.items():
        cells = [f"{_with_error(errors[name])} {kernels[name][:1]}".rstrip() for name in methods]
        lines.append(f"| {size} | {' | '.join(cells)} |")
    lines += ["", "Paired t-tests over the trials: difference of the errors, first minus second, and p."]
    lines += ["", *_head("N", [" - ".join(pair) for pair in PAIRS])]
    for size, (errors, _) in groups.items():
        tests = [
            f"{(errors[a] - errors[b]).mean():+.4f}, {stats.ttest_rel(errors[a], errors[b]).pvalue:.1e}"
            for a, b in PAIRS
        ]
        lines.append(f"| {size} | {' | '.join(tests)} |")
    lines += ["", "Mean log density of the test angles, and seconds of training, by kernel.", ""]
    every = [f"{method}/{kernel}" for method in BY_KERNEL for kernel in HEADING_KERNELS]
    lines += _head("N", every)
    for size, rows in by_size(ledger).items():
        cells = []
        for name in every:
            seconds = np.mean([row["seconds"][name] for row in rows])
            density = [row["density"][name] for row in rows if name in row["density"]]
            cells.append(f"{np.mean(density):.2f}, {seconds:.2f}" if density else f"-, {seconds:.2f}")
        lines.append(f"| {size} | {' | '.join(cells)} |")
    stopped = [name for rows in by_size(ledger).values() for row in rows for name in row["stopped"]]
    counts = ", ".join(f"{name} {stopped.count(name)}" for name in every if name in stopped)
    return "\n".join([*lines, "", f"Trainings that did not end as converged: {counts or 'none'}."])


def draw_headings(ledger: Ledger, path: Path) -> None:
    """Draw the errors against the training size, with standard errors, and save the figure."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = {size: best_errors(rows)[0] for size, rows in by_size(ledger).items()}
    sizes = list(groups)
    figure, ax = plt.subplots(figsize=(7.4, 4.2), layout="constrained")
    for i, name in enumerate(next(iter(groups.values()))):
        values = [errors[name] for errors in groups.values()]
        means, deviations = [v.mean() for v in values], [v.std(ddof=1) / math.sqrt(len(v)) for v in values]
        style = {"color": (*COLORS, GREY)[i], "marker": (*MARKERS, "x")[i], "capsize": 2}
        ax.errorbar(sizes, means, deviations, label=name, **style)
    ax.set(xscale="log", yscale="log", xlabel="training triangles", ylabel="mean absolute error, radians")
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.minorticks_off()
    figure.legend(loc="outside right upper", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def report_wind(ledger: Ledger) -> str:
    """Return the scores of every method on the held-out directions, and their differences from the first."""
    rows = ledger.of("wind/")
    lines = []
    first = next(iter(WIND_METHODS))
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        of_set = [row for row in rows if row["dataset"] == dataset]
        found = {
            name: sorted((r for r in of_set if r["method"] == name), key=lambda r: r["fold"]) for name in WIND_METHODS
        }
        sizes, tests = ({row[key] for row in of_set} for key in ("size", "tests"))
        lines += [f"### {dataset}: {_span(sizes)} for training, {_span(tests)} for tests", ""]
        lines += _head(
            "method",
            ["log density", f"minus {first}", "error, radians", f"minus {first}", "seconds", "not converged"],
        )
        for name, folds in found.items():
            cells = []
            for key in ("density", "error"):
                values, base = (np.array([row[key] for row in group]) for group in (folds, found[first]))
                cells += [f"{values.mean():.3f}", "" if name == first else _with_error(values - base, sign="+")]
            seconds = np.mean([row["seconds"] for row in folds])
            cells += [f"{seconds:.1f}", str(sum(not row["converged"] for row in folds))]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _head(first: str, names: Sequence[str]) -> list[str]:
    return [f"| {first} | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]


def _with_error(values: np.ndarray, sign: str = "") -> str:
    return f"{values.mean():{sign}.3f} ({values.std(ddof=1) / math.sqrt(len(values)):.3f})"


def _span(sizes: set[int]) -> str:
    return f"{min(sizes)}" if len(sizes) == 1 else f"{min(sizes)} or {max(sizes)}"
