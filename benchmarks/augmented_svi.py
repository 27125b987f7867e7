"""Seconds until a good test log density: gpext's augmented stochastic variational inference against stock gpytorch.

The claim is that of [GWO20 section 5.3]: 200 inducing points from k-means++, minibatches, kernel hyperparameters
learned by Adam, on two robust regression sets and two (here three) classification sets. For each data set, likelihood,
minibatch size and seed all methods start from the same hyperparameters and use the same minibatches; they run one after
the other, in an order that rotates with the seed, so that a drift of the machine's speed affects all equally.

    GPEXT_DATA=folder python -m benchmarks.augmented_svi --budget 60 --output benchmarks/results/augmented_svi.json
    python -m benchmarks.augmented_svi --quick
    python -m benchmarks.augmented_svi --report-only --output benchmarks/results/augmented_svi.json

Every finished run is written at once; repeating the command does only the missing runs, and with ``--redo METHOD`` also
the runs of a method whose code has changed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.harness import Method, Problem, Trace, make_problem
from benchmarks.methods import METHODS

ROBUST = ("laplace", "student_t", "matern32")
PROBLEMS: dict[str, tuple[str, ...]] = {
    "protein": ROBUST,
    "airline": ROBUST,
    "covtype": ("logit",),
    "susy": ("logit",),
    "magic": ("logit",),
}
# Nothing in gpext was tuned on these: they were first run when its schedules and defaults were fixed.
FURTHER_PROBLEMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("spambase", "electricity", "shuttle", "letter"), ("logit",)),
    **dict.fromkeys(("kin40k", "pol", "elevators", "california", "naval", "bike"), ROBUST),
}
ALL_PROBLEMS = PROBLEMS | FURTHER_PROBLEMS
QUICK_PROBLEMS: dict[str, tuple[str, ...]] = {"synthetic_regression": ROBUST, "synthetic_binary": ("logit",)}
Cell = tuple[str, str, int, str]  # data set, likelihood, minibatch size, float type
TOLERANCE = 0.01  # nats; a method has reached the target when it is this close to the best value of any method
PACKAGES = ("gpext", "torch", "gpytorch", "linear_operator", "numpy", "scipy", "scikit-learn")


@dataclass(frozen=True)
class Run:
    """The settings that identify one run; two runs with the same key are the same run."""

    dataset: str
    likelihood: str
    method: str
    options: Mapping[str, float]
    batch_size: int
    seed: int
    dtype: str
    budget: float
    num_inducing: int
    threads: int

    @property
    def key(self) -> str:
        """A readable name of the run."""
        return (
            f"{self.dataset}/{self.likelihood}/B{self.batch_size}/M{self.num_inducing}/{self.dtype}/"
            f"{self.budget:g}s/{self.threads}T/seed{self.seed}/{self.method}({_describe(self.options)})"
        )


def _describe(options: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in sorted(options.items()))


def machine() -> dict[str, Any]:
    """Return the machine and Python version to which the numbers belong."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {"cpu": model, "cores": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that affect the numbers."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def write_atomically(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the file in one step, so that an interrupted benchmark never leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(temporary, path)


def open_results(path: Path) -> dict[str, Any]:
    """Return the results so far, or the content of an empty file.

    Raises:
        ValueError: The file is from another machine or other versions; its times could not be compared.
    """
    here = {"machine": machine(), "versions": package_versions()}
    if not path.exists():
        return {**here, "runs": {}}
    results = json.loads(path.read_text(encoding="utf-8"))
    for part, expected in here.items():
        if results[part] != expected:
            raise ValueError(
                f"{path} has {part} {results[part]}, now it is {expected}: times of the two are not comparable. "
                "Write to another --output."
            )
    return results


def options_of(method: Method, steps: str) -> list[dict[str, float]]:
    """Return the step sizes to try; the default comes first and is not repeated."""
    default = dict(method.options)
    if steps == "default":
        return [default]
    return [default, *(dict(options) for options in method.grid if dict(options) != default)]


def plan(
    problems: Mapping[str, Sequence[str]],
    methods: Mapping[str, Method],
    *,
    batch_sizes: Sequence[int],
    num_seeds: int,
    steps: str,
    dtype: str,
    budget: float,
    num_inducing: int,
    threads: int,
) -> Iterable[Run]:
    """Yield all runs, the methods innermost and rotated by the seed."""
    for seed in range(num_seeds):
        for dataset, likelihoods in problems.items():
            for likelihood in likelihoods:
                for batch_size in batch_sizes:
                    entries = [(name, o) for name, method in methods.items() for o in options_of(method, steps)]
                    shift = seed % len(entries)
                    for name, options in entries[shift:] + entries[:shift]:
                        yield Run(
                            dataset=dataset,
                            likelihood=likelihood,
                            method=name,
                            options=options,
                            batch_size=batch_size,
                            seed=seed,
                            dtype=dtype,
                            budget=budget,
                            num_inducing=num_inducing,
                            threads=threads,
                        )


def execute(
    runs: Sequence[Run],
    methods: Mapping[str, Method],
    output: Path,
    *,
    max_steps: int | None = None,
    max_train: int | None = None,
    redo: Sequence[str] = (),
    progress: bool = True,
) -> dict[str, Any]:
    """Do the runs that ``output`` lacks, or whose method is in ``redo``, writing each when it is done."""
    results = open_results(output)
    for run in runs:
        if run.method in redo:
            results["runs"].pop(run.key, None)
    missing = [run for run in runs if run.key not in results["runs"]]
    warm: set[tuple[str, str]] = set()
    for run in tqdm(missing, disable=None if progress else True):
        problem = make_problem(
            run.dataset, run.likelihood, seed=run.seed, num_inducing=run.num_inducing, max_train=max_train
        )
        method = methods[run.method]
        if (run.method, run.likelihood) not in warm:  # imports and first calls of a library do not count
            _run(method, problem, run, budget=60.0, max_steps=3)
            warm.add((run.method, run.likelihood))
        trace = _run(method, problem, run, budget=run.budget, max_steps=max_steps)
        results["runs"][run.key] = {
            **{name: getattr(run, name) for name in Run.__dataclass_fields__},
            "options": dict(run.options),
            "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
            "trace": trace.as_dict(),
        }
        write_atomically(output, results)
    return results


def _run(method: Method, problem: Problem, run: Run, *, budget: float, max_steps: int | None) -> Trace:
    return method.run(
        problem,
        batch_size=run.batch_size,
        budget=budget,
        seed=run.seed,
        dtype=getattr(torch, run.dtype),
        max_steps=max_steps,
        **run.options,
    )


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        cell: Data set, likelihood, minibatch size and float type.
        label: The method, with its step sizes when they were tuned.
        best: Best test log density of any method at any minibatch size and type, median over the seeds.
        seconds: Median over the seeds of the time to come within the tolerance of that seed's best; inf: not reached.
        ratio: ``seconds`` over gpext's in the same cell; None without gpext, inf or nan if one of the two is infinite.
        least_ratio: The ratio with the budget in place of infinite ``seconds``: a lower bound.
        final: Median over the seeds of the last test log density.
        error: Median over the seeds of the last test error.
        failures: Runs that broke down.
        num_runs: Number of runs in the line.
    """

    cell: Cell
    label: str
    best: float
    seconds: float
    ratio: float | None
    least_ratio: float | None
    final: float
    error: float
    failures: int
    num_runs: int


def summarise(results: Mapping[str, Any], reference: str = "gpext") -> list[Row]:
    """Return the report's rows: per cell each method at its defaults and, when a grid was run, at its best step sizes.

    The best step sizes are those with the smallest median time, then with the best final log density; they are chosen
    on the test data, in the peers' favour.
    """
    runs = list(results["runs"].values())
    best: dict[tuple[str, str, int], float] = {}  # over methods, step sizes and minibatch sizes, for each seed
    for run in runs:
        key = (run["dataset"], run["likelihood"], run["seed"])
        best[key] = max([best.get(key, -math.inf), *run["trace"]["log_density"]])

    groups: dict[Cell, dict[tuple[str, str], list[Mapping[str, Any]]]] = {}
    for run in runs:
        cell = (run["dataset"], run["likelihood"], run["batch_size"], run["dtype"])
        groups.setdefault(cell, {}).setdefault((run["method"], _describe(run["options"])), []).append(run)

    rows = []
    for cell, candidates in sorted(groups.items()):
        lines = {who: _line(cell, who, members, best) for who, members in candidates.items()}
        chosen: list[Row] = []
        for name in dict.fromkeys(method for method, _ in lines):
            entries = [who for who in lines if who[0] == name]
            default = _describe(METHODS[name].options) if name in METHODS else ""
            chosen += [replace(lines[who], label=name) for who in entries if who[1] == default or len(entries) == 1]
            if len(entries) > 1:
                tuned = min(entries, key=lambda who: (lines[who].seconds, -lines[who].final))
                chosen.append(replace(lines[tuned], label=f"{name} tuned ({tuned[1]})"))
        base = next((row.seconds for row in chosen if row.label == reference), None)
        budget = max(run["budget"] for members in candidates.values() for run in members)
        if base is not None:
            chosen = [replace(r, ratio=r.seconds / base, least_ratio=min(r.seconds, budget) / base) for r in chosen]
        rows += chosen
    return rows


def _line(
    cell: Cell,
    who: tuple[str, str],
    members: Sequence[Mapping[str, Any]],
    best: Mapping[tuple[str, str, int], float],
) -> Row:
    traces = [Trace.from_dict(run["trace"]) for run in members]
    targets = [best[(cell[0], cell[1], run["seed"])] for run in members]
    finals = [(t.log_density[-1], t.error[-1]) if t.log_density else (-math.inf, math.inf) for t in traces]
    return Row(
        cell=cell,
        label=who[0],
        best=statistics.median(targets),
        seconds=statistics.median_high(
            [t.seconds_to(target - TOLERANCE) for t, target in zip(traces, targets, strict=True)]
        ),
        ratio=None,
        least_ratio=None,
        final=statistics.median(value for value, _ in finals),
        error=statistics.median(value for _, value in finals),
        failures=sum(t.status.value != "finished" for t in traces),
        num_runs=len(traces),
    )


def report(results: Mapping[str, Any]) -> str:
    """Return a markdown table of :func:`summarise`, with the machine and the versions."""
    lines = [
        f"Seconds of training until the test log density is within {TOLERANCE} nats of the best of any method "
        "(median over the seeds), on",
        f"{results['machine']['cpu']}, {results['machine']['cores']} cores; "
        + ", ".join(f"{name} {number}" for name, number in results["versions"].items())
        + ".",
        "",
        "| data set | likelihood | batch | type | best | method | seconds | over gpext | final | error | broke down |",
        "| --- | --- | ---: | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in summarise(results):
        seconds = f"{row.seconds:.2f}" if math.isfinite(row.seconds) else "not reached"
        ratio = ""
        if row.ratio is not None and row.least_ratio:  # empty without gpext, or where gpext itself is infinite
            ratio = f"{row.ratio:.1f}" if math.isfinite(row.ratio) else f"> {row.least_ratio:.1f}"
        lines.append(
            f"| {' | '.join(map(str, row.cell))} | {row.best:.4f} | {row.label} | {seconds} | {ratio} "
            f"| {row.final:.4f} | {row.error:.4f} | {row.failures} of {row.num_runs} |"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="synthetic data and tiny sizes, under a minute")
    parser.add_argument("--datasets", nargs="+", choices=sorted(ALL_PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--likelihoods", nargs="+", choices=[*ROBUST, "logit"], default=[*ROBUST, "logit"])
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=list(METHODS))
    parser.add_argument("--steps", choices=["default", "grid"], default="default", help="step sizes of the methods")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[100, 1000])
    parser.add_argument(
        "--seeds", type=int, default=3, help="how many; a seed sets split, inducing points and minibatches"
    )
    parser.add_argument("--budget", type=float, default=60.0, help="training seconds of a run")
    parser.add_argument("--num-inducing", type=int, default=200)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads; set OMP_NUM_THREADS alike")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/augmented_svi.json, or ..._quick.json")
    parser.add_argument("--redo", nargs="+", choices=sorted(METHODS), default=[], help="forget these methods' runs")
    parser.add_argument("--report-only", action="store_true", help="print the table of --output and stop")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then print the table."""
    args = parse(arguments)
    if args.output is None:
        args.output = Path("benchmarks/results") / f"augmented_svi{'_quick' if args.quick else ''}.json"
    if args.report_only:
        print(report(json.loads(args.output.read_text(encoding="utf-8"))))
        return 0
    torch.set_num_threads(args.threads)
    problems: Mapping[str, Sequence[str]] = {name: ALL_PROBLEMS[name] for name in args.datasets}
    if args.quick:
        problems = QUICK_PROBLEMS
        args.batch_size, args.seeds, args.budget, args.num_inducing = [100], 1, 1.0, 20
    problems = {name: [kind for kind in kinds if kind in args.likelihoods] for name, kinds in problems.items()}
    methods = {name: METHODS[name] for name in args.methods}
    runs = list(
        plan(
            problems,
            methods,
            batch_sizes=args.batch_size,
            num_seeds=args.seeds,
            steps=args.steps,
            dtype=args.dtype,
            budget=args.budget,
            num_inducing=args.num_inducing,
            threads=args.threads,
        )
    )
    print(report(execute(runs, methods, args.output, redo=args.redo)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
