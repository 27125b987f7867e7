"""Learning hyperparameters from the augmented bound or from the exact one, at the same q(u).

The augmented bound gives q(u) its closed-form steps, but it can be several nats loose, and its looseness depends on the
kernel. With minibatches both columns have the same batches, the same closed-form steps in q(u) and the same Adam; only
the gradients of the kernel's and the likelihood's parameters differ. With ``--full-batch`` each column is
``gpext.fit(mll, x, y, hyperparameters=...)``, which maximises the one bound or the other over q(u) as well, until it
converges. Prints a markdown table and writes JSON.

Run as ``python -m benchmarks.hyperparameter_gradients`` from the repository root; ``--quick`` for a smoke run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import gpext
from benchmarks.harness import Problem, Trace, evaluate, make_problem, train
from benchmarks.ours import SiteLearner

PROBLEMS = (
    ("magic", "logit"),
    ("susy", "logit"),
    ("covtype", "logit"),
    ("protein", "laplace"),
    ("airline", "student_t"),
    ("boston", "matern32"),
)
QUICK = (("synthetic_binary", "logit"), ("synthetic_regression", "student_t"))
BOUNDS = ("augmented", "exact")


def run_one(problem: Problem, bound: str, *, seed: int, batch_size: int, num_steps: int) -> Trace:
    """Train one model with the gradients of one bound."""
    return train(
        problem,
        lambda: SiteLearner(problem, seed=seed, dtype=torch.float64, gradient=bound),
        batch_size=batch_size,
        budget=math.inf,
        seed=seed,
        dtype=torch.float64,
        max_steps=num_steps,
    )


def run_full_batch(problem: Problem, bound: str, *, seed: int) -> dict[str, float]:
    """Train one model to convergence on one bound."""
    learner = SiteLearner(problem, seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    result = gpext.fit(
        learner.mll, problem.train_x, problem.train_y, hyperparameters=bound, generator=generator, progress=False
    )
    return {"log_density": evaluate(problem, learner)[1], "ms": 1e3 * result.seconds / result.num_steps}


def report(results: dict[str, Any]) -> str:
    """Return medians over the seeds of the final test log density and the time of a step, and the difference."""
    lines = [
        f"Mean test log density after {results['num_steps'] or 'all'} steps, batch {results['batch_size'] or 'full'}, "
        f"median of {results['seeds']} seeds.",
        "",
        "| data set | likelihood | augmented | exact | exact - augmented | ms a step, augmented | ms a step, exact |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, runs in results["runs"].items():
        density = {b: statistics.median(r["log_density"] for r in runs[b]) for b in BOUNDS}
        step = {b: statistics.median(r["ms"] for r in runs[b]) for b in BOUNDS}
        difference = statistics.median(
            e["log_density"] - a["log_density"] for a, e in zip(runs["augmented"], runs["exact"], strict=True)
        )
        lines.append(
            f"| {name.replace('/', ' | ')} | {density['augmented']:.4f} | {density['exact']:.4f} | {difference:+.4f} "
            f"| {step['augmented']:.1f} | {step['exact']:.1f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="synthetic data, a few seconds")
    parser.add_argument("--full-batch", action="store_true", help="gpext.fit's default route, until it converges")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/hyperparameter_gradients.json"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.quick:
        options.seeds, options.steps = 1, 20
    results: dict[str, Any] = {
        "num_steps": None if options.full_batch else options.steps,
        "batch_size": None if options.full_batch else options.batch_size,
        "seeds": options.seeds,
        "runs": {},
    }
    for dataset, likelihood in QUICK if options.quick else PROBLEMS:
        runs: dict[str, list[dict[str, float]]] = {bound: [] for bound in BOUNDS}
        for seed in range(options.seeds):
            problem = make_problem(dataset, likelihood, seed=seed)
            batch_size = min(options.batch_size, len(problem.train_y) // 4)
            for bound in BOUNDS:
                if options.full_batch:
                    runs[bound].append(run_full_batch(problem, bound, seed=seed))
                    continue
                trace = run_one(problem, bound, seed=seed, batch_size=batch_size, num_steps=options.steps)
                milliseconds = 1e3 * trace.train_seconds / max(trace.num_steps, 1)
                runs[bound].append({"log_density": trace.log_density[-1], "ms": milliseconds})
        results["runs"][f"{dataset}/{likelihood}"] = runs
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1))
    print(report(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
