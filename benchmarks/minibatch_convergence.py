r"""Minibatches beside the full batch: test log density against CPU seconds, hyperparameters learned.

All methods have the same model, a scaled squared exponential with a lengthscale for each column, the same 200 fixed
inducing points of k-means, and the same initial hyperparameters, in float64:

* ``gpext, full batch``: ``gpext.fit(mll, x, y)``;
* ``gpext, minibatches``: ``gpext.fit(mll, x, y, batch_size=1000)``: L-BFGS on a sample, then minibatches;
* ``minibatches alone``: the same minibatches from the initial hyperparameters, without the sample and with constant
  step sizes, as gpext did before;
* ``gpytorch SVGP, Adam``: the peer of the other benchmarks, learning rate 0.01, the same batch size.

The first two end by themselves; the other two get three times the CPU seconds of the full batch. The clock is the CPU
time of the process, one thread, and stands still while a model is evaluated.

    GPEXT_DATA=folder OMP_NUM_THREADS=1 python -m benchmarks.minibatch_convergence \
        --output minibatch_convergence.jsonl --figure docs/evidence/minibatches.png
    python -m benchmarks.minibatch_convergence --quick     # generated data, a few seconds
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import gpext
from benchmarks.harness import Predictor, Problem, evaluate, make_problem, minibatches
from benchmarks.ledger import Ledger, Row, measure_and_report
from benchmarks.ours import SiteLearner
from benchmarks.peers import GPyTorchLearner
from benchmarks.tables import table
from gpext.training.minibatch import Minibatches

PROBLEMS = {
    "magic": "logit",
    "protein": "student_t",
    "elevators": "student_t",
    "kin40k": "student_t",
    "census_house_8L": "student_t",
}
LARGE = {"million_binary": "logit", "million_regression": "student_t"}  # generated; asked for by name
QUICK = {"synthetic_binary": "logit", "synthetic_regression": "student_t"}
FULL, OURS, ALONE, ADAM = "gpext, full batch", "gpext, minibatches", "minibatches alone", "gpytorch SVGP, Adam"
METHODS = (FULL, OURS, ALONE, ADAM)
BATCH = 1000
MOST_TIMES = 3  # of the full batch's seconds, for the methods that do not end
_GROWTH = 1.2  # of the seconds between evaluations


class _Course:
    """Test log densities at growing times; the clock stands still in between."""

    def __init__(self, problem: Problem, budget: float) -> None:
        self.problem, self.budget = problem, budget
        self.seconds: list[float] = []
        self.log_density: list[float] = []
        self._used, self._next, self._since = 0.0, 0.2, time.process_time()

    def goes_on(self, predictor: Predictor) -> bool:
        """Count the CPU time since the last call, evaluate if it is time to, and return whether any is left."""
        self._used += time.process_time() - self._since
        if self._used >= min(self._next, self.budget):
            self.note(predictor)
            self._next = max(_GROWTH * self._used, self._used + 0.1)
        self._since = time.process_time()
        return self._used < self.budget

    def note(self, predictor: Predictor) -> None:
        """Evaluate."""
        self.seconds.append(self._used)
        self.log_density.append(evaluate(self.problem, predictor)[1])

    def row(self, steps: int, status: str) -> Row:
        """Return the course as a row."""
        return {"steps": steps, "status": status, "seconds": self.seconds, "log_density": self.log_density}


def _by_fit(problem: Problem, batch_size: int | None) -> Row:
    course = _Course(problem, float("inf"))
    learner = SiteLearner(problem, seed=0, dtype=torch.float64)
    result = gpext.fit(
        learner.mll,
        problem.train_x,
        problem.train_y,
        batch_size=batch_size,
        progress=False,
        callback=lambda step, value: not course.goes_on(learner),
    )
    course.goes_on(learner)
    course.note(learner)
    return course.row(result.num_steps, result.status.name)


def _alone(problem: Problem, batch_size: int, budget: float) -> Row:
    course = _Course(problem, budget)
    learner = SiteLearner(problem, seed=0, dtype=torch.float64)
    batches = Minibatches(len(problem.train_y), batch_size, torch.Generator().manual_seed(0))
    while course.goes_on(learner):
        learner.next_step(problem.train_x, problem.train_y, batches)
    return course.row(batches.num_drawn, "")


def _by_adam(problem: Problem, batch_size: int, budget: float) -> Row:
    course = _Course(problem, budget)
    learner = GPyTorchLearner(problem, seed=0, dtype=torch.float64, lr=0.01)
    steps = 0
    for index in minibatches(len(problem.train_y), batch_size, seed=0):
        if not course.goes_on(learner):
            break
        learner.step(problem.train_x[index], problem.train_y[index])
        steps += 1
    return course.row(steps, "")


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure the missing rows."""
    problems = QUICK if options.quick else {name: (PROBLEMS | LARGE)[name] for name in options.datasets}
    batch_size = 100 if options.quick else BATCH
    for name, likelihood in problems.items():
        problem = make_problem(name, likelihood, seed=0, num_inducing=50 if options.quick else 200)
        full = ledger.get(f"{name}/{FULL}", lambda p=problem: _by_fit(p, None))
        budget = MOST_TIMES * full["seconds"][-1]
        rest: dict[str, Callable[[Problem], Row]] = {
            OURS: lambda p: _by_fit(p, batch_size),
            ALONE: lambda p, b=budget: _alone(p, batch_size, b),
            ADAM: lambda p, b=budget: _by_adam(p, batch_size, b),
        }
        for method, measure in rest.items():
            if method in options.methods:
                ledger.get(f"{name}/{method}", lambda p=problem, m=measure: m(p))


def report(ledger: Ledger) -> str:
    """Return the table: where each method ends, and when it is within 0.005 nats of the full batch's end."""
    rows = []
    for name in dict.fromkeys(key.split("/")[0] for key in ledger.rows):
        target = ledger.rows[f"{name}/{FULL}"]["log_density"][-1] - 0.005
        for method in METHODS:
            row = ledger.rows.get(f"{name}/{method}")
            if row is None:
                continue
            course = list(zip(row["seconds"], row["log_density"], strict=True))
            stays = next((t for t, _ in reversed(course) if min(v for s, v in course if s >= t) < target), None)
            arrival = next((t for t, _ in course if stays is None or t > stays), None)
            end, ended = f"{course[-1][1]:.4f}", f"{course[-1][0]:.1f}"
            within = "never" if arrival is None else f"{arrival:.1f}"
            rows.append([name, method, end, ended, within, str(row["steps"]), row["status"].lower()])
    head = ["data", "method", "test log density at the end", "CPU s", "CPU s until within 0.005", "steps", "status"]
    return table(head, rows)


def draw(ledger: Ledger, path: Path) -> None:
    """Draw test log density against CPU seconds, a panel for each data set."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from gpext.plots import COLORS, MARKERS

    names = list(dict.fromkeys(key.split("/")[0] for key in ledger.rows))
    figure, axes = plt.subplots(1, len(names), figsize=(3.4 * len(names), 3.2), layout="constrained", squeeze=False)
    for ax, name in zip(axes[0], names, strict=True):
        best = max(max(row["log_density"]) for row in ledger.of(f"{name}/"))
        end = ledger.rows[f"{name}/{FULL}"]["log_density"][-1]
        for method, color, marker in zip(METHODS, COLORS, MARKERS, strict=False):
            row = ledger.rows.get(f"{name}/{method}")
            if row is not None:
                ax.plot(
                    row["seconds"], row["log_density"], color=color, marker=marker, markersize=3, lw=1.2, label=method
                )
        ax.axhline(end - 0.005, color="0.6", lw=0.8, ls=":")
        ax.set(title=name, xscale="log", xlabel="CPU seconds", ylim=(best - 0.1, best + 0.01))
    axes[0, 0].set_ylabel("mean test log density")
    axes[0, 0].legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="generated data, 50 inducing points, batches of 100")
    parser.add_argument("--datasets", nargs="+", choices=tuple(PROBLEMS | LARGE), default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="the first always runs")
    parser.add_argument("--output", type=Path, default=None, help="rows so far, to resume from")
    parser.add_argument("--report-only", action="store_true", help="print the table of what is there")
    parser.add_argument("--figure", type=Path, default=None, help="file to draw the figure to")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    ledger = measure_and_report(options, run, report)
    if options.figure is not None:
        draw(ledger, options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
