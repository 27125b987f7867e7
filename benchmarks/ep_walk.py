r"""EP's maps when a grid of hyperparameters is walked: each setting starts from its neighbour's result.

`benchmarks.ep_convergence map` infers every setting of lengthscale and magnitude from cold. A grid, or the path of an
optimiser, has neighbours: here the walk begins in the middle, which has about the best evidence, and proceeds to a
neighbour of the setting with the best evidence so far, starting from its result (`EP().infer(..., start=result)`).
If that does not converge at power 1 within 14 evaluations, the setting half-way between (in the logarithms) is inferred
first, and where that does not help the setting starts from cold. All that was tried counts.

    OMP_NUM_THREADS=1 python -m benchmarks.ep_walk --output ep.jsonl --figure docs/evidence/ep_map.png
    python -m benchmarks.ep_walk --quick

With the output of `ep_convergence map` (and its `ais`) in the same file the evidence is compared with that from cold
(and by sampling). An incomplete map is computed from the beginning.
"""

from __future__ import annotations

import argparse
import heapq
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.ep_convergence import described
from benchmarks.ep_map import KINDS, draw_map, grid, is_matched, kind_of
from benchmarks.ep_problems import EXAMPLES, Example, StudentTProblem, stated_power
from benchmarks.ep_report import COUNTED, factorisations, summary
from benchmarks.ledger import Ledger, Row, measure_and_report
from benchmarks.tables import table_of
from gpext.inference import EP, InferenceResult

SIDE, QUICK = 40, 2
LOOKS = 14  # site evaluations of an attempt from a neighbour
SAME = 1e-3  # nats
Place = tuple[int, int]
Setting = tuple[float, float]


def walk(example: Example, side: int) -> list[Row]:
    """Return the row of each setting, in the order in which the settings were visited."""
    settings = {(i, j): (a, b) for i, j, a, b in grid(example, "near", side)}
    middle = (side // 2, side // 2)
    results: dict[Place, InferenceResult] = {}
    rows: list[Row] = []
    queue: list[tuple[float, int, Place, Place | None]] = [(0.0, 0, middle, None)]
    left = set(settings) - {middle}
    with tqdm(total=len(settings), disable=None) as bar, torch.no_grad():
        while queue or left:
            if not queue:  # no neighbour at power 1
                queue = [(0.0, 0, left.pop(), None)]
            _, _, place, source = heapq.heappop(queue)
            begun = None if source is None else (settings[source], results[source])
            row, result = _visit(example, settings[place], begun)
            rows.append({"at": place, **row})
            bar.update()
            if result is None or stated_power(result) < 1:
                continue
            results[place] = result
            for step in ((1, 0), (-1, 0), (0, 1), (0, -1)):
                neighbour = (place[0] + step[0], place[1] + step[1])
                if neighbour in left:
                    left.remove(neighbour)
                    heapq.heappush(queue, (-row["evidence"], len(left), neighbour, place))
    return rows


def _visit(
    example: Example, setting: Setting, begun: tuple[Setting, InferenceResult] | None
) -> tuple[Row, InferenceResult | None]:
    """Return the row of a setting with its total cost, and its result."""
    spent: list[Row] = []
    problem = example.problem(*setting)
    result, came = None, "from a neighbour"
    if begun is not None:
        source, start = begun
        result = _attempt(problem, start, spent)
        if result is None:
            half_way = example.problem(*(math.sqrt(a * b) for a, b in zip(source, setting, strict=True)))
            between = _attempt(half_way, start, spent)
            result, came = None if between is None else _attempt(problem, between, spent), "from half-way"
    if result is None:
        row, result = _inferred(problem, EP(), None)
        came = row["stage"]
        spent.append(row)
    row = spent[-1] | {name: sum(one[name] for one in spent) for name in (*COUNTED, "seconds")}
    return problem.about | row | {"stage": came}, result


def _attempt(problem: StudentTProblem, start: InferenceResult, spent: list[Row]) -> InferenceResult | None:
    """Return a result at power 1, if a few evaluations from another result lead to one."""
    row, result = _inferred(problem, EP(max_steps=LOOKS), start)
    spent.append(row)
    return result if row["status"] == "CONVERGED" else None


def _inferred(problem: StudentTProblem, rule: EP, start: InferenceResult | None) -> tuple[Row, InferenceResult]:
    started = time.perf_counter()
    result = rule.infer(problem.prior, problem.likelihood, problem.targets, start=start)
    return described(problem, result, time.perf_counter() - started), result


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    for number in options.examples:
        prefix = f"walk/near/{number}/{options.side}/"
        if len(ledger.of(prefix)) < options.side**2:
            for row in walk(EXAMPLES[number], options.side):
                ledger.get(f"{prefix}{row['at'][0]}/{row['at'][1]}", lambda made=row: made)


def report(ledger: Ledger) -> str:
    lines, notes = [], []
    for number in EXAMPLES:
        rows = ledger.of(f"walk/near/{number}/")
        if not rows:
            continue
        name = f"example {number}, walked"
        lines.append(summary(name, rows))
        best = max(row["evidence"] for row in rows if is_matched(row) and row["power"] == 1)
        for depth in (10, 30):
            lines.append(summary(f"... evidence within {depth}", [r for r in rows if r["evidence"] > best - depth]))
        counts = Counter(kind_of(row) for row in rows)
        mean = statistics.fmean(factorisations(row) for row in rows)
        kinds = ", ".join(f"{kind} {counts[kind]}" for kind in KINDS if counts[kind])
        notes.append(f"* {name}: mean operations {mean:.0f}; {kinds}")
        notes += _compared(ledger, number, rows)
    return "\n".join([table_of(lines), "", *notes])


def _compared(ledger: Ledger, number: int, rows: Sequence[Row]) -> list[str]:
    """Return how the evidence differs from that of the map from cold, and from that by sampling."""
    notes = []
    cold = {row["key"].removeprefix("map/"): row for row in ledger.of(f"map/near/{number}/")}
    pairs = [(row, cold[key]) for row in rows if (key := row["key"].removeprefix("walk/")) in cold]
    if pairs:
        both = [(a["evidence"] - b["evidence"]) for a, b in pairs if a["power"] == b["power"] == 1]
        other = sorted((d for d in both if abs(d) > SAME), key=abs)
        gained, lost = (sum(x["power"] == 1 > y["power"] for x, y in p) for p in (pairs, [(b, a) for a, b in pairs]))
        some = ", ".join(f"{difference:+.2f}" for difference in other[:: max(len(other) // 10, 1)])
        notes.append(
            f"* example {number}, at power 1 both ways {len(both)}: the same evidence {len(both) - len(other)}, "
            f"other {len(other)} (some differences: {some}); at power 1 walked only {gained}, from cold only {lost}"
        )
    sampled = {tuple(row["key"].split("/")[2:4]): row for row in ledger.of(f"ais/{number}/")}
    for row in rows:
        found = sampled.get(tuple(map(str, row["at"])))
        if found is not None and abs(found["one"] - row["evidence"]) > SAME:
            walked, begun = row["evidence"] - found["ais"], found["one"] - found["ais"]
            setting = f"lengthscale {row['lengthscale']:.2f}, magnitude {row['magnitude']:.2f}"
            notes.append(f"* example {number}, {setting}: minus AIS {walked:+.2f} walked, {begun:+.2f} from cold")
    return notes


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="two by two settings")
    parser.add_argument("--examples", type=int, nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--side", type=int, default=SIDE, help="of the map")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--report-only", action="store_true", help="print the tables of --output and stop")
    options = parser.parse_args(arguments)
    if options.quick:
        options.side = QUICK
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk the missing maps, print the tables, and draw the maps from cold and walked."""
    options = parse(arguments)
    ledger = measure_and_report(options, run, report)
    if options.figure is not None:
        draw_map([*ledger.of("map/near/"), *ledger.of("walk/near/")], options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
