r"""Noise that varies with the input: gpext's rules beside an SVGP with Monte Carlo expectations, held-out scores.

    y = f(x) + e^{g(x)} e,     f and g two Gaussian processes, e standard normal or Student-t

Every method has the same priors: squared exponentials with a length scale for each column, a constant mean for f and
for g, and the same initial values, of g's mean log(1/2) for targets of unit variance, half of their spread. All of them
are trained by maximum (approximate) marginal likelihood:

* gpext: `LatentGP` under `KL`, `EP` and `Laplace` with `HeteroscedasticGaussianLikelihood`, under `KL` with
  `HeteroscedasticStudentTLikelihood`, all by `gpext.fit`; a sparse model, `SiteVariationalStrategy` with the inducing
  points of k-means, by `gpext.fit` on the full batch;
* gpytorch, as GPflow's heteroscedastic SVGP: two independent latents on the same inducing points, a likelihood
  Normal(f, e^g) whose expectations are means over ten draws (gpytorch's default), and Adam with learning rate 0.01
  until the bound gains less than 1e-3 nats a datum in 500 steps, or for 6000 steps; with more than 512 data, whose
  minibatches of 256 give too noisy a bound to stop by, for 6000 steps;
* an exact GP with constant noise.

Five folds, the same for all; inputs and targets are standardised by the training part. Log densities are of the
standardised targets, int p(y | f, g) q(f, g) by one quadrature for all methods with two latents. The SVGP has one run a
fold; times are CPU seconds of training on one thread.

    OMP_NUM_THREADS=1 python -m benchmarks.heteroscedastic --output heteroscedastic.jsonl
    python -m benchmarks.heteroscedastic --quick     # generated data, 60 of them, one fold
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ApproximateGP, ExactGP
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    IndependentMultitaskVariationalStrategy,
    VariationalStrategy,
)
from torch import Tensor

import gpext
from benchmarks.datasets import Dataset, load
from benchmarks.ledger import Ledger, Row, command_line, measure_and_report
from benchmarks.tables import table
from gpext.inference import EP, KL, Laplace, Rule
from gpext.likelihoods import HeteroscedasticGaussianLikelihood, HeteroscedasticStudentTLikelihood
from gpext.likelihoods.heteroscedastic import HeteroscedasticLikelihood
from gpext.variational import SiteVariationalStrategy, kmeans_inducing_points

NUM_FOLDS = 5
NUM_INDUCING = 100
MAX_TRAIN = 1500
DENSE = ("mcycle", "yacht")  # with these the rules have a site at every input
DATASETS = (*DENSE, "abalone")
BATCH = 256
BASELINE = "gpytorch SVGP, Monte Carlo"
_PATIENCE, _GAIN, _LONGEST = 500, 1e-3, 6000  # steps, nats a datum, steps


def _priors(num_columns: int, batch: tuple[int, ...]) -> tuple[gpytorch.means.Mean, gpytorch.kernels.Kernel]:
    """Return means and kernels of f and g, or of f alone for an empty `batch`, at their initial values."""
    mean = gpytorch.means.ConstantMean(batch_shape=torch.Size(batch))
    base = gpytorch.kernels.RBFKernel(ard_num_dims=num_columns, batch_shape=torch.Size(batch))
    kernel = gpytorch.kernels.ScaleKernel(base, batch_shape=torch.Size(batch))
    base.lengthscale = 0.5 * math.sqrt(num_columns)
    kernel.outputscale = torch.tensor([1.0, 0.25]) if batch else 1.0
    mean.initialize(constant=torch.tensor([0.0, math.log(0.5)]) if batch else 0.0)
    return mean, kernel


class _Dense(gpext.models.LatentGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: HeteroscedasticLikelihood, rule: Rule) -> None:
        super().__init__(x, y, likelihood, rule)
        self.mean_module, self.covar_module = _priors(x.size(-1), (2,))
        self.double()

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at inputs."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class _Exact(ExactGP):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module, self.covar_module = _priors(x.size(-1), ())
        self.likelihood.noise = 0.25
        self.double()

    forward = _Dense.forward


class _Sites(ApproximateGP):
    def __init__(self, z: Tensor) -> None:
        super().__init__(SiteVariationalStrategy(self, z.expand(2, *z.shape).clone()))
        self.mean_module, self.covar_module = _priors(z.size(-1), (2,))
        self.double()

    forward = _Dense.forward


class _SVGP(ApproximateGP):
    def __init__(self, z: Tensor) -> None:
        q = CholeskyVariationalDistribution(len(z), batch_shape=torch.Size([2]))
        strategy = VariationalStrategy(self, z.expand(2, *z.shape).clone(), q, learn_inducing_locations=True)
        super().__init__(IndependentMultitaskVariationalStrategy(strategy, num_tasks=2))
        self.mean_module, self.covar_module = _priors(z.size(-1), (2,))
        self.double()

    forward = _Dense.forward


class _MonteCarlo(gpytorch.likelihoods.Likelihood):
    """Normal(f, e^g) for f (..., N, 2), whose expectations gpytorch takes over draws."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> torch.distributions.Normal:
        """Return p(y | f)."""
        return torch.distributions.Normal(function_samples[..., 0], function_samples[..., 1].exp(), validate_args=False)


def _inducing_points(x: Tensor) -> Tensor:
    return kmeans_inducing_points(x, min(NUM_INDUCING, len(x.unique(dim=0)) // 2))


def _scores(predicted: Any, targets: Tensor) -> Row:
    """Return log densities and errors of the test data, and the share of them within intervals of 90 %."""
    share = predicted.cdf(targets)
    inside = (share > 0.05) & (share < 0.95)
    return {
        "log_density": predicted.log_prob(targets).mean().item(),
        "rmse": (predicted.mean - targets).square().mean().sqrt().item(),
        "coverage": inside.double().mean().item(),
    }


def _by_rule(data: Dataset, seed: int, rule: Rule, kind: type[HeteroscedasticLikelihood]) -> Row:
    likelihood = kind().double()
    started = time.process_time()
    model = _Dense(data.train_x, data.train_y, likelihood, rule)
    mll = gpext.mlls.LatentMarginalLogLikelihood(likelihood, model)
    result = gpext.fit(mll, data.train_x, data.train_y, progress=False)
    return _ended(result, started, lambda: likelihood(model(data.test_x)), data)


def _by_sites(data: Dataset, seed: int, kind: type[HeteroscedasticLikelihood]) -> Row:
    likelihood = kind().double()
    started = time.process_time()
    model = _Sites(_inducing_points(data.train_x))
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(data.train_y))
    result = gpext.fit(mll, data.train_x, data.train_y, progress=False)
    return _ended(result, started, lambda: likelihood(model(data.test_x)), data)


def _by_exact_gp(data: Dataset, seed: int) -> Row:
    started = time.process_time()
    model = _Exact(data.train_x, data.train_y)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    with gpytorch.settings.fast_computations(False, False, False):
        result = gpext.fit(mll, data.train_x, data.train_y, progress=False)

        def predicted() -> torch.distributions.Normal:
            p = model.likelihood(model(data.test_x))
            return torch.distributions.Normal(p.mean, p.stddev)

        return _ended(result, started, predicted, data)


def _ended(result: gpext.training.FitResult, started: float, predict: Callable[[], Any], data: Dataset) -> Row:
    seconds = time.process_time() - started
    with torch.no_grad():
        found = _scores(predict(), data.test_y)
    return {**found, "seconds": seconds, "steps": result.num_steps, "status": result.status.name}


def _by_svgp(data: Dataset, seed: int) -> Row:
    torch.manual_seed(seed)
    x, y = data.train_x, data.train_y
    started = time.process_time()
    model = _SVGP(_inducing_points(x))
    mll = gpytorch.mlls.VariationalELBO(_MonteCarlo(), model, num_data=len(y))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batch = None if len(y) <= 2 * BATCH else BATCH
    bounds: list[float] = []
    before = -math.inf
    while len(bounds) < _LONGEST:
        rows = slice(None) if batch is None else torch.randperm(len(y))[:batch]
        optimizer.zero_grad()
        loss = -mll(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        bounds.append(-loss.item())
        if batch is None and len(bounds) % _PATIENCE == 0:
            recent = float(np.mean(bounds[-_PATIENCE:]))
            if recent - before < _GAIN:
                break
            before = recent
    seconds = time.process_time() - started
    model.eval()
    with torch.no_grad():
        f = model(data.test_x)
        latents = MultivariateNormal(f.mean.mT, torch.diag_embed(f.variance.mT))  # (2, N*), independent
        found = _scores(HeteroscedasticGaussianLikelihood().double()(latents), data.test_y)
    status = "CONVERGED" if len(bounds) < _LONGEST else "MAX_STEPS"
    return {**found, "seconds": seconds, "steps": len(bounds), "status": status}


METHODS: dict[str, Callable[[Dataset, int], Row]] = {
    "exact GP, constant noise": _by_exact_gp,
    "gpext, KL": lambda data, seed: _by_rule(data, seed, KL(), HeteroscedasticGaussianLikelihood),
    "gpext, EP": lambda data, seed: _by_rule(data, seed, EP(), HeteroscedasticGaussianLikelihood),
    "gpext, Laplace": lambda data, seed: _by_rule(data, seed, Laplace(), HeteroscedasticGaussianLikelihood),
    "gpext, KL, Student-t": lambda data, seed: _by_rule(data, seed, KL(), HeteroscedasticStudentTLikelihood),
    "gpext, sparse": lambda data, seed: _by_sites(data, seed, HeteroscedasticGaussianLikelihood),
    "gpext, sparse, Student-t": lambda data, seed: _by_sites(data, seed, HeteroscedasticStudentTLikelihood),
    BASELINE: _by_svgp,
}
ON_DENSE_ALONE = ("gpext, KL", "gpext, EP", "gpext, Laplace", "gpext, KL, Student-t")


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure the missing rows, of the small data sets first."""
    for name in ["synthetic_regression"] if options.quick else options.datasets:
        for fold in range(1 if options.quick else options.folds):
            data = load(name, fold=(fold, NUM_FOLDS), max_train=60 if options.quick else MAX_TRAIN)
            for method in options.methods:
                if options.quick or name in DENSE or method not in ON_DENSE_ALONE:
                    ledger.get(f"{name}/{method}/{fold}", lambda d=data, m=method, k=fold: METHODS[m](d, k))


def report(ledger: Ledger) -> str:
    """Return the table: means over the folds, scores with their difference from the SVGP's."""
    rows = []
    for name in dict.fromkeys(key.split("/")[0] for key in ledger.rows):
        base = {row["key"].split("/")[2]: row for row in ledger.of(f"{name}/{BASELINE}/")}
        for method in METHODS:
            found = ledger.of(f"{name}/{method}/")
            if not found:
                continue
            folds = [row["key"].split("/")[2] for row in found]
            converged = sum(row["status"] == "CONVERGED" for row in found)
            ended = "" if converged == len(found) else f" ({converged} of {len(found)} fits converged)"
            cells = [name, method + ended]
            for score in ("log_density", "rmse"):
                cells.append(f"{np.mean([row[score] for row in found]):.3f}")
                pairs = [(row[score], base[k][score]) for row, k in zip(found, folds, strict=True) if k in base]
                if method != BASELINE and len(pairs) > 1:
                    gap = np.subtract(*np.transpose(pairs))
                    cells[-1] += f" ({gap.mean():+.3f} +- {gap.std(ddof=1) / math.sqrt(len(gap)):.3f})"
            cells.append(f"{100 * np.mean([row['coverage'] for row in found]):.1f}")
            cells.append(f"{np.mean([row['seconds'] for row in found]):.1f}")
            cells.append(f"{np.mean([row['steps'] for row in found]):.0f}")
            rows.append(cells)
    head = ["data", "method", "log density of a test datum", "RMSE", "in the 90 % intervals, %", "CPU seconds", "steps"]
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = command_line(__doc__, quick="generated data, 60 of them, one fold")
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS))
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    parser.add_argument("--folds", type=int, default=NUM_FOLDS, help="how many of the five")
    measure_and_report(parser.parse_args(arguments), run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
