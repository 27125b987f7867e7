"""The tables of `benchmarks.ep_convergence`: how the problems ended, and whether the results state it correctly."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from benchmarks.ep_map import KINDS, is_matched, kind_of
from benchmarks.ep_problems import EXAMPLES, FAMILIES
from benchmarks.ledger import Ledger, Row
from benchmarks.tables import table_of
from gpext.inference import Status

COUNTED = ("looks", "second_order", "along", "derivatives")  # the counts in a row


def honest(row: Row) -> bool:
    """Return whether the status agrees with the residual."""
    says = {"CONVERGED": row.get("power") == 1, "REDUCED_POWER": row.get("power", 1) < 1}
    return is_matched(row) and says[row["status"]] if row["status"] in says else row["status"] in Status.__members__


def factorisations(row: Row) -> int:
    """Return the operations in Cholesky factorisations of an N by N matrix, n^3 / 3.

    An evaluation has 3: its own factorisation, one for the variances, and at most one for up to N / 6 sites of negative
    precision. A second-order step also computes V, 9, three products for the normal equations in 2 N unknowns, 18, and
    factorises these, 8. A step along a branch computes V from the inverse of the factor, 2, and for up to N / 6 sites
    that are not positive, 2, one product, 6, and the LU factorisation of the derivatives with half of the unknowns
    eliminated, 2; so do derivatives next to an earlier result.
    """
    return 3 * row["looks"] + 35 * row["second_order"] + 12 * (row["along"] + row.get("derivatives", 0))


def summary(name: str, rows: Sequence[Row]) -> Row:
    """Return one line of the table: a summary of how some problems ended."""
    one = [row for row in rows if is_matched(row) and row["power"] == 1]
    any_power = [row for row in rows if is_matched(row)]
    looks = [row["looks"] for row in rows if "looks" in row]
    worst = max((row["residual"] for row in any_power), default=math.nan)
    return {
        "problems": name,
        "n": len(rows),
        "finite": sum(row["finite"] for row in rows),
        "honest": sum(honest(row) for row in rows),
        "matched": _percent(len(any_power), len(rows)),
        "at power 1": _percent(len(one), len(rows)),
        "median evaluations": f"{statistics.median(looks):g}",
        "90 %": f"{sorted(looks)[int(0.9 * len(looks))]:g}",
        "median operations": f"{statistics.median(factorisations(row) for row in rows if 'looks' in row):g}",
        "median seconds": f"{statistics.median(row['seconds'] for row in rows if 'seconds' in row):.3f}",
        "largest residual": f"{worst:.0e}",
    }


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %"


def report_random(ledger: Ledger) -> str:
    rows = {family: ledger.of(f"random/{family}/") for family in FAMILIES}
    lines = [summary(family, found) for family, found in rows.items() if found]
    failures = [row for found in rows.values() for row in found if not is_matched(row) or not honest(row)]
    listed = [
        f"    {row['key']}: {row['status']}, residual {row['residual']:.0e}; {row['message']}" for row in failures
    ]
    return "\n".join([table_of(lines), "", f"not matched, or not honest: {len(failures)}", *listed])


def report_map(ledger: Ledger) -> str:
    lines, stages = [], []
    for region in ("near", "far"):
        for number in EXAMPLES:
            rows = ledger.of(f"map/{region}/{number}/")
            if not rows:
                continue
            best = max(row["evidence"] for row in rows if is_matched(row) and row["power"] == 1)
            name = f"example {number}, {region}"
            lines.append(summary(name, rows))
            for depth in (10, 30):
                close = [row for row in rows if row.get("evidence", -math.inf) > best - depth]
                lines.append(summary(f"... evidence within {depth}", close))
            counts = Counter(kind_of(row) for row in rows)
            stages.append(f"* {name}: " + ", ".join(f"{kind} {counts[kind]}" for kind in KINDS if counts[kind]))
    return "\n".join([table_of(lines), "", *stages])


def report_ais(ledger: Ledger) -> str:
    parts = []
    for number in EXAMPLES:
        rows = ledger.of(f"ais/{number}/")
        names = {"one": "EP", "half": "EP, power 0.5", "KL": "KL", "Laplace": "Laplace"}
        lines = [
            {
                "lengthscale": f"{row['lengthscale']:.2f}",
                "magnitude": f"{row['magnitude']:.2f}",
                "AIS": f"{row['ais']:.2f}",
                "(+-)": f"{row['error']:.2f}",
                **{title: f"{row[name] - row['ais']:+.2f}" for name, title in names.items()},
                "powers": f"{row['one_power']:.2g}, {row['half_power']:.2g}",
            }
            for row in sorted(rows, key=lambda row: -row["ais"])
        ]
        errors = {title: statistics.fmean(abs(row[name] - row["ais"]) for row in rows) for name, title in names.items()}
        mean = ", ".join(f"{title} {error:.2f}" for title, error in errors.items())
        parts.append(f"Example {number}\n\n{table_of(lines)}\n\nmean absolute error: {mean}")
    return "\n\n".join(parts)


def report_standard(ledger: Ledger) -> str:
    parts = []
    for number in EXAMPLES:
        best = ledger.rows[f"standard/{number}/1/0/0"]
        rows = ledger.of(f"standard/{number}/8/") or [best]
        lines = []
        for name in (key for key, value in best.items() if isinstance(value, list)):
            found = [row[name] for row in rows]
            sweeps = [count for outcome, count in found if outcome == "converged"]
            lines.append(
                {
                    "method": name,
                    "converged": f"{len(sweeps)} of {len(rows)}",
                    "median sweeps": f"{statistics.median(sweeps):g}" if sweeps else "",
                    "improper": sum(outcome == "improper" for outcome, _ in found),
                    "at the best setting": f"{best[name][0]}, {best[name][1]}",
                }
            )
        parts.append(f"Example {number}\n\n{table_of(lines)}")
    return "\n\n".join(parts)


def report_speed(ledger: Ledger) -> str:
    lines = []
    for deg_free in sorted({row["deg_free"] for row in ledger.of("speed/")}):
        rows = [row for row in ledger.of("speed/") if row["deg_free"] == deg_free]
        ratios = sorted(row["ratio"] for row in rows)
        median = statistics.median(ratios)
        lines.append(
            {
                "nu": f"{deg_free:g}",
                "status": rows[0]["status"],
                "evaluations": rows[0]["looks"],
                "negative sites": rows[0]["negative"],
                "seconds": f"{statistics.median(row['seconds'] for row in rows):.2f}",
                "over its Cholesky factorisations": f"{median:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            }
        )
    return table_of(lines)
