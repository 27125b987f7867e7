r"""What does each stage of expectation propagation earn?

EP at its defaults on random problems (other seeds than `benchmarks.ep_convergence` has) and on the maps of JVV11's two
examples, 20 by 20; then without one stage, on those problems on which the whole search had come to it. On all others
the search is the same without it.

    OMP_NUM_THREADS=1 python -m benchmarks.ep_ablation --output ep_ablation.jsonl
    python -m benchmarks.ep_ablation --quick

The work of a search is counted in Cholesky factorisations, n^3 / 3, as in docs/evidence/expectation_propagation.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from benchmarks.ep_convergence import described
from benchmarks.ep_map import grid, is_matched
from benchmarks.ep_problems import EXAMPLES, StudentTProblem, random_problem
from benchmarks.ep_report import factorisations
from benchmarks.ledger import Ledger, Row, measure_and_report
from benchmarks.tables import table
from gpext.inference import EP
from gpext.inference.ep_internals.moment_matching import At, Match
from gpext.inference.ep_internals.stages import Search, Start

_OTHER_SEEDS = 10_000
_POWER_LOWERED = " at power "
WAYS = ("narrowed at 0.7", "swept at 0.7", "from KL")  # to a solution at a lower power
STAGES = {
    "positive sweeps": "",  # what a message says if the search has come to the stage
    "CAVI's sites": "steps of CAVI",
    "from wider": "from wider",
    "up from a lower power": _POWER_LOWERED,
    "second-order steps": "second-order steps",
    **dict.fromkeys(WAYS, _POWER_LOWERED),
}


@dataclass
class AblatedSearch(Search):
    """A search without one of its stages."""

    without: str = ""

    def _solve(self, at: At, power: float) -> Match:
        if self.without != "positive sweeps":
            return super()._solve(at, power)
        return self._settled(at, at(self.problem.no_sites()), power)

    def _from_mixture(self, at: At) -> Match | None:
        return None if self.without == "CAVI's sites" else super()._from_mixture(at)

    def _narrowed(self, power: float) -> Match | None:
        skipped = self.without == "from wider" and power == self.power
        return None if skipped else super()._narrowed(power)

    def _from_lower(self) -> Match | None:
        return None if self.without == "up from a lower power" else super()._from_lower()

    def _ways(self) -> tuple[tuple[Callable[[float], Match | None], float], ...]:
        return tuple(way for name, way in zip(WAYS, super()._ways(), strict=True) if name != self.without)

    def _finish(self, at: At, current: Match, power: float) -> Match:
        return current if self.without == "second-order steps" else super()._finish(at, current, power)


@dataclass(frozen=True)
class AblatedEP(EP):
    """EP without one of its stages."""

    without: str = ""

    def _find(self, search: Search, start: Start) -> Match:
        options = (self.power, self.damping, self.max_steps, self.tolerance)
        return AblatedSearch(search.problem, *options, search.trace, search.stages, self.without).run(start)


def problems(quick: bool) -> Iterator[tuple[str, Callable[[], StudentTProblem]]]:
    """Return a key for each problem, and what makes it."""
    for family, count in (("regular", 600), ("hard", 600)):
        for seed in range(2 if quick else count):
            yield f"{family}/{seed}", partial(random_problem, family, _OTHER_SEEDS + seed)
    for number, example in EXAMPLES.items():
        for i, j, lengthscale, magnitude in grid(example, "near", 1 if quick else 20):
            yield f"example {number}/{i}/{j}", partial(example.problem, lengthscale, magnitude)


def outcome(make: Callable[[], StudentTProblem], without: str) -> Row:
    """Return how a search without a stage ended."""
    problem = make()
    started = time.perf_counter()
    result = AblatedEP(without=without).infer(problem.prior, problem.likelihood, problem.targets)
    return described(problem, result, time.perf_counter() - started)


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Make the rows that are missing."""
    for key, make in tqdm(list(problems(options.quick)), disable=None):
        whole = ledger.get(f"/{key}", partial(outcome, make, ""))
        for stage, sign in STAGES.items():
            if sign in whole["message"]:
                ledger.get(f"{stage}/{key}", partial(outcome, make, stage))


def report(ledger: Ledger) -> str:
    """Return a table of the stages for each group of problems."""
    parts = []
    for group in ("regular", "hard", "example 1", "example 2"):
        whole = {row["key"].split("/", 1)[1]: row for row in ledger.of(f"/{group}/")}
        rows = [_line("none", list(whole.values()), 0, 0, 0)]
        for stage in STAGES:
            changed = {row["key"].split("/", 1)[1]: row for row in ledger.of(f"{stage}/{group}/")}
            lost = sum(_at_one(whole[key]) and not _at_one(row) for key, row in changed.items())
            gained = sum(_at_one(row) and not _at_one(whole[key]) for key, row in changed.items())
            rows.append(_line(stage, list((whole | changed).values()), len(changed), lost, gained))
        header = (
            "without",
            "problems at the stage",
            "at power 1",
            "lost",
            "gained",
            "matched",
            "mean power",
            "mean evaluations",
            "mean operations",
            "seconds",
        )
        parts.append(f"### {group}, {len(whole)} problems\n\n{table(header, rows)}")
    return "\n\n".join(parts)


def _at_one(row: Row) -> bool:
    return is_matched(row) and row["power"] == 1


def _line(stage: str, rows: Sequence[Row], changed: int, lost: int, gained: int) -> tuple[str, ...]:
    count = max(len(rows), 1)
    matched = [row for row in rows if is_matched(row)]
    return (
        stage,
        str(changed),
        str(sum(map(_at_one, rows))),
        str(lost),
        str(gained),
        str(len(matched)),
        f"{sum(row['power'] for row in matched) / max(len(matched), 1):.4f}",
        f"{sum(row['looks'] for row in rows) / count:.1f}",
        f"{sum(map(factorisations, rows)) / count:.0f}",
        f"{sum(row['seconds'] for row in rows):.0f}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few problems, some seconds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--report-only", action="store_true", help="print the tables of --output and stop")
    measure_and_report(parser.parse_args(arguments), run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
