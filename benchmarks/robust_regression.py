r"""Robust regression with a Student-t likelihood [JVV11 Sec. 6.2, Fig. 6, Tab. 1].

Data:

* friedman: 10 sets of 100 training points in [0, 1]^10, of which five inputs matter [Friedman 1991]:
  y = 10 sin(pi x_1 x_2) + 20 (x_3 - 1/2)^2 + 10 x_4 + 5 x_5 + N(0, 1); 10 of the 100 targets are replaced by draws from
  N(15, 3^2) [Kuss 2006]. The test points are 1000 values of the function itself, without noise: their densities are
  those under the posterior of f (`latent_log_density`).
* boston: 10-fold cross-validation (506 data, 13 inputs); concrete: 2-fold (1030 data, 8 inputs). Densities are those of
  the observations (`log_density`).

Inputs and targets are standardised by the training part. Methods: a Gaussian GP (GA), and Student-t GPs by Laplace
(LA), EP, fractional EP with power 1/2 (EPf), CAVI (the factorising variational approximation, fVB) and KL; 1 stands for
fixed degrees of freedom (nu = 4), 2 for trained ones, 3 for ones integrated on a grid (`gpext.fit_grid`). After the
methods, the rules' times with the hyperparameters fixed at 28 configurations about those of KL2 on the first fold
(`fixed`).

A line of JSON is appended for each (data set, fold, method), and those that are there are skipped:

    GPEXT_DATA=folder OMP_NUM_THREADS=1 python -m benchmarks.robust_regression --output results.jsonl
    python -m benchmarks.robust_regression --output results.jsonl --table > docs/evidence/robust_regression.md
    python -m benchmarks.robust_regression --quick --output results.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.augmented_svi import machine, package_versions
from benchmarks.datasets import Dataset, load
from benchmarks.robust_regression_methods import METHODS, Row, Settings, fixed, measure
from benchmarks.robust_regression_report import report

FOLDS = {"friedman": 10, "boston": 10, "concrete": 2}
QUICK = Settings(max_steps=2, grid=(2.0, 4.0), configurations=2)
CENTRE = "KL2"  # whose hyperparameters the fixed configurations surround: neither Laplace's nor EP's
FIXED = "fixed"
Key = tuple[str, int, str]


def friedman(seed: int, num_train: int = 100, num_test: int = 1000) -> Dataset:
    """Draw a data set with 10 % outliers; the test targets are values of the function."""
    generator = torch.Generator().manual_seed(seed)

    def function(x: Tensor) -> Tensor:
        wave = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1])
        return wave + 20 * (x[:, 2] - 0.5).square() + 10 * x[:, 3] + 5 * x[:, 4]

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    train_x, test_x = torch.rand(num_train + num_test, 10, generator=generator, dtype=torch.float64).split(
        [num_train, num_test]
    )
    train_y = function(train_x) + normal(num_train)
    outliers = torch.randperm(num_train, generator=generator)[: num_train // 10]
    train_y[outliers] = 15 + 3 * normal(len(outliers))
    centre, scale = train_x.mean(0), train_x.std(0, correction=0)
    mean, spread = train_y.mean(), train_y.std(correction=0)
    return Dataset(
        name="friedman",
        task="regression",
        train_x=(train_x - centre) / scale,
        train_y=(train_y - mean) / spread,
        test_x=(test_x - centre) / scale,
        test_y=(function(test_x) - mean) / spread,
        target_mean=mean.item(),
        target_scale=spread.item(),
    )


def split(name: str, fold: int, *, quick: bool = False) -> Dataset:
    """One training and test part."""
    if name == "friedman":
        return friedman(fold, 30, 30) if quick else friedman(fold)
    return load(name, fold=(fold, FOLDS[name]))


def read(path: Path) -> tuple[Row, dict[Key, Row]]:
    """The head (machine and versions) and the rows of a results file so far.

    Raises:
        ValueError: the file comes from another machine or other versions; its times could not be compared.
    """
    head = {"machine": machine(), "versions": package_versions()}
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head) + "\n", encoding="utf-8")
    found, *rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    if found != head:
        raise ValueError(f"{path} was written by {found}, and this is {head}: not comparable; choose another output.")
    return head, {(row["dataset"], row["fold"], row["method"]): row for row in rows}


def plan(datasets: Sequence[str], methods: Sequence[str], folds: int | None, *, quick: bool) -> Iterator[Key]:
    """Yield what there is to run, fold by fold; the fixed configurations are for the first fold."""
    for name in datasets:
        for fold in range(1 if quick else min(folds or FOLDS[name], FOLDS[name])):
            for method in methods:
                if method != FIXED or fold == 0:
                    yield name, fold, method


def execute(path: Path, keys: Sequence[Key], *, quick: bool) -> None:
    """Run what is missing and append it to the file."""
    settings = QUICK if quick else Settings()
    _, done = read(path)
    for key in tqdm([key for key in keys if key not in done], desc="robust regression", disable=None):
        name, fold, method = key
        data = split(name, fold, quick=quick)
        row: Row = {"dataset": name, "fold": fold, "method": method, "num_train": len(data.train_y)}
        if method == FIXED:
            if "hyperparameters" not in done.get((name, fold, CENTRE), {}):
                raise ValueError(f"the fixed configurations surround those of {CENTRE}: run it on {name} first.")
            row["rules"] = fixed(data, done[name, fold, CENTRE]["hyperparameters"], settings)
        else:
            row |= measure(METHODS[method], data, settings)
        done[key] = row
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="results, one JSON object a line")
    parser.add_argument("--datasets", nargs="+", choices=list(FOLDS), default=list(FOLDS))
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, FIXED], default=[*METHODS, FIXED])
    parser.add_argument("--folds", type=int, help="at most so many folds of each data set")
    parser.add_argument("--quick", action="store_true", help="a small Friedman set, two steps, a few seconds")
    parser.add_argument("--table", action="store_true", help="run nothing; print the tables of what is there")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing and print the tables."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    datasets = ["friedman"] if options.quick else options.datasets
    if not options.table:
        keys = list(plan(datasets, options.methods, options.folds, quick=options.quick))
        execute(options.output, keys, quick=options.quick)
    head, *rows = (json.loads(line) for line in options.output.read_text(encoding="utf-8").splitlines())
    wanted = [row for row in rows if row["dataset"] in datasets and row["method"] in options.methods]
    print(report(head, [row for row in wanted if options.folds is None or row["fold"] < options.folds]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
