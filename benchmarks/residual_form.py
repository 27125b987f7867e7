r"""Inducing inputs, neighbours of what they leave, and all data, on tables of eight to eighteen columns.

A Matern-3/2 kernel with a lengthscale a column and gpext's priors, trained under Laplace (exact for Gaussian noise) by
`fit(initial="subset")` on `--size` random rows; 2000 others are scored by their log density, of standardised targets.

* `M`: M inducing inputs from k-means, learned with the hyperparameters; `M fixed`: left where they are;
* `k`: k neighbours; `k, M fixed`: neighbours of what M inducing inputs leave; `k, M`: these learned, too;
* `all`: the exact prior.

Noise of numbers is Gaussian, or with `--noise student_t` Student-t.

Beyond some 3000 rows neighbours are within regions of 2000, dense blocks then, as is the default; `one region` has
neighbours among all data, and `not filled in` is a prior by neighbours alone. New values depend on 80 data, or on k.

    GPEXT_DATA=folder OMP_NUM_THREADS=1 python -m benchmarks.residual_form --output residual_form.jsonl
    python -m benchmarks.residual_form --quick
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

import gpext
from benchmarks.datasets import raw_table
from benchmarks.gpboost_families import FieldModel, clocks
from benchmarks.ledger import Ledger, Row, command_line, measure_and_report
from benchmarks.tables import table
from gpext.inference import Laplace
from gpext.likelihoods import BernoulliLogitLikelihood, StudentTLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.priors import register_priors
from gpext.variational import kmeans_inducing_points

SETS = ("magic", "elevators", "protein", "kin40k")
CLASSES = ("magic",)
NOISES = {"gaussian": gpytorch.likelihoods.GaussianLikelihood, "student_t": StudentTLikelihood}


class Prior(NamedTuple):
    """The prior of a method."""

    neighbours: int | None = None
    inducing: int | None = None
    learned: bool = False  # inducing inputs, with the hyperparameters
    region_size: Literal["auto"] | None = "auto"
    fill_in: bool = True


METHODS = {
    "200": Prior(inducing=200, learned=True),
    "200 fixed": Prior(inducing=200),
    "1000": Prior(inducing=1000, learned=True),
    "1000 fixed": Prior(inducing=1000),
    "10": Prior(10),
    "10, one region": Prior(10, region_size=None),
    "10, 200 fixed": Prior(10, 200),
    "10, 200 fixed, one region": Prior(10, 200, region_size=None),
    "10, 200 fixed, not filled in": Prior(10, 200, fill_in=False),
    "20, 200 fixed": Prior(20, 200),
    "10, 200": Prior(10, 200, learned=True),
    "all": Prior(),
}
_TESTS = 2000


def data_of(name: str, size: int) -> tuple[Tensor, ...]:
    """Return inputs and targets, standardised or 0 and 1, to train on and to test."""
    whole = raw_table(name)
    x, y = whole.features, whole.targets
    order = np.random.default_rng(0).permutation(len(y))[: size + _TESTS]
    x, y, train = x[order], y[order], slice(0, size)
    scale = x[train].std(0)
    x = (x - x[train].mean(0)) / np.where(scale > 0, scale, 1)
    y = (y == y.max()).astype(float) if name in CLASSES else (y - y[train].mean()) / y[train].std()
    inputs, targets = (torch.from_numpy(np.ascontiguousarray(each)) for each in (x, y))
    return inputs[train], targets[train], inputs[size:], targets[size:]


def measure(name: str, size: int, prior: Prior, noise: str) -> Row:
    """Return the scores and the CPU seconds of one model."""
    x, y, x_test, y_test = data_of(name, size)
    likelihood: Any = BernoulliLogitLikelihood() if name in CLASSES else NOISES[noise]().double()
    started = clocks()[0]
    z = None if prior.inducing is None else kmeans_inducing_points(x, prior.inducing, seed=0)
    columns = x.size(-1)
    options = {"neighbours": prior.neighbours, "inducing_inputs": z, "region_size": prior.region_size}
    options["fill_in"] = prior.fill_in
    model = FieldModel(x, y, likelihood, Laplace(), columns=columns, **options)
    model.covar_module.base_kernel.lengthscale = columns**0.5
    if z is not None:
        model.variational_strategy.sparse_inputs.requires_grad_(prior.learned)
    objective = LatentMarginalLogLikelihood(likelihood, model)
    register_priors(objective)
    result = gpext.fit(objective, x, y, progress=False, initial="subset")
    train = clocks()[0] - started
    started = clocks()[0]
    with torch.no_grad():
        f = model.eval()(x_test)
        log_density = _log_density(likelihood, f, y_test)
    predict = clocks()[0] - started
    return {
        "train": train,
        "predict": predict,
        "log_density": log_density,
        "steps": result.num_steps,
        "status": result.status.name,
    }


def _log_density(likelihood: Any, f: MultivariateNormal, y: Tensor) -> float:
    """Return the mean log density of each target alone."""
    if isinstance(likelihood, gpytorch.likelihoods.GaussianLikelihood):
        p: Any = torch.distributions.Normal(f.mean, (f.variance + likelihood.noise).sqrt())
    else:
        p = likelihood(MultivariateNormal(f.mean, torch.diag(f.variance)))
    return float(p.log_prob(y).mean())


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure the missing rows."""
    for name in options.sets[:1] if options.quick else options.sets:
        for method in ("10, 200 fixed", "all") if options.quick else options.methods:
            size, prior = options.size, METHODS[method]
            if options.quick:
                size, prior = 150, prior._replace(inducing=prior.inducing and 20)
            told = method if options.noise == "gaussian" or name in CLASSES else f"{method}, {options.noise}"
            ledger.get(f"{name}/{size}/{told}", functools.partial(measure, name, size, prior, options.noise))


def report(ledger: Ledger) -> str:
    """Return the table."""
    rows = []
    for row in ledger.of(""):
        name, size, method = row["key"].split("/")
        rows.append([name, size, method, f"{row['log_density']:.4f}", f"{row['train']:.1f}", row["status"]])
    return table(["set", "rows", "neighbours, inducing inputs", "log density", "seconds to train", "status"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = command_line(__doc__, quick="150 rows of one table")
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--noise", choices=NOISES, default="gaussian")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    measure_and_report(parser.parse_args(arguments), run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
