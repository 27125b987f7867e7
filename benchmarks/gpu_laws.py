"""The laws that concern a device, by pytest in a separate process, counted also if its time runs out."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bounded import ended

ROOT = Path(__file__).parents[1]
# Without a card the first two run on a simulated device, and the CUDA tests of the other files are skipped.
LAWS = (
    "tests/laws/test_device_laws.py",
    "tests/laws/test_default_device_laws.py",
    "tests/parallel/test_one_rank.py",
    "tests/samplers/test_augmented_sgld.py::test_on_a_gpu",
    "tests/samplers/test_hyperposterior.py::test_on_a_gpu",
)
_OUTCOME = re.compile(r"^(\S+?::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b", re.MULTILINE)


def run(laws: Sequence[str], *, on_cuda: bool, most_seconds: float, root: Path = ROOT) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped, the names of those that failed, and why it ended early."""
    begun = time.perf_counter()
    missing = [law for law in laws if not (root / law.partition("::")[0]).exists()]
    if missing or importlib.util.find_spec("pytest") is None:
        why = f"there is no {', '.join(missing)}" if missing else "pytest is not installed"
        return _counted("", 0.0, f"not run: {why}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-rN",
        "--color=no",
        "--durations=0",
        "-p",
        "no:cacheprovider",
        *laws,
    ]
    environment = dict(os.environ, PYTHONUNBUFFERED="1", **({} if on_cuda else {"CUDA_VISIBLE_DEVICES": ""}))
    found = ended(command, most_seconds, folder=root, environment=environment)
    note = ""
    if found.status is None:
        note = f"ended after {most_seconds:.0f} s, before the last of them"
    elif found.status not in (0, 1):  # of pytest: all passed, some failed
        note = f"pytest ended with {found.status}: {found.last_words}"
    return _counted(found.stdout, time.perf_counter() - begun, note)


def _counted(output: str, seconds: float, note: str) -> dict[str, Any]:
    outcomes = _OUTCOME.findall(output)
    counts = Counter(outcome for _, outcome in outcomes)
    return {
        "passed": counts["PASSED"] + counts["XFAIL"],
        "failed": counts["FAILED"] + counts["ERROR"] + counts["XPASS"],
        "skipped": counts["SKIPPED"],
        "failures": [name for name, outcome in outcomes if outcome in ("FAILED", "ERROR", "XPASS")],
        "seconds": seconds,
        "note": note,
    }


def summary(laws: dict[str, Any]) -> str:
    """Return lines that summarise the outcomes."""
    counts = ", ".join(f"{laws[name]} {name}" for name in ("passed", "failed", "skipped"))
    lines = [f"Laws: {counts} in {laws['seconds']:.0f} s" + (f" ({laws['note']})" if laws["note"] else "")]
    return "\n".join([*lines, *(f"  failed: {name}" for name in laws["failures"])])
