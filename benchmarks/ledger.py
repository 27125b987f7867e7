"""Rows of a benchmark that can be interrupted, as JSON lines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.augmented_svi import machine, package_versions

Row = dict[str, Any]


class Ledger:
    """Rows by their keys, as JSON lines, preceded by the machine and the package versions."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
        headers = [json.loads(line) for line in lines if line.startswith('{"machine"')]
        self.rows: dict[str, Row] = {row["key"]: row for row in map(json.loads, lines) if "key" in row}
        header = {"machine": machine(), "versions": package_versions()}
        if header not in headers:
            self._append(header)

    def get(self, key: str, make: Callable[[], Row]) -> Row:
        """Return the row of this key, measured now unless it exists."""
        if key not in self.rows:
            self.rows[key] = {"key": key, **make()}
            self._append(self.rows[key])
        return self.rows[key]

    def of(self, prefix: str) -> list[Row]:
        """Return the rows whose keys begin with this prefix."""
        return [row for key, row in self.rows.items() if key.startswith(prefix)]

    def _append(self, row: Mapping[str, Any]) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def command_line(doc: str | None, *, quick: str) -> argparse.ArgumentParser:
    """Return a parser of the options that these benchmarks share, to which each adds its own.

    Args:
        doc: of the benchmark; its first paragraph is the description.
        quick: what a quick run measures.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--output", type=Path, default=None, help="rows so far, to resume from")
    parser.add_argument("--report-only", action="store_true", help="print the tables of what is there")
    parser.add_argument("--threads", type=int, default=1)
    return parser


def measure_and_report(
    options: argparse.Namespace, run: Callable[[Ledger, argparse.Namespace], None], report: Callable[[Ledger], str]
) -> Ledger:
    """Measure the missing rows, unless only a report is asked for, print the tables, and return the rows.

    Args:
        options: with `threads`, `output` and `report_only`.
        run: measures the missing rows.
        report: returns the tables.
    """
    torch.set_num_threads(options.threads)
    ledger = Ledger(options.output)
    if not options.report_only:
        run(ledger, options)
    print(report(ledger))
    return ledger
