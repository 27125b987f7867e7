r"""Cost of a stochastic gradient of all hyperparameters where nothing can be factorised [FE15 Fig. 6].

The model and priors of `sgld_posterior`, at the mode of a subset of the data; four probes. Measured are wall-clock and
CPU times, and the peak memory of the process. Each row needs a separate process, as peak memory never decreases:

    python -m benchmarks.sgld_pace --data census_house_8L --dtype float32 --threads 2 --output results/sgld_pace.jsonl
    python -m benchmarks.sgld_pace --data generated --rows 200000 --dtype float32 --threads 2 --steps 1
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.datasets import load
from benchmarks.ledger import Ledger, Row
from benchmarks.sgld_posterior import ALL_ROWS, PROBES, Model
from benchmarks.tables import table
from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.operators import UnbiasedSolver
from gpext.samplers import SGLDSampler
from gpext.samplers.targets.mode import mode_and_scale

DAY = 24 * 3600
DIMENSION = 8  # of generated data


def generated(rows: int) -> tuple[Tensor, Tensor]:
    """Return inputs (n, 8) of standard normal numbers and targets (n,): a smooth function of them with noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, DIMENSION, dtype=torch.float64, generator=generator)
    weights = torch.randn(DIMENSION, 3, dtype=torch.float64, generator=generator) / DIMENSION**0.5
    y = (x @ weights).sin().sum(-1) + 0.5 * torch.randn(rows, dtype=torch.float64, generator=generator)
    return x, (y - y.mean()) / y.std()


def measure(options: argparse.Namespace) -> Row:
    """Return times and memory of a few gradients."""
    dtype = getattr(torch, options.dtype)
    if options.data == "generated":
        x, y = generated(options.rows)
    else:
        data = load(options.data, max_train=options.rows, test_fraction=0.0)
        x, y = data.train_x, data.train_y
    model = Model(x.to(dtype), y.to(dtype))
    solver = UnbiasedSolver(num_probes=options.probes, rank=options.rank, controlled=options.controlled)
    target = SGLDSampler(UnbiasedMarginalLogLikelihood(model.likelihood, model, solver=solver)).target
    generator = torch.Generator().manual_seed(0)
    before = time.perf_counter()
    mode, _ = mode_and_scale(target, generator)
    searched, clock, processor = time.perf_counter() - before, [], []
    for _ in range(options.steps):
        begun, used = time.perf_counter(), time.process_time()
        gradient = target.gradient(mode, generator=generator)
        clock.append(time.perf_counter() - begun)
        processor.append(time.process_time() - used)
    return {
        "data": options.data,
        "rows": options.rows,
        "dtype": options.dtype,
        "probes": options.probes,
        "controlled": options.controlled,
        "threads": options.threads,
        "search": searched,
        "clock": clock,
        "processor": processor,
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "gradient": gradient.tolist(),
    }


def report(ledger: Ledger) -> str:
    """Return the table."""
    cells = []
    for row in ledger.rows.values():
        seconds, used = (sorted(row[name])[len(row[name]) // 2] for name in ("clock", "processor"))
        probes = f"{row['probes']}" + ", controlled" * row["controlled"]
        named = [row["data"], str(row["rows"]), row["dtype"], probes]
        cells.append([*named, f"{seconds:.1f}", f"{used:.1f}", f"{DAY / seconds:.0f}", f"{row['mib']:.0f} MiB"])
    head = [
        "data",
        "rows",
        "numbers",
        "probes",
        "seconds a step",
        "seconds of processors",
        "steps a day",
        "peak memory",
    ]
    return table(head, cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", choices=[*ALL_ROWS, "generated"], default="census_house_8L")
    parser.add_argument("--rows", type=int, help="of the data; all by default, 200000 generated ones")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--probes", type=int, default=PROBES)
    parser.add_argument("--rank", type=int, help="of the preconditioner; chosen by what it saves by default")
    parser.add_argument("--controlled", action="store_true", help="derivatives of log|A| that the preconditioner knows")
    parser.add_argument("--steps", type=int, default=5, help="whose median is given")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    options.rows = {**ALL_ROWS, "generated": 200_000}[options.data] if options.rows is None else options.rows
    torch.set_num_threads(options.threads)
    ledger = Ledger(options.output)
    ledger.get(
        "/".join(str(vars(options)[name]) for name in vars(options) if name != "output"), lambda: measure(options)
    )
    print(report(ledger))
    return 0


if __name__ == "__main__":
    sys.exit(main())
