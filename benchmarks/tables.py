"""Markdown tables of benchmark results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a markdown table of rows that have the same keys."""

    def show(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    keys = list(rows[0])
    return table(keys, [[show(row.get(key, "")) for key in keys] for row in rows])


AGAINST = ("mean", "sd", "error of the mean / sd", "ratio of sds")


def against(row: Mapping[str, Any], reference: Mapping[str, Any] | None, j: int) -> list[str]:
    """Return the cells of `AGAINST` for parameter j: moments of its draws, and differences from the reference's.

    Args:
        row: with "mean", "sd" and their Monte Carlo errors, "mcse" and "mcse_sd", by parameter.
        reference: a row of the same form; None for the reference itself.
        j: index of the parameter.
    """
    mean, sd = row["mean"][j], row["sd"][j]
    cells = [f"{mean:.4f}", f"{sd:.4f}"]
    if reference is None:
        return [*cells, "", ""]
    unit = reference["sd"][j]
    error = np.hypot(row["mcse"][j], reference["mcse"][j]) / unit
    spread = sd / unit * np.hypot(row["mcse_sd"][j] / sd, reference["mcse_sd"][j] / unit)
    return [*cells, f"{(mean - reference['mean'][j]) / unit:+.3f} +- {error:.3f}", f"{sd / unit:.3f} +- {spread:.3f}"]
