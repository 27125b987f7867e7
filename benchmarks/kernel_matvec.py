"""Products with kernel matrices that are not stored: gpext's tiles, gpytorch's KeOps kernels, and a stored matrix.

For each size, profile and type: seconds of K @ V, and of sum(U * (K @ V)) with its derivatives in all length scales,
by autograd from K @ V and, for the tiles, by `bilinear_form`, which makes one pass. Contestants take turns (A B C A B C
...), the first turn, in which KeOps compiles, not counted; so the ratios hold even when the machine's speed drifts. A
stored K is computed once, beforehand, and not counted either. Rows are written as they are finished, and an interrupted
run resumes after the last one. KeOps reads its compiler flags from the environment; they are part of a row's key:

    OMP_NUM_THREADS=1 python -m benchmarks.kernel_matvec --output benchmarks/results/kernel_matvec.jsonl
    CXXFLAGS="-march=native -ffast-math" OMP_NUM_THREADS=1 python -m benchmarks.kernel_matvec --output (the same)
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.ledger import Ledger, Row, measure_and_report
from benchmarks.tables import table
from gpext.kernels import keops

MOST_STORED = 2**31  # bytes
PROFILES: dict[str, Callable[..., gpytorch.kernels.Kernel]] = {
    "rbf": lambda module, d, **own: module.RBFKernel(ard_num_dims=d, **own),
    "matern32": lambda module, d, **own: module.MaternKernel(nu=1.5, ard_num_dims=d, **own),
    "matern52": lambda module, d, **own: module.MaternKernel(nu=2.5, ard_num_dims=d, **own),
}
CONTESTANTS = ("tiles", "keops", "stored")


def product(kernel: gpytorch.kernels.Kernel, x: Tensor, v: Tensor) -> Tensor:
    """Return K @ V without derivatives, never by a stored K."""
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(1):
        return kernel(x).evaluate_kernel() @ v


def product_and_derivatives(kernel: gpytorch.kernels.Kernel, x: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return K @ V, and the derivatives of sum(U * (K @ V)) in the raw length scales."""
    with gpytorch.settings.max_cholesky_size(1):
        found = kernel(x).evaluate_kernel() @ v
        (derivatives,) = torch.autograd.grad((u * found).sum(), [kernel.raw_lengthscale])
    return found.detach(), derivatives


def measure(
    profile: str, dtype: torch.dtype, *, n: int, dimension: int, columns: int, contestants: Sequence[str], rounds: int
) -> Row:
    """Return median seconds by task and contestant, and by task the largest relative difference between contestants."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, dimension, generator=generator, dtype=torch.float64).to(dtype)
    u, v = torch.randn(2, n, columns, generator=generator, dtype=torch.float64).to(dtype)
    kernels = {
        "tiles": PROFILES[profile](keops, dimension, backend="tiles").to(dtype),
        **({"keops": PROFILES[profile](gpytorch.kernels.keops, dimension).to(dtype)} if "keops" in contestants else {}),
    }
    for kernel in kernels.values():
        kernel.lengthscale = math.sqrt(dimension)
    tasks: dict[str, dict[str, Callable[[], Tensor]]] = {
        "product": {name: lambda k=kernel: product(k, x, v) for name, kernel in kernels.items()},
        "derivatives": {
            **{name: lambda k=kernel: product_and_derivatives(k, x, u, v)[1] for name, kernel in kernels.items()},
            "one pass": lambda: form_and_derivatives(kernels["tiles"], x, u, v)[1],
        },
    }
    if "stored" in contestants and n * n * x.element_size() <= MOST_STORED:
        with torch.no_grad():
            plain = PROFILES[profile](gpytorch.kernels, dimension).to(dtype)
            plain.lengthscale = math.sqrt(dimension)
            K = plain(x).to_dense()
        tasks["product"]["stored"] = lambda: K @ v
    seconds, differences = {}, {}
    for task, calls in tasks.items():
        seconds[task], found = in_turns(calls, rounds)
        first, *others = found.values()
        differences[task] = max((float((t - first).norm() / first.norm()) for t in others), default=0.0)
    return {
        "profile": profile,
        "dtype": str(dtype).removeprefix("torch."),
        "n": n,
        "dimension": dimension,
        "columns": columns,
        "threads": torch.get_num_threads(),
        "flags": os.environ.get("CXXFLAGS", ""),
        "seconds": seconds,
        "differences": differences,
    }


def form_and_derivatives(kernel: gpytorch.kernels.Kernel, x: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum(U * (K @ V)) and its derivatives in the raw length scales, from one pass over K."""
    with gpytorch.settings.max_cholesky_size(1):
        form = kernel(x).evaluate_kernel().bilinear_form(u, v)
        (derivatives,) = torch.autograd.grad(form, [kernel.raw_lengthscale])
    return form.detach(), derivatives


def in_turns(calls: Mapping[str, Callable[[], Tensor]], rounds: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the median seconds of each call, and its results."""
    found = {name: call() for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}, found


def report(ledger: Ledger) -> str:
    """Return a markdown table: milliseconds of the tiles, and the other contestants' times over theirs."""
    head = ["kernel", "type", "d", "n", "columns", "threads", "flags", "K V, ms", "Gel/s", "KeOps", "stored"]
    head += ["and gradient, ms", "KeOps", "in one pass, ms", "KeOps"]
    lines = []
    for row in sorted(ledger.rows.values(), key=_order):
        product, derivatives = row["seconds"]["product"], row["seconds"]["derivatives"]

        def ratio(times: Mapping[str, float], name: str, ours: str = "tiles") -> str:
            return f"{times[name] / times[ours]:.2f}" if name in times else ""

        lines.append(
            [
                *(str(row[name]) for name in ("profile", "dtype", "dimension", "n", "columns", "threads")),
                row["flags"] or "default",
                f"{1e3 * product['tiles']:.1f}",
                f"{1e-9 * row['n'] ** 2 / product['tiles']:.2f}",
                ratio(product, "keops"),
                ratio(product, "stored"),
                f"{1e3 * derivatives['tiles']:.1f}",
                ratio(derivatives, "keops"),
                f"{1e3 * derivatives['one pass']:.1f}",
                ratio(derivatives, "keops", "one pass"),
            ]
        )
    return table(head, lines)


def _order(row: Row) -> tuple[Any, ...]:
    return row["flags"], row["dimension"], row["n"], row["columns"], row["profile"], row["dtype"], row["threads"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny size, a few seconds but for KeOps' compilations")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS[1:], default=list(CONTESTANTS[1:]))
    parser.add_argument("--profiles", nargs="+", choices=list(PROFILES), default=["rbf", "matern32"])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "float64"], default=["float64", "float32"])
    parser.add_argument("--num-data", nargs="+", type=int, default=[5000, 10_000, 20_000, 50_000, 100_000])
    parser.add_argument("--dimension", nargs="+", type=int, default=[2, 8, 32])
    parser.add_argument("--columns", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--report-only", action="store_true", help="run nothing; print the table of what is there")
    options = parser.parse_args(arguments)
    if options.quick:
        options.num_data, options.dimension, options.columns, options.rounds = [700], [2], [1], 3
    return options


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure every combination that is missing."""
    contestants = ["tiles", *options.contestants]
    flags = os.environ.get("CXXFLAGS", "")
    cells = itertools.product(options.num_data, options.dimension, options.profiles, options.dtypes, options.columns)
    for n, dimension, profile, dtype, columns in tqdm(list(cells), disable=None):
        ledger.get(
            f"{profile} {dtype} d={dimension} n={n} columns={columns} threads={options.threads} "
            f"{'+'.join(contestants)} {flags}",
            lambda p=profile, t=dtype, n=n, d=dimension, c=columns: measure(
                p, getattr(torch, t), n=n, dimension=d, columns=c, contestants=contestants, rounds=options.rounds
            ),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not in the file yet, and print the table."""
    measure_and_report(parse(arguments), run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
