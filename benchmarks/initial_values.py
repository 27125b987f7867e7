"""Trainings that start from gpytorch's default lengthscales, or from the distances between inputs.

`gpext.fit(initial="given")` beside `gpext.fit(initial="data")`, the default: a scaled RBF kernel with a lengthscale for
each column, as gpytorch makes it, on standardised tables of at most 300 training rows, several splits each. LatentGPs
under Laplace, Gaussian noise exactly; "sparse" is a SiteVariationalStrategy with 64 inducing points. Evidences (bounds
for "sparse") and log densities of test rows are a datum, evaluations those of the objective by L-BFGS.

    GPEXT_DATA=folder OMP_NUM_THREADS=1 python -m benchmarks.initial_values --output initial_values.jsonl
    python -m benchmarks.initial_values --quick     # one split of two tables
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.variational import NaturalVariationalDistribution
from torch import Tensor

import gpext
from benchmarks.datasets import Dataset, load
from benchmarks.ledger import Ledger, Row, command_line, measure_and_report
from benchmarks.tables import table
from gpext.inference import Laplace
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    MultinomialLogitLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from gpext.models import LatentGP
from gpext.optim import lbfgs

PROBLEMS = (
    ("sonar", "binary"),
    ("ionosphere", "binary"),
    ("heart_statlog", "binary"),
    ("breast_wisconsin", "binary"),
    ("australian", "binary"),
    ("spambase", "binary"),
    ("usps_3vs5", "binary"),
    ("magic", "binary"),
    ("banana", "binary"),
    ("vehicle", "classes"),
    ("glass", "classes"),
    ("satimage_classes", "classes"),
    ("boston", "student_t"),
    ("concrete", "student_t"),
    ("pol", "student_t"),
    ("mcycle", "student_t"),
    ("diabetes", "gaussian"),
    ("energy", "gaussian"),
    ("yacht", "gaussian"),
    ("airfoil", "gaussian"),
    ("elevators", "gaussian"),
    ("wine_red", "gaussian"),
    ("nmes", "poisson"),
    ("drowning", "poisson"),
    ("spambase", "sparse"),
    ("usps_3vs5", "sparse"),
    ("magic", "sparse"),
)
_ROWS = 300
_SPLITS = 3
_SAME = 1e-3  # nats a datum: evidences of one maximum
_NOTHING = 5e-3  # the same, from the evidence of labels that are a coin's


class _Prior(torch.nn.Module):
    def __init__(self, x: Tensor, num_latents: int | None) -> None:
        super().__init__()
        self.mean = gpytorch.means.ConstantMean(batch_shape=torch.Size([num_latents] if num_latents else []))
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=x.size(-1)))
        self.to(x)

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean(x), self.kernel(x))


class Full(LatentGP):
    """A LatentGP under Laplace; Gaussian noise has exact inference."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Likelihood, num_latents: int | None) -> None:
        super().__init__(x, y, likelihood, Laplace())
        self.prior = _Prior(x, num_latents)
        self.to(x)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at x."""
        return self.prior(x)


class Sparse(gpytorch.models.ApproximateGP):
    """64 of the inputs are inducing points."""

    def __init__(self, x: Tensor) -> None:
        q = NaturalVariationalDistribution(64).to(x)
        super().__init__(gpext.variational.SiteVariationalStrategy(self, x[:64].clone(), q))
        self.prior = _Prior(x, None)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at x."""
        return self.prior(x)


def objective_of(data: Dataset, y: Tensor, kind: str) -> Any:
    """Return the objective of a table."""
    num_classes = int(max(y.max(), data.test_y.max())) + 1 if kind == "classes" else None
    likelihood: Likelihood = {
        "binary": BernoulliLogitLikelihood,
        "sparse": BernoulliLogitLikelihood,
        "classes": lambda: MultinomialLogitLikelihood(num_classes),
        "student_t": StudentTLikelihood,
        "gaussian": gpytorch.likelihoods.GaussianLikelihood,
        "poisson": PoissonLikelihood,
    }[kind]()
    if kind == "sparse":
        return gpext.mlls.AugmentedELBO(likelihood.to(y), Sparse(data.train_x), num_data=len(y))
    model = Full(data.train_x, y, likelihood, num_classes)
    return gpext.mlls.LatentMarginalLogLikelihood(model.likelihood, model)


def measure(name: str, kind: str, seed: int, initial: Any) -> Row:
    """Return how a training ended, and what it took."""
    data = load(name, seed=seed, max_train=_ROWS)
    y = data.train_y.long() if kind == "classes" else data.train_y
    mll = objective_of(data, y, kind)
    count, evaluate = 0, lbfgs._Run.evaluate

    def counting(run: Any, point: Any) -> Any:
        nonlocal count
        count += 1
        return evaluate(run, point)

    begin = time.process_time()
    with mock.patch.object(lbfgs._Run, "evaluate", counting):
        result = gpext.fit(mll, data.train_x, y, initial=initial, progress=False)
    seconds = time.process_time() - begin
    with torch.no_grad():
        f = mll.model.eval()(data.test_x)
        if kind == "gaussian":
            predicted = mll.likelihood(f)
            normal = torch.distributions.Normal(predicted.mean, predicted.stddev)
            log_density = normal.log_prob(data.test_y).mean()
        else:
            log_density = mll.likelihood.log_marginal(data.test_y.to(y), f).mean()
    return {
        "evidence": float(result.objective),
        "log_density": float(log_density),
        "evaluations": count,
        "seconds": seconds,
        "status": result.status.value,
        "columns": data.train_x.size(-1),
    }


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure the missing rows."""
    warnings.simplefilter("ignore")
    for name, kind in (PROBLEMS[0], PROBLEMS[15]) if options.quick else PROBLEMS:
        for seed in range(1 if options.quick else _SPLITS):
            for initial in ("given", "data"):
                key = f"{name}/{kind}/{seed}/{initial}"
                ledger.get(key, lambda n=name, k=kind, s=seed, i=initial: measure(n, k, s, i))


def report(ledger: Ledger) -> str:
    """Return the table of means over splits, and a sentence that counts."""
    rows, higher, lower, coins, ratios = [], 0, 0, {"given": 0, "data": 0}, []
    for name, kind in PROBLEMS:
        given, data = (
            [row for row in ledger.of(f"{name}/{kind}/") if row["key"].endswith(f"/{initial}")]
            for initial in ("given", "data")
        )
        if not given or len(given) != len(data):
            continue
        gains = [b["evidence"] - a["evidence"] for a, b in zip(given, data, strict=True)]
        higher += sum(gain > _SAME for gain in gains)
        lower += sum(gain < -_SAME for gain in gains)
        for initial, found in (("given", given), ("data", data)):
            labels = kind in ("binary", "sparse")
            coins[initial] += sum(labels and row["evidence"] < math.log(0.5) + _NOTHING for row in found)
        ratios += [b["evaluations"] / a["evaluations"] for a, b in zip(given, data, strict=True)]
        cells = [
            f"{statistics.mean(row[column] for row in found):{form}}"
            for column, form in (
                ("evidence", ".3f"),
                ("log_density", ".3f"),
                ("evaluations", ".0f"),
                ("seconds", ".1f"),
            )
            for found in (given, data)
        ]
        rows.append([name, kind, str(given[0]["columns"]), *cells])
    head = ["set", "kind", "columns"]
    for column in ("evidence", "log density", "evaluations", "s"):
        head += [f"{column}, given", "data"]
    ratio = math.exp(statistics.mean(map(math.log, ratios)))
    return table(head, rows) + (
        f"\nOf {len(ratios)} trainings {higher} end at a higher evidence from the data (by more than {_SAME}), {lower} "
        f"at a lower one, with {ratio:.2f} of the evaluations. Labels are left to a coin by {coins['given']} from the "
        f"values given, by {coins['data']} from the data.\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    options = command_line(__doc__, quick="one split of two tables").parse_args(arguments)
    measure_and_report(options, run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
