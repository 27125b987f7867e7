r"""Nearest-neighbour priors: beside GPBoost's Vecchia approximation, beside the prior of all data, and their cost in n.

Matern-3/2 fields of the plane with 20 neighbours, filled in where a row does not say otherwise, in nine parts:

* `california`: longitude and latitude -> whether houses are above the median value, 5000 and 15,000 to train, 5640 to
  test; gpext by its rules, filled in or by neighbours alone, or trained under Laplace and then inferred by another one,
  and GPBoost (`vecchia`, 20 neighbours, `bernoulli_logit`) on the same data;
* `fields`: Poisson, Student-t (degrees of freedom estimated by both) and gamma, 20,000 data of a generated field to
  train and 10,000 to test, likewise;
* `neighbours`: the Kullback-Leibler divergence of the posterior from that of the exact prior, for k = 5 to 40 and the
  four orderings, filled in or not, at the lengthscale of the data and at five times that;
* `kernels`: the divergence of the prior, with neighbours by distance and by correlation, of kernels with and without a
  period;
* `dense`: differences of posterior means, in posterior sd, and of the evidence from those of the exact prior;
* `draws`: posteriors by each rule beside draws of the exact posterior under the same prior, by Gibbs sampling;
* `scaling`: seconds of one evaluation with its gradient, and peak memory;
* `wind`: von Mises directions of the wind by the hour, Laplace: all hours with 20 neighbours, and 300 without;
* `columns`: the largest front, the operations and the entries of the sparse Cholesky factor by the number of columns.

In the first two, both packages train all parameters and a constant mean, gpext from `fit(initial="subset")`, GPBoost
from its own start; log p(y) of the test data is the integral of the same formula of p(y | f) over the means and
variances of the latent field that each predicts. GPBoost runs in a process of its own, of the interpreter that
`--gpboost-python` names (`pip install gpboost==1.8.0` there). Times are CPU seconds, one thread.

    OMP_NUM_THREADS=1 python -m benchmarks.nearest_neighbours --gpboost-python PYTHON --output nearest_neighbours.jsonl
    python -m benchmarks.nearest_neighbours --quick      # a few hundred data, gpext alone
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Sequence

import torch

from benchmarks.gpboost_families import RULES, Data, Family, by_gpboost, by_gpext
from benchmarks.ledger import Ledger, Row, command_line, measure_and_report
from benchmarks.neighbour_accuracy import (
    beside_dense,
    beside_draws,
    divergence,
    evaluation,
    factor,
    kernels,
    prior_divergence,
    wind,
)
from benchmarks.neighbour_problems import FIELDS, california, data_of_field
from benchmarks.tables import table
from gpext.inference import EP, KL

PARTS = ("california", "neighbours", "kernels", "dense", "draws", "fields", "scaling", "wind", "columns")
LAST = {  # trained under Laplace, predicted by these, means to a thousandth of their deviations
    "Laplace, then KL": KL(tolerance=1e-3),
    "Laplace, then EP": EP(tolerance=1e-3),
}
ALONE = "Laplace, not filled in"
METHODS = ("GPBoost", ALONE, *RULES, *LAST)
ORDERINGS = ("maximin", "random", "coordinate", "middle")
FIELD_RULES = {"Poisson": ("Laplace", "KL", "EP"), "Student-t": ("Laplace",), "gamma": ("Laplace",)}
_LONGEST = 3000  # CPU seconds of a GPBoost run
_LENGTHSCALE = {"fields": 0.05, "neighbours": 0.1, "dense": 0.1, "scaling": 0.05}


def _measure(family: Family, data: Data, method: str, python: str, neighbours: int = 20) -> Row:
    if method == "GPBoost":
        return by_gpboost(family, data, python, _LONGEST)
    rule = RULES.get(method, RULES["Laplace"])
    fill_in = method != ALONE
    return by_gpext(family, data, rule, "subset", LAST.get(method), neighbours=neighbours, fill_in=fill_in)


def _methods(options: argparse.Namespace) -> list[str]:
    return [name for name in options.methods if name != "GPBoost" or options.gpboost_python]


def _california(ledger: Ledger, options: argparse.Namespace) -> None:
    for size in (100,) if options.quick else (5000, 15000):
        field = FIELDS["Bernoulli"]
        data = data_of_field(field, 100, 50, 0.1, 0) if options.quick else california(size)
        for method in _methods(options):
            measure = functools.partial(_measure, field.family, data, method, options.gpboost_python)
            ledger.get(f"california/{size}/{method}", measure)


def _fields(ledger: Ledger, options: argparse.Namespace) -> None:
    sizes = (100, 50) if options.quick else (20000, 10000)
    for name, rules in FIELD_RULES.items():
        field = FIELDS[name]
        data = data_of_field(field, *sizes, _LENGTHSCALE["fields"], 0)
        for method in _methods(options):
            if method in ("GPBoost", *rules) or (method == ALONE and not options.quick):
                measure = functools.partial(_measure, field.family, data, method, options.gpboost_python)
                ledger.get(f"fields/{name}/{method}", measure)


def _neighbours(ledger: Ledger, options: argparse.Namespace) -> None:
    field, size = FIELDS["Bernoulli"], 60 if options.quick else 1500
    numbers = (5, 20) if options.quick else (5, 10, 20, 30, 40)
    data = data_of_field(field, size, 0, _LENGTHSCALE["neighbours"], 0)
    rules = ("Laplace",) if options.quick else ("Laplace", "EP")
    for scale in (_LENGTHSCALE["neighbours"], 5 * _LENGTHSCALE["neighbours"]):
        for rule, filled in itertools.product(rules, (False, True)):
            for ordering in ("maximin",) if filled else ORDERINGS:  # filled in, they are on all sides
                measure = functools.partial(divergence, field, data, RULES[rule], scale, ordering, filled, numbers)
                ledger.get(f"neighbours/{scale}/{rule}/{ordering}/{'filled in' if filled else 'alone'}", measure)


def _kernels(ledger: Ledger, options: argparse.Namespace) -> None:
    size, numbers = (60, (5, 10)) if options.quick else (1500, (10, 20, 40))
    for name in kernels():
        for by in ("distance", "correlation"):
            ledger.get(f"kernels/{name}/{by}", functools.partial(prior_divergence, name, by, size, numbers))


def _dense(ledger: Ledger, options: argparse.Namespace) -> None:
    size = 60 if options.quick else 3000
    inducing = 20 if options.quick else 200
    priors = [(k, 0, "distance", False) for k in (20, 40, 80)] + [(20, inducing, "distance", False)]
    priors += [(k, 0, by, True) for by in ("distance", "information") for k in (10, 20, 30)]
    priors += [(20, inducing, "distance", True)]
    for name in ("Poisson",) if options.quick else ("Bernoulli", "Poisson", "Student-t"):
        data = data_of_field(FIELDS[name], size, 0, _LENGTHSCALE["dense"], 1)
        for rule in ("Laplace",) if options.quick else ("Laplace", "KL", "EP"):
            scale = _LENGTHSCALE["dense"]
            measure = functools.partial(beside_dense, FIELDS[name], data, RULES[rule], scale, priors)
            ledger.get(f"dense/{name}/{rule}", measure)


def _draws(ledger: Ledger, options: argparse.Namespace) -> None:
    field = FIELDS["Bernoulli"]
    for size in (60,) if options.quick else (5000,):
        data = data_of_field(field, size, 20, 0.1, 0) if options.quick else california(size)
        ledger.get(f"draws/{size}", functools.partial(beside_draws, field, data, 40 if options.quick else 4000))


def _scaling(ledger: Ledger, options: argparse.Namespace) -> None:
    scale = _LENGTHSCALE["scaling"]
    for k, filled in ((20, True),) if options.quick else ((20, False), (10, True), (20, True)):
        for size in (100, 200) if options.quick else options.sizes:
            measure = functools.partial(evaluation, "Poisson", size, scale, neighbours=k, fill_in=filled)
            ledger.get(f"scaling/{k}{', filled in' if filled else ' alone'}/{size}", measure)


def _wind(ledger: Ledger, options: argparse.Namespace) -> None:
    for name in ("synthetic_angles",) if options.quick else ("wind_texas", "wind_jfk"):
        for most, neighbours in ((10**6, 20), (300, None)):
            ledger.get(f"wind/{name}/{neighbours}", functools.partial(wind, name, most, neighbours))


def _columns(ledger: Ledger, options: argparse.Namespace) -> None:
    for columns in (1, 2, 3, 5, 10):
        ledger.get(f"columns/{columns}", functools.partial(factor, 200 if options.quick else 10_000, columns))


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure the missing rows."""
    parts = {
        "california": _california,
        "neighbours": _neighbours,
        "kernels": _kernels,
        "dense": _dense,
        "draws": _draws,
        "fields": _fields,
        "scaling": _scaling,
        "wind": _wind,
        "columns": _columns,
    }
    for name in options.parts:
        parts[name](ledger, options)


def _beside_gpboost(ledger: Ledger, prefix: str, score: str) -> str:
    """Return the table of one part that GPBoost takes part in."""
    cells = []
    for row in ledger.of(f"{prefix}/"):
        _, problem, method = row["key"].split("/")
        if "train" not in row:
            cells.append([problem, method, *["; ".join(row["failures"])], "", "", ""])
            continue
        peer = ledger.rows.get(f"{prefix}/{problem}/GPBoost", {})
        seconds = [
            f"{row[what]:.1f}" + (f" ({row[what] / peer[what]:.3f})" if method != "GPBoost" and what in peer else "")
            for what in ("train", "predict")
        ]
        name = method if method == "GPBoost" else f"gpext, {method}"
        cells.append([problem, name, f"{row['log_density']:.4f}", f"{row[score]:.4f}", *seconds])
    head = ["data", "method", "log density of a test datum", {"missed": "error", "rmse": "RMSE"}[score]]
    return table([*head, "seconds to train (share of GPBoost's)", "seconds to predict (share)"], cells)


def report(ledger: Ledger) -> str:
    """Return the tables of the parts that have rows."""
    tables = []
    for prefix, score in (("california", "missed"), ("fields", "rmse")):
        if ledger.of(f"{prefix}/"):
            tables.append(_beside_gpboost(ledger, prefix, score))
    heads = {"neighbours": ["lengthscale", "rule", "ordering", "prior"], "kernels": ["kernel", "neighbours by"]}
    for prefix, head in heads.items():
        if found := ledger.of(f"{prefix}/"):
            numbers = list(found[0]["divergence"])
            rows = [[*row["key"].split("/")[1:], *(f"{row['divergence'][k]:.3g}" for k in numbers)] for row in found]
            tables.append(table([*head, *(f"k = {k}" for k in numbers)], rows))
    if found := ledger.of("dense/"):
        rows = []
        for row in found:
            for cell in row["approximations"]:
                differences = [*(f"{cell[what]:.4f}" for what in ("mean", "rms", "sd")), f"{cell['evidence']:+.3f}"]
                times = [f"{cell['seconds']:.2f}", f"{row['seconds']:.2f}"]
                how = f"{cell['by']}, {'filled in' if cell['filled'] else 'alone'}"
                numbers = [f"{cell['neighbours']}", how, f"{cell['inducing'] or 'none'}"]
                rows.append([*row["key"].split("/")[1:], *numbers, *differences, *times])
        head = ["likelihood", "rule", "k", "by", "M", "largest difference of means / sd", "its RMS"]
        head += ["largest of sds (relative)", "evidence, nats", "seconds", "seconds of all data"]
        tables.append(table(head, rows))
    if found := ledger.of("draws/"):
        rows = []
        for row in found:
            for name, cell in row["posteriors"].items():
                moved = [f"{cell[what]:.3f}" if what in cell else "" for what in ("rms", "mean", "sd", "error")]
                scores = [f"{cell['log_density']:.4f}", f"{cell['seconds']:.1f}", cell["status"]]
                rows.append([f"{row['size']}", name, *moved, *scores])
        head = [
            "n",
            "posterior",
            "difference of means / sd, RMS",
            "its mean",
            "ratio of sds",
            "error of the draws' means",
        ]
        tables.append(table([*head, "log density of a test datum", "seconds", "status"], rows))
    if found := ledger.of("scaling/"):
        rows = []
        for before, row in zip([None, *found], found, strict=False):
            exponent = ""
            prior = row["key"].split("/")[1]
            if before is not None and before["key"].split("/")[1] == prior:
                exponent = f"{math.log(row['again'] / before['again']) / math.log(row['size'] / before['size']):.2f}"
            seconds = [f"{row[what]:.2f}" for what in ("neighbours", "first", "again")]
            rows.append([prior, f"{row['size']}", *seconds, exponent, f"{row['megabytes']:.0f}"])
        head = [
            "neighbours",
            "n",
            "seconds of the neighbours",
            "of the first evaluation",
            "of one after it",
            "exponent",
            "MB",
        ]
        tables.append(table(head, rows))
    if found := ledger.of("wind/"):
        rows = []
        for row in found:
            _, name, neighbours = row["key"].split("/")
            scores = [f"{row['log_density']:.3f}", f"{row['error']:.3f}", f"{row['train']:.1f}", row["status"]]
            rows.append([name, f"{row['size']}", neighbours, f"{row['tests']}", *scores])
        head = ["hours of", "trained on", "neighbours", "tested on", "log density", "mean error, radians"]
        tables.append(table([*head, "seconds to train", "status"], rows))
    if found := ledger.of("columns/"):
        rows = []
        for row in found:
            dense = row["size"] ** 3 / 6
            shares = [f"{row['work'] / dense:.2g}", f"{row['stored'] * 8 / 2**20:.0f}", f"{row['seconds']:.1f}"]
            rows.append([f"{row['columns']}", f"{row['largest']}", *shares])
        head = ["columns", "largest front", "operations, share of the dense factor's", "MB", "seconds of its layout"]
        tables.append(table(head, rows))
    return "\n\n".join(tables)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables."""
    parser = command_line(__doc__, quick="a few hundred data")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[10_000, 30_000, 100_000], help="of `scaling`")
    parser.add_argument("--gpboost-python", default=None, help="interpreter that has gpboost; without it, gpext alone")
    measure_and_report(parser.parse_args(arguments), run, report)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
