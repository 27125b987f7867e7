"""A training step of a softmax model under Laplace, in units of the Cholesky factors that it computes.

A training step is the evidence and its gradient, after a step of Adam. Plain Newton steps for D classes factorise D + 1
matrices of size N x N each; `gpext.inference.Laplace` solves most of them by conjugate gradients with an earlier
factorisation, in float32 ("plain Newton" in the table is a training step without that). Factors are counted as they are
computed, of either precision, and one of float64 is timed apart: the least of a few repetitions of D + 1, in turn with
steps. CPU time, one thread.

    OMP_NUM_THREADS=1 python -m benchmarks.softmax_step --output softmax_step.jsonl
    python -m benchmarks.softmax_step --quick     # the smallest size alone
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from benchmarks.ledger import Ledger, Row, command_line, measure_and_report
from benchmarks.tables import table
from gpext.inference import Laplace
from gpext.inference.problem import Problem
from gpext.likelihoods import MultinomialLogitLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models import LatentGP

SIZES = ((300, 4), (600, 4), (700, 11), (1200, 4))
_REPEATS = 5


class Softmax(LatentGP):
    """Classes under a Matern-5/2 kernel with a lengthscale for each input: one of all classes, or one for each."""

    def __init__(self, x: Tensor, y: Tensor, *, num_classes: int, shared: bool) -> None:
        super().__init__(x, y, MultinomialLogitLikelihood(num_classes), Laplace())
        shape = torch.Size([]) if shared else torch.Size([num_classes])
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=torch.Size([num_classes]))
        base = gpytorch.kernels.MaternKernel(2.5, ard_num_dims=x.size(-1), batch_shape=shape)
        self.covar_module = gpytorch.kernels.ScaleKernel(base, batch_shape=shape)
        self.to(x.dtype)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@contextmanager
def counted_factors() -> Iterator[list[int]]:
    """Yield a list to which each call of `torch.linalg.cholesky_ex` appends its number of matrices."""
    factorise, counts = torch.linalg.cholesky_ex, []

    def counting(matrix: Tensor, **options: Any) -> Any:
        counts.append(matrix.shape[:-2].numel())
        return factorise(matrix, **options)

    with mock.patch.object(torch.linalg, "cholesky_ex", counting):
        yield counts


def _no_refinement(problem: Any, posterior: Any, f: Tensor, weights: Tensor, tolerance: float) -> Any:
    return f, weights, torch.full_like(problem.inner(f, f), torch.inf)


def measure(size: int, num_classes: int, *, shared: bool) -> Row:
    """Return seconds of D + 1 Cholesky factors and of a training step, and the factors of a step."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 10, generator=generator, dtype=torch.float64)
    weights = torch.randn(10, num_classes, generator=generator, dtype=torch.float64)
    y = (x @ weights + torch.randn(size, num_classes, generator=generator, dtype=torch.float64)).argmax(-1)
    model = Softmax(x, y, num_classes=num_classes, shared=shared).train()
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)

    def step() -> None:
        optimizer.zero_grad()
        (-mll(model(x), y)).backward()
        optimizer.step()

    matrix = torch.eye(size, dtype=torch.float64) + model.covar_module(x).to_dense().detach().reshape(-1, size, size)[0]
    matrices = matrix.expand(num_classes + 1, size, size).contiguous()
    step()
    factors, steps, plain = [], [], []
    with counted_factors() as of_steps:
        for _ in range(_REPEATS):
            steps.append(_seconds(step))
            count = sum(of_steps)
            factors.append(_seconds(lambda: torch.linalg.cholesky_ex(matrices)))
            of_steps.clear()
    with (
        counted_factors() as of_plain,
        mock.patch("gpext.inference.laplace.refine_mode", _no_refinement),
        mock.patch.object(Problem, "condition_roughly", Problem.condition),
    ):
        for _ in range(_REPEATS):
            of_plain.clear()
            plain.append(_seconds(step))
    return {
        "factors": min(factors) / (num_classes + 1),
        "step": min(steps),
        "number": count,
        "plain": min(plain),
        "plain_number": sum(of_plain),
    }


def _seconds(step: Callable[[], object]) -> float:
    begin = time.process_time()
    step()
    return time.process_time() - begin


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure the missing rows."""
    for size, num_classes in SIZES[:1] if options.quick else SIZES:
        for shared in (True, False):
            key = f"{size}/{num_classes}/{'one' if shared else 'each'}"
            ledger.get(key, lambda n=size, d=num_classes, s=shared: measure(n, d, shared=s))


def report(ledger: Ledger) -> str:
    """Return the table."""
    rows = []
    for key, row in ledger.rows.items():
        one = row["factors"]
        rows.append(
            [
                *key.split("/"),
                f"{1e3 * one:.1f}",
                f"{row['number']}",
                f"{1e3 * row['step']:.0f}",
                f"{row['step'] / one / row['number']:.1f}",
                f"{row['plain_number']}",
                f"{1e3 * row['plain']:.0f}",
                f"{row['step'] / one / row['plain_number']:.1f}",
            ]
        )
    head = ["N", "classes", "kernel", "a factor, ms", "factors", "step, ms", "step in its factors"]
    return table([*head, "factors of plain Newton", "its step, ms", "step in those factors"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    measure_and_report(command_line(__doc__, quick="the smallest size alone").parse_args(arguments), run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
