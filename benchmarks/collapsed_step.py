"""Milliseconds of one evaluation of the collapsed bound with its gradient, beside the floor of its linear algebra.

In full batches `gpext.fit` does, for each L-BFGS iteration, one or two such evaluations and one refreshment of the
sites. The floor is the minimum that the formulas of `CollapsedBound` require on n data and M inducing points: one
kernel matrix M x n and the product that propagates its gradient back, two triangular solves, two products of size
M x M x n (the precision of q(u) at the sites and at the best ones), one of twice that size (the gradient in K_zx), and
for the M x M matrices two Cholesky factors, an inverse, two products and four solves. Both take turns; thread time.

    OMP_NUM_THREADS=1 python -m benchmarks.collapsed_step
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.harness import Problem
from benchmarks.ours import SiteLearner
from benchmarks.step_time import synthetic_problem
from benchmarks.tables import table
from gpext.variational import CollapsedBound


def floor(problem: Problem) -> Callable[[], object]:
    """Return a function that does the floor's operations and nothing else."""
    x, z = problem.train_x, problem.inducing_points
    num = len(z)
    right = torch.eye(num, dtype=x.dtype)
    k_zz = torch.exp(-0.5 * torch.cdist(z, z).square()) + right

    def evaluate() -> object:
        k_xz = (x @ z.mT).mul_(1e-2).exp_()
        chol = torch.linalg.cholesky(k_zz)
        a = torch.linalg.solve_triangular(chol, k_xz.mT, upper=False)
        gram, best = a @ a.mT, a @ a.mT
        precision = torch.linalg.cholesky(gram + right)
        torch.linalg.solve_triangular(precision, a, upper=False)
        covariance = torch.cholesky_inverse(precision)
        warp = covariance @ (gram - best) @ covariance
        for _ in range(4):
            torch.linalg.solve_triangular(chol, warp, upper=False)
        gradient = a.mT @ torch.cat([covariance, warp], -1)
        return k_xz.mul_(gradient[:, :num]).mT @ x

    return evaluate


def gpext(problem: Problem) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return an evaluation with its gradient at parameters that have moved, and a refreshment of the sites."""
    learner = SiteLearner(problem, seed=0, dtype=problem.train_x.dtype)
    learner.mll.train()
    strategy = learner.model.variational_strategy
    bound = CollapsedBound(strategy, learner.likelihood, problem.train_x, problem.train_y, bound="exact")
    parameters = list(learner.mll.parameters())
    moved = learner.model.covar_module.base_kernel.raw_lengthscale

    def evaluate() -> object:
        with torch.no_grad():
            moved.add_(1e-4)
        for parameter in parameters:
            parameter.grad = None
        return bound.evaluate()

    evaluate()
    return evaluate, bound.refresh


def measure(problem: Problem, rounds: int) -> list[float]:
    """Return median milliseconds of the floor, an evaluation and a refreshment, which take turns."""
    contestants = [floor(problem), *gpext(problem)]
    times: list[list[float]] = [[] for _ in contestants]
    for _ in range(rounds):
        for call, seen in zip(contestants, times, strict=True):
            start = time.thread_time()
            call()
            seen.append(1e3 * (time.thread_time() - start))
    return [statistics.median(seen) for seen in times]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1000, 3162, 10000])
    parser.add_argument("--dimension", type=int, default=8)
    parser.add_argument("--num-inducing", type=int, default=200)
    parser.add_argument("--likelihoods", nargs="+", default=["logit", "laplace"])
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for likelihood in args.likelihoods:
        for size in args.sizes:
            problem = synthetic_problem(
                likelihood, num_data=size, dimension=args.dimension, num_inducing=args.num_inducing
            )
            least, evaluation, refreshment = measure(problem, args.rounds)
            ratio = f"{evaluation:.1f} ({evaluation / least:.1f})"
            rows.append([likelihood, str(size), f"{least:.1f}", ratio, f"{refreshment:.1f}"])
    print(table(["likelihood", "n", "floor", "evaluation", "refreshment"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
