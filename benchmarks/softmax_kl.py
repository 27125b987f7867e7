"""KL for several classes: steps and seconds, and the same with its Newton steps preconditioned by each class alone.

`gpext.inference.KL` solves for the means of all classes together by conjugate gradients. Where 24 products with the
posterior of each class by itself do not suffice, their preconditioner couples the classes of a datum as a softmax does
("coupled"). Without that ("apart") there are up to fifty, and where these do not suffice the steps are poor ones. Rows
are random, inputs standardised; a Matern-5/2 kernel of one lengthscale, sqrt(d) for outputscales up to 30 and three
times that beyond; from no start. CPU time, one thread.

    GPEXT_DATA=folder OMP_NUM_THREADS=1 python -m benchmarks.softmax_kl --output softmax_kl.jsonl
    python -m benchmarks.softmax_kl --quick     # 60 rows of generated classes
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from unittest import mock

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel
from linear_operator import to_linear_operator

from benchmarks.estimators import read
from benchmarks.ledger import Ledger, Row, command_line, measure_and_report
from benchmarks.tables import table
from gpext.inference import KL
from gpext.likelihoods import MultinomialLogitLikelihood

SETS = {"glass": 200, "vowel": 400, "vehicle": 300}
SCALES = (1.0, 30.0, 1e4)
_LARGE = 100.0  # outputscale, beyond which lengthscales are three times as long
_COUPLED = "gpext.inference.drivers.fixed_point.can_be_coupled"


def data(name: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs (N, d) and classes (N,) of a set, or generated ones."""
    rng = np.random.default_rng(0)
    if name == "generated":
        x = rng.standard_normal((size, 2))
        return x, (x @ rng.standard_normal((2, 3)) + 0.5 * rng.standard_normal((size, 3))).argmax(1)
    x, y = read(name)
    rows = rng.permutation(len(y))[:size]
    return x[rows], np.unique(y[rows], return_inverse=True)[1]


def measure(name: str, size: int, scale: float, *, coupled: bool) -> Row:
    """Return the steps and CPU seconds of an inference, its status and the evidence."""
    x, y = data(name, size)
    x = x[:, x.std(0) > 0]
    inputs = torch.from_numpy((x - x.mean(0)) / x.std(0))
    kernel = MaternKernel(2.5).double()
    kernel.lengthscale = (1 if scale < _LARGE else 3) * x.shape[1] ** 0.5
    classes = int(y.max()) + 1
    with torch.no_grad():
        covariance = to_linear_operator(scale * kernel(inputs).to_dense())
    prior = MultivariateNormal(torch.zeros(classes, len(y), dtype=torch.float64), covariance)
    labels, likelihood = torch.from_numpy(y), MultinomialLogitLikelihood(classes)
    started = time.process_time()
    with nullcontext() if coupled else mock.patch(_COUPLED, return_value=False):
        result = KL().infer(prior, likelihood, labels)
    return {
        "steps": len(result.trace),
        "seconds": time.process_time() - started,
        "status": result.status.name,
        "evidence": float(result.log_evidence),
    }


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure the missing rows."""
    for name, size in {"generated": 60}.items() if options.quick else SETS.items():
        for scale in SCALES[:2] if options.quick else SCALES:
            for how in ("coupled", "apart"):
                key = f"{name}/{size}/{scale:g}/{how}"
                ledger.get(key, lambda n=name, d=size, s=scale, h=how: measure(n, d, s, coupled=h == "coupled"))


def report(ledger: Ledger) -> str:
    """Return the table."""
    rows = []
    for key, row in ledger.rows.items():
        if key.endswith("/coupled") and (other := ledger.rows.get(key.replace("/coupled", "/apart"))):
            found = [
                f"{r['steps']}" + ("" if r["status"] == "CONVERGED" else f" ({r['status']})") for r in (row, other)
            ]
            apart = abs(row["evidence"] - other["evidence"])
            rows.append(
                [*key.split("/")[:3], *found, f"{row['seconds']:.1f}", f"{other['seconds']:.1f}", f"{apart:.0e}"]
            )
    head = ["set", "N", "outputscale", "steps, coupled", "apart", "s, coupled", "apart", "evidences differ by"]
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    measure_and_report(command_line(__doc__, quick="generated classes").parse_args(arguments), run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
