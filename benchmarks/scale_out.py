r"""Speed-up of several processes over one, and their communication: torch.distributed over loopback.

One thread per process, gloo. "svi": closed-form steps of q(u) with derivatives of all hyperparameters, M inducing
points and a separate minibatch for every rank, so that a step uses more data. "svi, one batch": one minibatch divided
among the ranks. "svi as in fit": derivatives only at every tenth step, as `gpext.fit` computes them for 50000 data or
more. "product": K @ v by tiles divided among the ranks. Throughput is data (or products) a second over that of one
process, which takes its turn in every round, as the machine's speed drifts. Seconds and numbers of communication are
those that a rank counts; CPU seconds are those of the busiest rank, which other programs affect less than wall-clock
time.

    python -m benchmarks.scale_out --ranks 1 2 --output results/scale_out.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpytorch
import torch
import torch.distributed as dist
from torch import Tensor

import gpext
from benchmarks.ledger import Ledger, Row
from benchmarks.tables import table
from gpext.kernels import keops
from gpext.parallel import Ranks

TASKS = ("svi", "svi, one batch", "svi as in fit", "svi as in fit, one batch", "product")


class Sparse(gpytorch.models.ApproximateGP):
    """A Student-t regression with the given inducing points."""

    def __init__(self, inducing_points: Tensor) -> None:
        super().__init__(gpext.variational.SiteVariationalStrategy(self, inducing_points))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(ard_num_dims=inducing_points.size(-1))
        )
        self.to(inducing_points)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """Return the prior at x."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def svi(ranks: Ranks, options: argparse.Namespace, batch: int, interval: int) -> Callable[[], object]:
    """Return a step: an update of q(u), and at intervals derivatives of the hyperparameters and a small move."""
    generator = torch.Generator().manual_seed(ranks.rank)
    x = torch.randn(4 * batch, 8, generator=generator, dtype=torch.float64)
    y = torch.sin(1.5 * x[:, 0]) + 0.3 * torch.randn(len(x), generator=generator, dtype=torch.float64)
    Z = torch.randn(options.inducing, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model, likelihood = Sparse(Z), gpext.likelihoods.StudentTLikelihood().double()
    optimizer = torch.optim.Adam([*model.hyperparameters(), *likelihood.parameters()], lr=1e-3)
    numbers = itertools.count()

    def step() -> None:
        is_moving = next(numbers) % interval == 0
        optimizer.zero_grad()
        chosen = torch.randperm(len(x), generator=generator)[:batch]
        model.variational_strategy.update(
            x[chosen],
            y[chosen],
            likelihood,
            0.1,
            ranks.size * len(x),
            gradient="exact" if is_moving else None,
            share=len(x),
            ranks=ranks,
        )
        if is_moving:
            optimizer.step()

    return step


def product(ranks: Ranks, options: argparse.Namespace) -> Callable[[], object]:
    """Return a product of an n x n kernel matrix and a vector."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.num_data, 8, generator=generator, dtype=torch.float64)
    v = torch.randn(options.num_data, 1, generator=generator, dtype=torch.float64)
    kernel = keops.RBFKernel(backend="tiles").double()
    kernel.lengthscale = 8**0.5
    keops.share_products(kernel, ranks)
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(1):
        K = kernel(x).evaluate_kernel()
    return lambda: K._matmul(v)


def _work(rank: int, size: int, task: str, options: argparse.Namespace, folder: str) -> None:
    """Time the task on this rank and write the measurements to the folder."""
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    ranks = Ranks()
    if task == "product":
        step = product(ranks, options)
    else:
        own = options.batch // size if task.endswith("one batch") else options.batch
        step = svi(ranks, options, own, 10 if task.startswith("svi as in fit") else 1)
    step()
    ranks.any(False)
    before = ranks.traffic.numbers, ranks.traffic.seconds
    begun, busy = time.perf_counter(), time.process_time()
    for _ in range(options.steps):
        step()
    seconds, cpu = (time.perf_counter() - begun) / options.steps, (time.process_time() - busy) / options.steps
    numbers = (ranks.traffic.numbers - before[0]) / options.steps
    talking = (ranks.traffic.seconds - before[1]) / options.steps
    torch.save({"seconds": seconds, "cpu": cpu, "numbers": numbers, "communication": talking}, f"{folder}/{rank}.pt")
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def once(task: str, size: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the measurements of rank 0, with the seconds of the slowest rank and the CPU seconds of the busiest."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=_work, args=(r, size, task, options, folder)) for r in range(size)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise RuntimeError(f"a rank of {task} over {size} processes has failed.")
        seen = [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(size)]
    return {**seen[0], **{name: max(each[name] for each in seen) for name in ("seconds", "cpu")}}


def measure(task: str, options: argparse.Namespace) -> Row:
    """Return medians over rounds in which every number of ranks takes its turn."""
    rounds: list[dict[int, dict[str, float]]] = [
        {size: once(task, size, options) for size in options.ranks} for _ in range(options.rounds)
    ]
    row: dict[str, Any] = {}
    for size in options.ranks:
        work = 1 if task == "product" or task.endswith("one batch") else size  # of a step, in steps of one process
        row[str(size)] = {
            **{name: statistics.median(each[size][name] for each in rounds) for name in rounds[0][size]},
            **{
                f"throughput by {clock}": statistics.median(
                    work * each[options.ranks[0]][clock] / each[size][clock] for each in rounds
                )
                for clock in ("seconds", "cpu")
            },
        }
    return row


def report(ledger: Ledger) -> str:
    """Return the table."""
    head = ["task", "ranks", "ms a step", "throughput over one", "ms of CPU", "by CPU", "numbers a step"]
    lines = [
        [
            key,
            size,
            f"{1e3 * seen['seconds']:.1f}",
            f"{seen['throughput by seconds']:.2f}",
            f"{1e3 * seen['cpu']:.1f}",
            f"{seen['throughput by cpu']:.2f}",
            f"{seen['numbers']:.0f}",
            f"{1e3 * seen['communication']:.2f}",
        ]
        for key, row in ledger.rows.items()
        for size, seen in row.items()
        if size != "key"
    ]
    return table([*head, "communication, ms"], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one round")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], help="the first is the yardstick")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--inducing", type=int, default=500)
    parser.add_argument("--num-data", type=int, default=20_000, help="of the product")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if options.quick:
        options.ranks, options.batch, options.inducing, options.num_data = [1, 2], 40, 10, 600
        options.steps, options.rounds = 2, 1
    ledger = Ledger(options.output)
    for task in options.tasks:
        key = f"{task}, batch {options.batch}, M = {options.inducing}"
        key = f"{task}, n = {options.num_data}" if task == "product" else key
        ledger.get(key, lambda task=task: measure(task, options))
    print(report(ledger))
    return 0


if __name__ == "__main__":
    sys.exit(main())
