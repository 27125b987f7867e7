"""Milliseconds of one training step of each method, beside the floor that its linear algebra sets.

The floor is the work that no sparse variational step can avoid: the distances by one product, the exponential of an
M x B matrix, one M x M Cholesky factor, two triangular solves and two products of size M x M x B. Methods and floor
take turns (A B C A B C ...), so the ratios hold even when the machine's speed drifts.

    OMP_NUM_THREADS=1 python -m benchmarks.step_time --output benchmarks/results/step_time.json
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning
from tqdm import tqdm

from benchmarks.augmented_svi import machine, package_versions, write_atomically
from benchmarks.harness import LIKELIHOODS, Initial, Problem
from benchmarks.methods import METHODS
from benchmarks.ours import SiteLearner
from gpext.training.minibatch import Minibatches

STEPS_A_ROUND = 20
CPU = torch.device("cpu")


def synthetic_problem(likelihood: str, *, num_data: int, dimension: int, num_inducing: int, seed: int = 0) -> Problem:
    """Return data whose only purpose is their size: a sine surface with noise of the right kind."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_data, dimension, generator=generator, dtype=torch.float64)
    f = torch.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1]
    uniform = torch.rand(num_data, generator=generator, dtype=torch.float64)
    y = (uniform < torch.sigmoid(2 * f)).double() if likelihood == "logit" else f + 0.3 * torch.logit(uniform, eps=1e-6)
    return Problem(
        dataset="synthetic",
        likelihood=likelihood,
        train_x=x,
        train_y=y,
        test_x=x[:10],
        test_y=y[:10],
        inducing_points=x[torch.randperm(num_data, generator=generator)[:num_inducing]],
        initial=Initial(lengthscale=math.sqrt(dimension)),
    )


def floor_step(
    problem: Problem, *, batch_size: int, dtype: torch.dtype, device: torch.device = CPU
) -> Callable[[], object]:
    """Return the linear algebra alone: one call does the floor's operations and nothing else."""
    z = problem.inducing_points.to(device, dtype)
    x = problem.train_x[:batch_size].to(device, dtype)
    num = len(z)
    squares_z, squares_x = z.square().sum(-1), x.square().sum(-1)
    k_zz = torch.exp(-0.5 * torch.cdist(z, z).square()) + torch.eye(num, dtype=dtype, device=device)

    def step() -> object:
        distance = torch.addmm(squares_z[:, None] + squares_x, z, x.T, alpha=-2.0)  # (M, B)
        k_zx = distance.mul_(-0.5).exp_()
        factor = torch.linalg.cholesky(k_zz)
        a = torch.linalg.solve_triangular(factor, k_zx, upper=False)
        b = torch.linalg.solve_triangular(factor.T, a, upper=True)
        return k_zz @ b, a @ k_zx.T

    return step


def next_step(
    problem: Problem, name: str, *, batch_size: int, dtype: torch.dtype, device: torch.device = CPU
) -> Callable[[], object]:
    """Return a function whose calls do successive steps of a method, or of the floor, each on the next minibatch."""
    if name == "floor":
        return floor_step(problem, batch_size=batch_size, dtype=dtype, device=device)
    make = METHODS[name].learner
    assert make is not None
    learner = make(problem, seed=0, dtype=dtype, **METHODS[name].options)
    learner.model.to(device)
    learner.likelihood.to(device)
    x, y = problem.train_x.to(device, dtype), problem.train_y.to(device, dtype)
    batches = Minibatches(len(y), batch_size, torch.Generator().manual_seed(0))
    if isinstance(learner, SiteLearner):
        return lambda: learner.next_step(x, y, batches)

    def step() -> None:
        index = batches.draw()
        learner.step(x[index], y[index])

    return step


def measure(
    *,
    likelihood: str,
    batch_size: int,
    dtype: torch.dtype,
    num_data: int,
    dimension: int,
    num_inducing: int,
    num_rounds: int,
    methods: Sequence[str],
) -> dict[str, float]:
    """Return milliseconds a step of each contestant, including ``floor``: medians over rounds of means over a round.

    A round is twenty steps of each in turn, because a method need not do the same work in every step: gpext moves its
    hyperparameters only every few steps. Every step has a new minibatch, selected within the measured time; gpext
    selects its own, as in `gpext.fit`, and evaluates the kernel for several at once.

    A learner that breaks down numerically (stock NGD with a Student-t likelihood does) is restarted: this benchmark
    measures the time of a step, not convergence.
    """
    problem = synthetic_problem(likelihood, num_data=num_data, dimension=dimension, num_inducing=num_inducing)

    def make_step(name: str) -> Callable[[], object]:
        return next_step(problem, name, batch_size=batch_size, dtype=dtype)

    steps = {name: make_step(name) for name in ["floor", *methods]}
    # Thread time is not lengthened by other programs, but excludes the work of further threads.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(num_rounds + 1):
        for name in steps:
            start = clock()
            try:
                for _ in range(STEPS_A_ROUND):
                    steps[name]()
            except (NotPSDError, NanError, torch.linalg.LinAlgError):
                steps[name] = make_step(name)
                continue
            if turn >= 1:  # the first round warms caches and allocators
                times[name].append(1e3 * (clock() - start) / STEPS_A_ROUND)
    return {name: statistics.median(values or [math.nan]) for name, values in times.items()}


def report(results: Mapping[str, Any]) -> str:
    """Return a markdown table: milliseconds, and in brackets the ratio to the floor."""
    names = list(dict.fromkeys(name for cell in results["cells"] for name in cell["milliseconds"]))
    lines = [
        f"Milliseconds a step (ratio to the floor) on {results['machine']['cpu']}, {results['threads']} threads; "
        f"N = {results['num_data']}, d = {results['dimension']}, M = {results['num_inducing']}.",
        "",
        "| likelihood | type | batch | " + " | ".join(names) + " |",
        "| --- | --- | ---: |" + " ---: |" * len(names),
    ]
    for cell in results["cells"]:
        times = cell["milliseconds"]
        values = [f"{times[n]:.2f} ({times[n] / times['floor']:.1f})" if n in times else "" for n in names]
        lines.append(f"| {cell['likelihood']} | {cell['dtype']} | {cell['batch_size']} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every combination, print the table, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    timed = [name for name, method in METHODS.items() if method.learner is not None]
    parser.add_argument("--quick", action="store_true", help="tiny sizes, a few seconds")
    parser.add_argument("--methods", nargs="+", choices=timed, default=timed)
    parser.add_argument("--likelihoods", nargs="+", choices=LIKELIHOODS, default=["laplace"])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "float64"], default=["float64", "float32"])
    parser.add_argument("--batch-size", nargs="+", type=int, default=[100, 1000])
    parser.add_argument("--num-data", type=int, default=50_000)
    parser.add_argument("--dimension", type=int, default=10)
    parser.add_argument("--num-inducing", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args(arguments)
    if args.quick:
        args.num_data, args.num_inducing, args.rounds = 2000, 20, 3
    torch.set_num_threads(args.threads)

    combinations = [(k, t, b) for k in args.likelihoods for t in args.dtypes for b in args.batch_size]
    cells = []
    for likelihood, dtype, batch_size in tqdm(combinations, disable=None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)  # jitter added to a Cholesky factor
            milliseconds = measure(
                likelihood=likelihood,
                batch_size=batch_size,
                dtype=getattr(torch, dtype),
                num_data=args.num_data,
                dimension=args.dimension,
                num_inducing=args.num_inducing,
                num_rounds=args.rounds,
                methods=args.methods,
            )
        cells.append({"likelihood": likelihood, "dtype": dtype, "batch_size": batch_size, "milliseconds": milliseconds})
    results = {
        "machine": machine(),
        "versions": package_versions(),
        "threads": args.threads,
        "num_data": args.num_data,
        "dimension": args.dimension,
        "num_inducing": args.num_inducing,
        "cells": cells,
    }
    if args.output is not None:
        write_atomically(args.output, results)
    print(report(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
