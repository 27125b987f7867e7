"""Likelihoods of several latents [Cha13]: the cost of the structured algebra, and the predictions.

time          Laplace for D classes and N data, one Newton step: D + 1 Cholesky factors of size N, beside the dense
              system of size N D.
headings      angles of turned triangles, and
wind          directions of the wind: see `benchmarks.angles`.
simplex       probabilities from quantised ones: see `benchmarks.simplex_recovery`.
compositions  real proportions: see `benchmarks.compositions`.
annotation    the digits in a picture: see `benchmarks.annotation`.

    python -m benchmarks.multivariate_efd time headings wind --output results/multivariate_efd.jsonl

Finished rows are not run again.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.angles import draw_headings, report_headings, report_wind, run_headings, run_wind
from benchmarks.annotation import report_annotation, run_annotation
from benchmarks.compositions import report_compositions, run_compositions
from benchmarks.ledger import Ledger, Row
from benchmarks.simplex_recovery import report_simplex, run_simplex
from gpext.posteriors import condition_coupled
from gpext.sites import CoupledSites

LATENTS = (2, 3, 4, 6, 8)
DENSE_UP_TO = 4  # latents: at 6 the dense system of N = 500 takes a minute


def problem(latents: int, size: int) -> tuple[Tensor, Tensor, CoupledSites]:
    """Return prior means, covariances and the sites of a softmax at random latent values."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 6, size, dtype=torch.float64)
    covariance = torch.exp(-0.5 * (x.unsqueeze(-1) - x) ** 2) + 1e-6 * torch.eye(size, dtype=torch.float64)
    probs = torch.randn(latents, size, dtype=torch.float64, generator=generator).softmax(-2)
    shift = torch.randn(latents, size, dtype=torch.float64, generator=generator)
    sites = CoupledSites(shift, probs, -torch.ones(size, dtype=torch.float64), probs)
    return torch.zeros_like(shift), covariance.expand(latents, size, size).contiguous(), sites


def structured(mean: Tensor, covariance: Tensor, sites: CoupledSites) -> tuple[Tensor, Tensor]:
    """Return the posterior means and the evidence of the sites."""
    posterior = condition_coupled(mean, covariance, sites)
    return posterior.mean, posterior.log_normalizer


def dense(mean: Tensor, covariance: Tensor, sites: CoupledSites) -> tuple[Tensor, Tensor]:
    """Return the same quantities by one system of size N D."""
    latents, size = mean.shape
    K = torch.block_diag(*covariance)
    U = torch.diag(sites.precision.flatten()).view(latents, size, latents, size)
    along = sites.coupling * sites.direction.unsqueeze(1) * sites.direction
    index = torch.arange(size)
    U[:, index, :, index] += along.movedim(-1, 0)
    U = U.reshape(latents * size, -1)
    response = torch.linalg.lu_factor(torch.eye(len(K), dtype=K.dtype) + U @ K)
    shift = sites.shift.flatten().unsqueeze(-1)
    weights = torch.linalg.lu_solve(*response, shift)
    fitted = (K @ weights).squeeze(-1)
    log_det = response[0].diagonal().abs().log().sum()
    return fitted.view_as(mean), 0.5 * (shift.squeeze(-1) @ fitted) - 0.5 * log_det


def seconds(run: Callable[[], object], repetitions: int) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def run_time(ledger: Ledger, options: argparse.Namespace) -> None:
    """Time one posterior of each number of latents."""
    size, repetitions = (60, 2) if options.quick else (500, 9)
    for latents in LATENTS:
        given = problem(latents, size)

        def measure(latents: int = latents, given: tuple[Tensor, Tensor, CoupledSites] = given) -> Row:
            row: Row = {"latents": latents, "size": size}
            row["structured"] = seconds(lambda: structured(*given), repetitions)
            if latents <= DENSE_UP_TO:
                row["dense"] = seconds(lambda: dense(*given), min(repetitions, 3))
                pairs = zip(structured(*given), dense(*given), strict=True)
                row["difference"] = max(float((a - b).abs().max()) for a, b in pairs)
            return row

        ledger.get(f"time/{size}/{latents}", measure)


def exponent(rows: Sequence[Row], name: str) -> float:
    """Return the slope of log time over log D by least squares."""
    known = [(math.log(row["latents"]), math.log(row[name])) for row in rows if name in row]
    mean_x, mean_y = (sum(values) / len(known) for values in zip(*known, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in known)
    return sum((x - mean_x) * (y - mean_y) for x, y in known) / spread


def report_time(ledger: Ledger) -> str:
    """Return the table of times, and how they grow."""
    lines = ["| N | D | structured, ms | dense, ms | largest difference |", "| --- | --- | --- | --- | --- |"]
    rows = ledger.of("time/")
    for row in rows:
        dense_ms = f"{1e3 * row['dense']:.1f} | {row['difference']:.1e}" if "dense" in row else " | "
        lines.append(f"| {row['size']} | {row['latents']} | {1e3 * row['structured']:.1f} | {dense_ms} |")
    grown = ", ".join(f"{name} D^{exponent(rows, name):.2f}" for name in ("structured", "dense"))
    return "\n".join([*lines, "", f"Time grows as {grown}."])


PARTS: dict[str, tuple[Callable[[Ledger, argparse.Namespace], None], Callable[[Ledger], str]]] = {
    "time": (run_time, report_time),
    "headings": (run_headings, report_headings),
    "wind": (run_wind, report_wind),
    "simplex": (run_simplex, report_simplex),
    "compositions": (run_compositions, report_compositions),
    "annotation": (run_annotation, report_annotation),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="few small problems, some seconds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--figure", type=Path, help="where to draw the errors of the headings")
    parser.add_argument("--report-only", action="store_true", help="print the tables of --output and stop")
    options = parser.parse_args(arguments)
    options.parts = options.parts or list(PARTS)
    if not set(options.parts) <= set(PARTS):
        parser.error(f"parts are {', '.join(PARTS)}; got {options.parts}")
    torch.set_num_threads(options.threads)
    ledger = Ledger(options.output)
    for part in options.parts:
        run, report = PARTS[part]
        if not options.report_only:
            run(ledger, options)
        print(f"\n## {part}\n\n{report(ledger)}")
    if options.figure is not None:
        draw_headings(ledger, options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
