"""What the first states of `gpext.fit` lack: data in q(u), or learned hyperparameters?

The table has, for each of the first steps, the test log density of the model as it is, and with the best q(u) of more
data at the same hyperparameters. Milliseconds are thread time, without the evaluations.

    GPEXT_DATA=folder OMP_NUM_THREADS=1 python -m benchmarks.first_states --dataset susy --likelihood logit
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence

import torch

import gpext
from benchmarks.harness import LIKELIHOODS, Problem, evaluate, make_problem
from benchmarks.ours import SiteLearner
from benchmarks.tables import table
from gpext.variational import CollapsedBound


def with_q_of(learner: SiteLearner, problem: Problem, size: int) -> float:
    """Return the test log density with the best q(u) for the first `size` data, at the current hyperparameters."""
    other = copy.deepcopy(learner)
    strategy = other.model.variational_strategy
    bound = CollapsedBound(strategy, other.likelihood, problem.train_x[:size], problem.train_y[:size], bound="exact")
    bound.settle()
    bound.commit()
    return evaluate(problem, other)[1]


def first_states(problem: Problem, *, seed: int, num_steps: int, sizes: Sequence[int]) -> list[list[str]]:
    """Return a row per step: number, milliseconds so far, log density as it is, with q(u) of each number of data."""
    learner = SiteLearner(problem, seed=seed, dtype=problem.train_x.dtype)
    rows: list[list[str]] = []
    spent, since = 0.0, time.thread_time()

    def callback(step: int, value: float) -> bool:
        nonlocal spent, since
        spent += time.thread_time() - since
        densities = [evaluate(problem, learner)[1], *(with_q_of(learner, problem, size) for size in sizes)]
        rows.append([str(step), f"{1e3 * spent:.0f}", *(f"{each:.4f}" for each in densities)])
        since = time.thread_time()
        return step == num_steps

    generator = torch.Generator().manual_seed(seed)
    gpext.fit(learner.mll, problem.train_x, problem.train_y, generator=generator, progress=False, callback=callback)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="susy")
    parser.add_argument("--likelihood", choices=LIKELIHOODS, default="logit")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 3162, 10000])
    parser.add_argument("--num-inducing", type=int, default=200)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for seed in range(args.seeds):
        problem = make_problem(args.dataset, args.likelihood, seed=seed, num_inducing=args.num_inducing)
        first_states(problem, seed=seed, num_steps=2, sizes=args.sizes[:1])  # first calls do not count
        found = first_states(problem, seed=seed, num_steps=args.steps, sizes=args.sizes)
        rows += [[str(seed), *row] for row in found]
    print(table(["seed", "step", "ms", "as it is", *(f"q(u) of {size}" for size in args.sizes)], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
