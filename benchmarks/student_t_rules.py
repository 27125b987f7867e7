"""The Student-t of GPRegressor by the rule that trains it: log densities, chosen on seven tables, verified on thirteen.

* `Laplace`: `GPRegressor(inference=Laplace(tolerance=1e-4))`, which predicts by it, too;
* `KL`: `GPRegressor(inference=KL(tolerance=1e-3, max_steps=200))`;
* `default`: `GPRegressor()`, Laplace roughly and then KL.

`--size` random rows (at most three quarters of all) train, up to 1000 others are scored by the log density of
standardised targets; means of `--splits` splits. Gaussian noise is exact under each, and kept where a Student-t is no
better, so that tables without heavy tails are the same for all.

    GPEXT_DATA=folder OMP_NUM_THREADS=1 python -m benchmarks.student_t_rules --output student_t_rules.jsonl
    python -m benchmarks.student_t_rules --quick
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import warnings
from collections.abc import Sequence

import numpy as np

from benchmarks.datasets import raw_table
from benchmarks.ledger import Ledger, Row, command_line, measure_and_report
from benchmarks.tables import table
from gpext.estimators import GPRegressor
from gpext.inference import KL, Laplace

CHOSEN_ON = ("bike", "census_house_8L", "pol", "kin40k", "stocks", "naval", "diabetes")
VERIFIED_ON = (
    *("boston", "concrete", "energy", "yacht", "airfoil", "kin8nm", "power_plant", "abalone", "machine_cpu"),
    *("auto_mpg", "protein", "california", "elevators"),
)
RULES = {"Laplace": Laplace(tolerance=1e-4), "KL": KL(tolerance=1e-3, max_steps=200), "default": "auto"}
_TESTS = 1000


def measure(name: str, size: int, seed: int, rule: str) -> Row:
    """Return the score of one split, the CPU seconds and what was chosen."""
    whole = raw_table(name)
    order = np.random.default_rng(seed).permutation(len(whole.targets))
    size = min(size, 3 * len(order) // 4)
    train, test = order[:size], order[size : size + _TESTS]
    y = (whole.targets - whole.targets[train].mean()) / whole.targets[train].std()
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the status is in the row
        model = GPRegressor(inference=RULES[rule]).fit(whole.features[train], y[train])
    seconds = time.process_time() - started
    log_density = float(model.log_density(whole.features[test], y[test]).mean())
    status = model.fit_result_.status.name
    found = {"log_density": log_density, "seconds": seconds, "noise": model.likelihood_name_, "status": status}
    return {"rows": size, **found}


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure the missing rows."""
    size, splits = (60, 1) if options.quick else (options.size, options.splits)
    for seed in range(splits):
        for name in options.sets[:1] if options.quick else options.sets:
            for rule in RULES:
                key = f"{name}/{size}/{rule}/{seed}"
                ledger.get(key, functools.partial(measure, name, size, seed, rule))


def report(ledger: Ledger) -> str:
    """Return the table: means over the splits."""
    rows = []
    for name, size in dict.fromkeys(tuple(row["key"].split("/")[:2]) for row in ledger.of("")):
        cells = [ledger.of(f"{name}/{size}/{rule}/") for rule in RULES]
        densities = [f"{np.mean([row['log_density'] for row in cell]):.3f}" for cell in cells]
        seconds = [f"{np.mean([row['seconds'] for row in cell]):.1f}" for cell in cells]
        unfinished = sum(row["status"] not in ("CONVERGED", "NOISE_FLOOR") for cell in cells for row in cell)
        use = "chosen" if name in CHOSEN_ON else "verified"
        rows.append([name, use, str(cells[0][0]["rows"]), *densities, *seconds, str(unfinished or "")])
    names = [*RULES, *(f"{rule}, s" for rule in RULES)]
    return table(["set", "for what", "rows", *names, "not converged"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = command_line(__doc__, quick="60 rows of one table")
    parser.add_argument("--size", type=int, default=500)
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--sets", nargs="+", default=[*CHOSEN_ON, *VERIFIED_ON])
    measure_and_report(parser.parse_args(arguments), run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
