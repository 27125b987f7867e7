r"""Real compositions: a Dirichlet GP against GP regression on log-ratios, by held-out log density.

Data: sand, silt and clay of 39 sediments of an Arctic lake against depth (13-fold cross-validation), and of 2083
European agricultural soils (GEMAS) against longitude, latitude, mean temperature and annual precipitation (10 parts,
each tested once, with 200 training points of the rest). GEMAS has one zero: all methods use y (n - 1) / n + 1 / (3 n),
n = 2083, the smoothing that DirichletLikelihood's error proposes, in training and test. Densities are those of y with
respect to the Lebesgue measure of its first D - 1 parts, as torch.distributions.Dirichlet has them.

Methods, all with squared exponential kernels that have a length scale for every input, constant means, and parameters
that maximise the marginal likelihood:

* Dirichlet GP by Laplace and by Taylor, a kernel for each of the D latents;
* regression on z = A log y, A 1 = 0, by D - 1 independent GPs, z standardised by the training part; in the density of y

      log p(y) = log p(z) + log|det A_{:, :D-1}| - sum_j log y_j

  with A the additive log-ratio (alr, to the last part), an isometric one (ilr, Helmert's), and the isometric one
  rotated to the principal axes of the training targets, in which they are uncorrelated.

    GPEXT_DATA=folder python -m benchmarks.multivariate_efd compositions --output results/multivariate_efd.jsonl
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from scipy.linalg import helmert
from torch import Tensor
from tqdm import tqdm

import gpext
from benchmarks.datasets import Dataset, load
from benchmarks.ledger import Ledger, Row
from benchmarks.simplex_models import RULES, DirichletGP, smoothed, train
from benchmarks.simplex_recovery import with_error


class About(NamedTuple):
    """The use of a data set."""

    folds: int
    num_train: int | None  # at most
    smoothed_by: int | None  # n


SETS = {"arctic_lake": About(13, None, None), "gemas": About(10, 200, 2083)}
RATIOS = ("alr", "ilr", "ilr, principal axes")
METHODS = (*RULES, *RATIOS)


class LogRatioGP(gpytorch.models.ExactGP):
    """Independent regressions (T, N) of the same inputs (N, d)."""

    def __init__(self, x: Tensor, z: Tensor) -> None:
        tasks = z.shape[:1]
        super().__init__(x.expand(*tasks, *x.shape), z, gpytorch.likelihoods.GaussianLikelihood(batch_shape=tasks))
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=tasks)
        base = gpytorch.kernels.RBFKernel(batch_shape=tasks, ard_num_dims=x.size(-1))
        self.covar_module = gpytorch.kernels.ScaleKernel(base, batch_shape=tasks)
        self.to(x)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the priors at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def contrasts(ratio: str, log_y: Tensor) -> Tensor:
    """Return A (D - 1, D) for targets (N, D)."""
    parts = log_y.size(-1)
    if ratio == "alr":
        return torch.cat([torch.eye(parts - 1), -torch.ones(parts - 1, 1)], -1).to(log_y)
    isometric = torch.from_numpy(helmert(parts)).to(log_y)
    if ratio == "ilr":
        return isometric
    axes = torch.linalg.eigh(torch.cov((log_y @ isometric.mT).mT)).eigenvectors
    return axes.mT @ isometric


def by_log_ratios(ratio: str, data: Dataset, max_steps: int | None) -> tuple[Tensor, Row]:
    """Return the log densities of the test targets (N*,), and how training went."""
    log_y, test_log_y = data.train_y.log(), data.test_y.log()
    A = contrasts(ratio, log_y)
    z, test_z = log_y @ A.mT, test_log_y @ A.mT
    centre, scale = z.mean(0), z.std(0)
    model = LogRatioGP(data.train_x, ((z - centre) / scale).mT)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    found = gpext.fit(mll, model.train_inputs[0], model.train_targets, max_steps=max_steps, progress=False)
    model.eval()
    with torch.no_grad():
        predictive = model.likelihood(model(data.test_x.expand(len(A), *data.test_x.shape)))
        normal = torch.distributions.Normal(predictive.mean, predictive.variance.sqrt())
        log_p = normal.log_prob(((test_z - centre) / scale).mT).sum(0) - scale.log().sum()
    log_p = log_p + torch.linalg.slogdet(A[:, :-1]).logabsdet - test_log_y.sum(-1)
    return log_p, {"seconds": found.seconds, "status": found.status.name}


def by_dirichlet(rule: str, data: Dataset, max_steps: int | None) -> tuple[Tensor, Row]:
    """Return the log densities of the test targets (N*,), and how training went."""
    model = DirichletGP(data.train_x, data.train_y, RULES[rule], shared=False, ard=True, constant=True)
    row = train(model, max_steps)
    with torch.no_grad():
        return model.likelihood.log_marginal(data.test_y, model(data.test_x)), row


def part(name: str, fold: int, quick: bool) -> Dataset:
    """Return a training and a test part, smoothed where the set has zeros."""
    about = SETS[name]
    data = load(name, fold=(fold, about.folds), max_train=20 if quick else about.num_train)
    if about.smoothed_by is not None:
        smooth = partial(smoothed, size=about.smoothed_by)
        data = replace(data, train_y=smooth(data.train_y), test_y=smooth(data.test_y))
    return replace(data, test_x=data.test_x[:5], test_y=data.test_y[:5]) if quick else data


def measure(name: str, method: str, fold: int, quick: bool) -> Row:
    """Return the log densities of a test part."""
    predict = by_dirichlet if method in RULES else by_log_ratios
    started = time.perf_counter()
    log_p, how = predict(method, part(name, fold, quick), 2 if quick else None)
    row: Row = {"set": name, "method": method, **how, "total_seconds": time.perf_counter() - started}
    return {**row, "log_density": [round(value, 6) for value in log_p.tolist()]}


def run_compositions(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure every method on every part."""
    quick = options.quick
    prefix = "compositions/quick" if quick else "compositions"
    folds = [(name, fold) for name in SETS for fold in range(1 if quick else SETS[name].folds)]
    keys = [(name, fold, method) for name, fold in folds for method in METHODS]
    for name, fold, method in tqdm(keys, desc="compositions", disable=None):
        ledger.get(f"{prefix}/{name}/{fold}/{method}", partial(measure, name, method, fold, quick))


def report_compositions(ledger: Ledger) -> str:
    """Return mean log densities, and the advantage of the Dirichlet GP by Laplace over each, paired by test datum."""
    lines = [
        "| data | method | log density of a datum | Dirichlet, Laplace minus this | parts won of | seconds to train |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows = ledger.of("compositions/")
    for name in SETS:
        ours = _by_fold(rows, name, METHODS[0])
        for method in METHODS:
            theirs = _by_fold(rows, name, method)
            if not theirs:
                continue
            gains = [np.subtract(ours[fold], theirs[fold]) for fold in theirs if fold in ours]
            won = f"{sum(gain.mean() > 0 for gain in gains)} of {len(gains)}"
            gain = f"{with_error(np.concatenate(gains).tolist())} | {won}" if gains and method != METHODS[0] else " | "
            found = [row["seconds"] for row in rows if (row["set"], row["method"]) == (name, method)]
            value = with_error(np.concatenate(list(theirs.values())).tolist())
            lines.append(f"| {name} | {method} | {value} | {gain} | {np.mean(found):.1f} |")
    return "\n".join(lines)


def _by_fold(rows: list[Row], name: str, method: str) -> dict[str, list[float]]:
    """Return the log densities of the test data, by the number of the part."""
    found = [row for row in rows if (row["set"], row["method"]) == (name, method)]
    return {row["key"].split("/")[-2]: row["log_density"] for row in found}
