"""The tables and figures of :mod:`benchmarks.unbiased_cg`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib import ticker

from benchmarks.ledger import Ledger, Row
from benchmarks.tables import table


def report(ledger: Ledger) -> str:
    """Return all tables for which there are rows."""
    found = []
    if rows := ledger.of("conditioning/"):
        found.append(
            _by_condition(rows, "products (|s - s by Cholesky|)", lambda r: f"{r['products']} ({r['error']:.0e})")
        )
    if rows := ledger.of("estimator/"):
        found.append(_by_condition(rows, "expected products, sd shown, share never seen, log10 of Eq. 13", _estimator))
    if rows := ledger.of("schedules/"):
        found.append(
            table(
                ["noise", "preconditioned", "law", "q", "products", "truncation", "bias", "probes", "total"],
                [
                    [
                        f"{r['noise']:g}",
                        "yes" if r["preconditioned"] else "no",
                        r["law"],
                        f"{r['q']:g}",
                        f"{r['products']:.1f}",
                        *(f"{r[name]:.2e}" for name in ("truncation", "bias", "probes", "total")),
                    ]
                    for r in rows
                ],
            )
        )
        found.append(_envelope(rows))
    if rows := ledger.of("solution/"):
        found.append(
            table(
                ["noise", "condition", "q", "law", "products", "off by", "largest z", "never seen", "shows the mean"],
                [
                    [
                        f"{r['noise']:g}",
                        f"{r['condition']:.1e}",
                        f"{r['q']:g}",
                        r["law"] + (", preconditioned" if r["preconditioned"] else ""),
                        f"{r['products']:.1f}",
                        f"{100 * r['deviation']:.3g} %",
                        f"{r['z']:.3g}",
                        f"{100 * r['unseen']:.3g} %",
                        "yes" if r["shows_mean"] else "no",
                    ]
                    for r in rows
                ],
            )
        )
    if rows := ledger.of("gradient/"):
        found.append(
            table(
                ["rows", "method", "inv_quad", *rows[0]["names"], "off by"],
                [
                    [
                        str(r["rows"]),
                        r["method"],
                        f"{r['inv_quad_z']:.2f}",
                        *(f"{z:.2f}" for z in r["z"]),
                        f"{100 * r['deviation']:.2g} %",
                    ]
                    for r in rows
                ],
            )
        )
    if rows := ledger.of("preconditioner/"):
        found.append(
            table(
                [
                    *(
                        "inputs",
                        "d",
                        "kernel",
                        "l",
                        "noise",
                        "n",
                        "plain, products",
                        "s",
                        "preconditioner",
                        "rank",
                        "products",
                    ),
                    *("construction, s", "s in all", "ratio of products", "of seconds", "of the processor's"),
                ],
                [
                    [
                        r["inputs"],
                        str(r["dimension"]),
                        r["kernel"],
                        f"{r['lengthscale']:g}",
                        f"{r['noise']:g}",
                        str(r["n"]),
                        str(r["plain"]),
                        f"{r['plain_seconds'][0]:.1f}",
                        r["preconditioner"],
                        str(r["rank"]),
                        str(r["products"]),
                        f"{r['build_seconds'][0]:.2f}",
                        f"{r['seconds'][0]:.2f}",
                        f"{r['products'] / r['plain']:.3f}",
                        *(f"{a / b:.3f}" for a, b in zip(r["seconds"], r["plain_seconds"], strict=True)),
                    ]
                    for r in rows
                ],
            )
        )
    if rows := ledger.of("keeping/"):
        found.append(
            table(
                ["rows", "preconditioner", "ms a gradient"],
                [[str(r["rows"]), r["method"], f"{1e3 * r['seconds']:.0f}"] for r in rows],
            )
        )
    return "\n\n".join(found)


def _by_condition(rows: Sequence[Row], title: str, cell) -> str:
    """Return a table with a row per method and a column per condition number."""
    conditions = sorted({r["condition"] for r in rows})
    methods = list(dict.fromkeys(r["method"] for r in rows))
    by_key = {(r["method"], r["condition"]): r for r in rows}
    body = [
        [method, *(cell(by_key[method, c]) if (method, c) in by_key else "" for c in conditions)] for method in methods
    ]
    return f"{title}, by condition number:\n\n" + table(["method", *(f"{c:.1e}" for c in conditions)], body)


def _envelope(rows: Sequence[Row]) -> str:
    """Return the default's errors over those of other laws at equal products, interpolated between their points."""
    body = []
    for row in (r for r in rows if r["law"] == "default"):
        same = [r for r in rows if all(r[k] == row[k] for k in ("noise", "preconditioned")) and r["law"] != "default"]
        cells = []
        for name, is_wanted in (("truncation", _is_unbiased), ("total", _is_unbiased), ("total", _is_stopped)):
            found = {
                law: _between([r for r in same if r["law"] == law], row["products"], name)
                for law in dict.fromkeys(r["law"] for r in same)
                if is_wanted(law)
            }
            found = {law: error for law, error in found.items() if error < np.inf}
            best = min(found, key=lambda law, f=found: f[law], default=None)
            cells.append("" if best is None else f"{row[name] / found[best]:.2f} ({best})")
        about = [f"{row['noise']:g}", "yes" if row["preconditioned"] else "no", f"{row['q']:g}"]
        body.append([*about, f"{row['products']:.1f}", f"{row['total']:.2e}", *cells])
    return "The default's error over the least of the others at as many products, by interpolation over q:\n\n" + table(
        ["noise", "preconditioned", "q", "products", "total", "truncation", "total", "total, early stopping"], body
    )


def _is_unbiased(law: str) -> bool:
    return law != "early stopping" and not law.endswith("seen")


def _is_stopped(law: str) -> bool:
    return law == "early stopping"


def _between(rows: Sequence[Row], products: float, name: str) -> float:
    """Return the error of a law at this number of products, infinite outside the measured range."""
    points = sorted((r["products"], r[name]) for r in rows if 0 < r[name] < np.inf)
    if not points or not points[0][0] <= products <= points[-1][0]:
        return np.inf
    x, y = zip(*points, strict=True)
    return float(np.exp(np.interp(products, x, np.log(y))))


def _estimator(row: Row) -> str:
    if "products" not in row:
        return f"{row['log10_error']:.2f}"
    return f"{row['products']:.0f}, {row['sd']:.0e}, {100 * row['unseen']:.2g} %, {row['log10_error']:.2f}"


def figures(ledger: Ledger, folder: Path) -> None:
    """Draw the figures for which there are rows: against the condition number, and against products."""
    folder.mkdir(parents=True, exist_ok=True)
    if ledger.of("conditioning/") and ledger.of("estimator/"):
        _conditioning(ledger, folder / "unbiased_cg_conditioning.png")
    if ledger.of("schedules/"):
        _schedules(ledger, folder / "unbiased_cg_schedules.png")


def _conditioning(ledger: Ledger, path: Path) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    panels = (
        (axes[0, 0], "conditioning/", "products", "products, to 1e-8"),
        (axes[1, 0], "conditioning/", "error", "|s - s by Cholesky|"),
        (axes[0, 1], "estimator/", "products", "expected products"),
        (axes[1, 1], "estimator/", "sd", "sd of the solution, as 4000 draws show it"),
        (axes[0, 2], "estimator/", "unseen", "share of the solution never seen"),
        (axes[1, 2], "estimator/", "log10_error", "log10 relative squared error of gradients"),
    )
    for axis, prefix, name, title in panels:
        rows = [r for r in ledger.of(prefix) if name in r]
        for method in dict.fromkeys(r["method"] for r in rows):
            points = sorted((r["condition"], r[name]) for r in rows if r["method"] == method)
            axis.plot(*zip(*points, strict=True), marker=".", lw=1, label=method)
        axis.set_xscale("log")
        if name != "log10_error":
            axis.set_yscale("log")
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("condition number", fontsize=8)
        axis.legend(fontsize=6)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _schedules(ledger: Ledger, path: Path) -> None:
    rows = ledger.of("schedules/")
    cases = list(dict.fromkeys((r["noise"], r["preconditioned"]) for r in rows))
    laws = list(dict.fromkeys(r["law"] for r in rows))
    figure, axes = plt.subplots(2, len(cases), figsize=(3.6 * len(cases), 6.5), layout="constrained", squeeze=False)
    for column, case in enumerate(cases):
        for axis, name in ((axes[0, column], "truncation"), (axes[1, column], "total")):
            for index, law in enumerate(laws):
                mine = [r for r in rows if (r["noise"], r["preconditioned"], r["law"]) == (*case, law)]
                points = sorted((r["products"], max(r[name], r["bias"])) for r in mine)  # truncation excludes the bias
                points = [point for point in points if point[1] < 10]
                if points:
                    style = {"lw": 2.5, "c": "black"} if law == "default" else {"lw": 0.8, "c": plt.cm.tab20(index)}
                    axis.plot(*zip(*points, strict=True), marker=".", label=law, **style)
            axis.set_yscale("log")
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter(ticker.NullFormatter())
            axis.set_title(
                f"noise {case[0]:g}, {'preconditioned' if case[1] else 'plain'}: "
                + ("truncation and bias" if name == "truncation" else "with the probes"),
                fontsize=9,
            )
            axis.set_xlabel("expected products a gradient", fontsize=8)
    axes[0, 0].set_ylabel("relative error of the mean of 100 gradients", fontsize=8)
    handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), fontsize=7, loc="outside right center")
    figure.savefig(path, dpi=80)
    plt.close(figure)
