"""The laws on a GPU, and a table of times compared with gpytorch and KeOps, and with the card's own limits.

    python -m benchmarks.gpu --output gpu.jsonl                # on a card; under ten minutes in all
    python -m benchmarks.gpu --device cpu --output cpu.jsonl   # rehearsal: smaller sizes, laws on a simulated device
    python -m benchmarks.gpu --device cpu --quick              # seconds

Jobs (:mod:`benchmarks.gpu_jobs`) run in separate processes, each for a bounded time, and the laws in the remaining
time. A row that fails states why, and the other rows continue. With `--output` rows are written as they are finished:
the same command resumes after the last one, and repeats those that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_laws
from benchmarks.augmented_svi import machine
from benchmarks.bounded import ended
from benchmarks.device_times import said
from benchmarks.gpu_jobs import JOBS, LIMITS, OURS, SIZES, measure
from benchmarks.ledger import Ledger, Row, measure_and_report
from benchmarks.tables import table

_LEAST = 5.0  # seconds; nothing is started with less time left
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes in this process, without KeOps and without laws"
    )
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--no-laws", action="store_true", help="jobs alone")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--most-seconds", type=float, default=60.0, help="for the process of one row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--report-only", action="store_true", help="run nothing; print the table of what is there")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not options.report_only and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here. The rehearsal without one is --device cpu.")
    return options


def name_of(device: str) -> str:
    """Return the name of the card or the processor."""
    return torch.cuda.get_device_name() if device == "cuda" else machine()["cpu"]


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure the missing rows, the limits first, and the laws at the end."""
    sizes = "quick" if options.quick else "gpu" if options.device == "cuda" else "cpu"
    begun, card = time.perf_counter(), name_of(options.device)

    def left() -> float:
        return options.budget - (time.perf_counter() - begun)

    def row(name: str) -> Row:
        about = {"name": name, "device": card, "sizes": sizes}
        if left() < _LEAST:
            return {**about, "error": f"not begun: the {options.budget:g} s of --budget were over"}
        if not options.quick:
            return about | apart(name, options.device, sizes, options.threads, min(options.most_seconds, left()))
        try:
            return about | measure(name, torch.device(options.device), SIZES[sizes])
        except Exception as error:  # of any kind: the other rows continue
            return {**about, "error": said(error)}

    def laws() -> Row:
        about = {"name": "laws", "device": card, "sizes": sizes}
        if left() < _LEAST:
            return {**about, "error": f"not begun: the {options.budget:g} s of --budget were over"}
        return about | gpu_laws.run(gpu_laws.LAWS, on_cuda=options.device == "cuda", most_seconds=left())

    for key in [key for key, row in ledger.rows.items() if "error" in row]:
        del ledger.rows[key]
    for name in [*LIMITS, *options.jobs]:
        made = ledger.get(f"{card}, {sizes}, {options.threads} threads: {name}", lambda name=name: row(name))
        print(f"{name}: {made.get('error', 'done')}", file=sys.stderr, flush=True)
    if not (options.quick or options.no_laws):
        ledger.get(f"{card}, {sizes}, {options.threads} threads: laws", laws)


def apart(name: str, device: str, sizes: str, threads: int, most_seconds: float) -> Row:
    """Return the row of a job run in a separate process, or an error that states why there is none."""
    command = [sys.executable, "-m", "benchmarks.gpu_jobs", name, "--device", device, "--sizes", sizes]
    command += ["--threads", str(threads)]
    found = ended(command, most_seconds, folder=gpu_laws.ROOT, environment=os.environ)
    if found.status is None:
        return {"error": f"ended after {most_seconds:.0f} s without a result"}
    if found.status:
        return {"error": f"{found.last_words} (exit status {found.status})"}
    return json.loads(found.stdout.strip().splitlines()[-1])


# ---- the table ------------------------------------------------------------------------------------------------------


def report(ledger: Ledger) -> str:
    """Return the laws, the limits and the table, for each device and size."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in ledger.rows.values():
        groups.setdefault((row["device"], row["sizes"]), []).append(row)
    return "\n\n".join(_group(device, sizes, rows) for (device, sizes), rows in groups.items())


def _group(device: str, sizes: str, rows: Sequence[Row]) -> str:
    named = {row["name"]: row for row in rows}
    limits = {dtype: named.get(name, {}) for name, dtype in LIMITS.items()}
    lines = [f"{device}, sizes: {sizes}"]
    for dtype, limit in limits.items():
        if "flops" in limit:
            flops, bandwidth = limit["flops"] / 1e12, limit["bandwidth"] / 1e9
            lines.append(f"Limits in {dtype}: matmul {flops:.3g} Tflop/s, copy {bandwidth:.4g} GB/s")
        elif limit:
            lines.append(f"Limits in {dtype}: {limit['error']}")
    laws = named.get("laws")
    if laws is not None:
        lines.append(f"Laws: {laws['error']}" if "error" in laws else gpu_laws.summary(laws))
    head = [
        "job",
        "type",
        "size",
        "gpext",
        "a second",
        "others' time / gpext's",
        "of matmul's flops",
        "of copy's bandwidth",
    ]
    cells = [_cells(name, named[name], limits) for name in JOBS if name in named]
    return "\n".join([*lines, "", table(head, cells)])


def _cells(name: str, row: Row, limits: Mapping[str, Row]) -> list[str]:
    job, dtype = name.rsplit(" ", 1)
    if "error" in row:
        return [job, dtype, f"**no result**: {row['error']}", "", "", "", "", ""]
    seconds = dict(row["seconds"])
    own = seconds.pop(OURS)
    others = [f"{other} {value / own:.3g}" for other, value in seconds.items()]
    others += [f"{other}: {error}" for other, error in row["errors"].items()]
    return [
        job,
        dtype,
        _size(row),
        shown(own),
        f"{1 / own:.3g} {row['unit']}s",
        "; ".join(others),
        _share(row["flops"] / own, limits[dtype].get("flops")),
        _share(row["bytes"] / own, limits[dtype].get("bandwidth")),
    ]


def _size(row: Row) -> str:
    products = [f"{number} by {name}" for name, number in row["products"].items()]
    return row["about"] + (f"; products: {', '.join(products)}" if products else "")


def shown(seconds: float) -> str:
    """Return seconds in a suitable unit."""
    scale, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{seconds / scale:.3g} {unit}"


def _share(rate: float, limit: Any) -> str:
    if limit is None or rate == 0:
        return ""
    percent = 100 * rate / limit
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing and print the table; 1 where a row has failed or a law does not hold, else 0."""
    ledger = measure_and_report(parse(arguments), run, report)
    return int(any("error" in row or row.get("failed") for row in ledger.rows.values()))


if __name__ == "__main__":
    sys.exit(main())
