r"""gpext beside GPBoost on four families of its examples: held-out log densities, errors and times, one thread each.

A Matern-3/2 field of variance 1 and range 0.15 on the unit square, as in GPBoost's examples for non-Gaussian data, is
observed at 500 inputs and predicted at 500 others:

* zero-inflated Poisson counts: rate e^{1 + f}, 30 % of them zero for another reason;
* Tobit: max(0, 0.3 + f + 0.4 e), e standard normal. GPBoost's `zero_censored_power_transformed_normal` has a power of
  the observation as a further parameter, which is 1 here and which it estimates;
* negative binomial counts of mean e^{1 + f} and shape 2;
* Gaussian noise of variance e^{-1.5 + g} about f, g another field: GPBoost by its Vecchia approximation, the only one
  it has for that.

Both train all parameters and a constant mean, and give means and variances of the latent field at the test inputs; log
p(y) is the integral of the same formula of p(y | f) over both, by Gauss-Hermite quadrature, at the parameters of each.
Of the heteroscedastic model GPBoost returns the mean and the variance of the response alone, and log p(y) is that of
the normal law with these, for gpext too; under `compound` its rows have log p(y) of its own predictive distribution.
The times are CPU seconds. GPBoost runs in a process of its own, of the interpreter that `--gpboost-python` names (`pip
install gpboost==1.8.0` there), on the same data, turn by turn with gpext.

    OMP_NUM_THREADS=1 python -m benchmarks.gpboost_families --gpboost-python PYTHON --output gpboost_families.jsonl
    python -m benchmarks.gpboost_families --quick --gpboost-python PYTHON     # 60 data, one seed
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from scipy import special, stats
from torch import Tensor

import gpext
from benchmarks.ledger import Ledger, Row, command_line, measure_and_report
from benchmarks.tables import table
from gpext import likelihoods
from gpext.bounds import num_latents
from gpext.inference import EP, KL, Laplace, Rule

Array = Any
torch.broadcast_shapes((1,), (1,))  # imports sympy at its first call; the peer is imported before its clock starts
RULES: dict[str, Rule] = {"Laplace": Laplace(), "KL": KL(), "EP": EP()}
_LONGEST = 30  # CPU seconds of a GPBoost run
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(100)


@dataclass(frozen=True)
class Family:
    """How data are drawn, p(y | f) with its parameters by name, and the models of both packages.

    `ours` returns a likelihood, the targets that it takes, and a function that reads the parameters. `log_prob` and
    `response_mean` are None where means and variances of the response are scored. `peer` are names of GPBoost's
    likelihoods, the next one taken if one fails.
    """

    draw: Callable[[np.random.Generator, Array, Array], Array]
    log_prob: Callable[[Array, Array, dict[str, float]], Array] | None
    response_mean: Callable[[Array, Array, dict[str, float]], Array] | None
    ours: Callable[[Array], tuple[Any, Tensor, Callable[[], dict[str, float]]]]
    peer: tuple[str, ...]
    approximation: str = "none"


def _zero_inflated(rng: np.random.Generator, f: Array, g: Array) -> Array:
    return np.where(rng.uniform(size=len(f)) < 0.3, 0, rng.poisson(np.exp(1 + f)))


def _zero_inflated_log_prob(y: Array, f: Array, p: dict[str, float]) -> Array:
    inside = np.log1p(-p["p0"]) + stats.poisson.logpmf(y, np.exp(f))
    return np.where(y == 0, np.logaddexp(np.log(p["p0"]), inside), inside)


def _our_zero_inflated(y: Array) -> tuple[Any, Tensor, Callable[[], dict[str, float]]]:
    likelihood = likelihoods.ZeroInflated(likelihoods.PoissonLikelihood()).double()
    return likelihood, torch.from_numpy(y), lambda: {"p0": likelihood.zero_probability.item()}


def _tobit(rng: np.random.Generator, f: Array, g: Array) -> Array:
    return np.maximum(0, 0.3 + f + 0.4 * rng.standard_normal(len(f)))


def _tobit_log_prob(y: Array, f: Array, p: dict[str, float]) -> Array:
    power, sd = p.get("lambda", 1.0), p["sigma"]
    some = np.where(y > 0, y, 1.0)
    inside = stats.norm.logpdf(some ** (1 / power), f, sd) - np.log(power) + (1 / power - 1) * np.log(some)
    return np.where(y > 0, inside, special.log_ndtr(-f / sd))


def _tobit_mean(mean: Array, variance: Array, p: dict[str, float]) -> Array:
    z = np.linspace(-9, 9, 2001)[:, None]
    x = mean + np.sqrt(variance + p["sigma"] ** 2) * z
    weights = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
    return (weights * np.maximum(x, 0) ** p.get("lambda", 1.0)).sum(0)


def _our_tobit(y: Array) -> tuple[Any, Tensor, Callable[[], dict[str, float]]]:
    inside = gpytorch.likelihoods.GaussianLikelihood().double()
    targets = torch.from_numpy(np.stack([np.where(y > 0, y, -np.inf), y], -1))
    return likelihoods.Censored(inside), targets, lambda: {"sigma": inside.noise.sqrt().item()}


def _negative_binomial(rng: np.random.Generator, f: Array, g: Array) -> Array:
    return rng.negative_binomial(2, 2 / (2 + np.exp(1 + f)))


def _negative_binomial_log_prob(y: Array, f: Array, p: dict[str, float]) -> Array:
    return stats.nbinom.logpmf(y, p["shape"], special.expit(np.log(p["shape"]) - f))


def _our_negative_binomial(y: Array) -> tuple[Any, Tensor, Callable[[], dict[str, float]]]:
    likelihood = likelihoods.NegativeBinomialLogLikelihood().double()
    return likelihood, torch.from_numpy(y), lambda: {"shape": 1 / likelihood.dispersion.item()}


def _heteroscedastic(rng: np.random.Generator, f: Array, g: Array) -> Array:
    return f + np.exp(0.5 * (-1.5 + g)) * rng.standard_normal(len(f))


def _our_heteroscedastic(y: Array) -> tuple[Any, Tensor, Callable[[], dict[str, float]]]:
    return likelihoods.HeteroscedasticGaussianLikelihood().double(), torch.from_numpy(y), dict


def log_normal_mean(mean: Array, variance: Array, p: dict[str, float]) -> Array:
    """Return the mean of e^f under N(mean, variance), times the share that is not zero for another reason."""
    return (1 - p.get("p0", 0.0)) * np.exp(mean + variance / 2)


FAMILIES = {
    "zero-inflated Poisson": Family(
        _zero_inflated,
        _zero_inflated_log_prob,
        log_normal_mean,
        _our_zero_inflated,
        ("zero_inflated_poisson", "zero_inflated_poisson_fisher_laplace"),
    ),
    "Tobit": Family(_tobit, _tobit_log_prob, _tobit_mean, _our_tobit, ("zero_censored_power_transformed_normal",)),
    "negative binomial": Family(
        _negative_binomial,
        _negative_binomial_log_prob,
        log_normal_mean,
        _our_negative_binomial,
        ("negative_binomial",),
    ),
    "heteroscedastic Gaussian": Family(
        _heteroscedastic,
        None,
        None,
        _our_heteroscedastic,
        ("gaussian_heteroscedastic_fixed_and_random",),
        "vecchia",
    ),
}


@dataclass(frozen=True)
class Data:
    """Inputs on the unit square and observations, to train on and to predict."""

    x: Array  # (n, 2)
    y: Array  # (n,)
    x_test: Array
    y_test: Array


def data_of(family: Family, size: int, seed: int) -> Data:
    """Return observations at `size` inputs and at as many others."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(2 * size, 2))
    distance = 3**0.5 * np.linalg.norm(x[:, None] - x, axis=-1) / 0.15
    root = np.linalg.cholesky((1 + distance) * np.exp(-distance) + 1e-8 * np.eye(2 * size))
    f, g = (root @ rng.standard_normal(2 * size) for _ in range(2))
    y = family.draw(rng, f, g).astype(float)
    return Data(x[:size], y[:size], x[size:], y[size:])


def scores(family: Family, data: Data, mean: Array, variance: Array, parameters: dict[str, float]) -> Row:
    """Return the mean log density of the test data, and the root mean squared error of the predicted mean.

    `missed` is the share of errors above 1/2: of targets in {0, 1}, of those classified wrongly.
    """
    assert family.log_prob is not None
    assert family.response_mean is not None
    f = mean + np.sqrt(variance) * _NODES[:, None]
    log_weights = np.log(_WEIGHTS / _WEIGHTS.sum())[:, None]
    log_p = special.logsumexp(log_weights + family.log_prob(data.y_test, f, parameters), 0)
    error = family.response_mean(mean, variance, parameters) - data.y_test
    return {
        "log_density": float(log_p.mean()),
        "rmse": float(np.sqrt((error**2).mean())),
        "missed": float((np.abs(error) > 0.5).mean()),
        "parameters": parameters,
    }


def scores_of_response(data: Data, mean: Array, variance: Array) -> Row:
    """Return the mean log density of the test data under normal laws, and the root mean squared error of `mean`."""
    log_p = stats.norm.logpdf(data.y_test, mean, np.sqrt(variance))
    return {"log_density": float(log_p.mean()), "rmse": float(np.sqrt(((mean - data.y_test) ** 2).mean()))}


class FieldModel(gpext.models.LatentGP):
    """A Matern-3/2 field with a constant mean for each latent of a likelihood; `options` are those of `LatentGP`.

    With `columns`, each of so many columns has a lengthscale of its own.
    """

    def __init__(
        self, x: Tensor, y: Tensor, likelihood: Any, rule: Rule, *, columns: int | None = None, **options: Any
    ) -> None:
        super().__init__(x, y, likelihood, rule, **options)
        latents = num_latents(likelihood)
        batch = torch.Size() if latents is None else torch.Size([latents])
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        kernel = gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=columns, batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)
        self.double()

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at inputs."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def clocks() -> Array:
    """Return the CPU seconds of this process and the seconds on the wall."""
    return np.array([time.process_time(), time.perf_counter()])


def by_gpext(
    family: Family, data: Data, rule: Rule, initial: Any = "data", last: Rule | None = None, **options: Any
) -> Row:
    """Return scores and times of gpext under a rule, or trained under it and then inferred by the last one.

    `initial` is that of `fit`, and `options` are of `LatentGP`.
    """
    likelihood, y, read = family.ours(data.y)
    x, x_test = torch.from_numpy(data.x), torch.from_numpy(data.x_test)
    started = clocks()
    model = FieldModel(x, y, likelihood, rule, **options)
    mll = gpext.mlls.LatentMarginalLogLikelihood(likelihood, model)
    result = gpext.fit(mll, x, y, progress=False, initial=initial)
    if last is not None:
        model.inference = last
    inferred = model.eval().result
    train = clocks() - started
    started = clocks()
    with torch.no_grad():
        f = model(x_test)
        mean, variance = f.mean.numpy(), f.variance.numpy()
        predict = clocks() - started
        if family.log_prob is None:
            response = likelihood(f)
            found = scores_of_response(data, response.mean.numpy(), response.variance.numpy())
            found["compound"] = response.log_prob(torch.from_numpy(data.y_test)).mean().item()
        else:
            found = scores(family, data, mean, variance, read())
    kernel = model.covar_module
    return {
        **found,
        **times(train, predict),
        "steps": result.num_steps,
        "status": result.status.name,
        "inference": inferred.status.name,
        "message": result.message,
        "covariance": [kernel.outputscale.tolist(), kernel.base_kernel.lengthscale.squeeze().tolist()],
    }


def times(train: Array, predict: Array) -> Row:
    """Return the cells of two pairs of CPU and wall seconds."""
    return {"train": train[0], "predict": predict[0], "train_wall": train[1], "predict_wall": predict[1]}


def by_gpboost(family: Family, data: Data, python: str, longest: int = _LONGEST) -> Row:
    """Return scores and times of GPBoost by the first of its likelihoods to end within `longest` CPU seconds."""
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "data.npz", Path(folder) / "result.npz"
        np.savez(given, x=data.x, y=data.y, x_test=data.x_test)
        for name in family.peer:
            command = [python, str(Path(__file__).with_name("gpboost_peer.py")), str(given), str(made), name]
            command += [family.approximation, str(longest), *(["latent"] if family.log_prob else [])]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode == 0:
                break
            said = ended.stderr.strip().splitlines() if ended.returncode > 0 else []
            failures.append(f"{name}: {said[-1][:200] if said else f'no end within {longest} CPU seconds'}")
        else:
            return {"failures": failures}
        with np.load(made) as loaded:
            found = dict(loaded)
    train, predict = zip(found["seconds"].tolist(), found["wall"].tolist(), strict=True)
    row = {
        **times(train, predict),
        "covariance": found["covariance"].tolist(),
        "likelihood": name,
        "failures": failures,
        "version": str(found["version"]),
    }
    if family.log_prob is not None:
        parameters = {key[10:]: float(value) for key, value in found.items() if key.startswith("parameter_")}
        return {**row, **scores(family, data, found["mean"], found["variance"], parameters)}
    return {**row, **scores_of_response(data, found["response_mean"], found["response_variance"])}


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure the missing rows."""
    size, seeds = (60, 1) if options.quick else (500, options.seeds)
    for seed in range(seeds):
        for name in options.families:
            family = FAMILIES[name]
            data = data_of(family, size, seed)
            if options.gpboost_python:
                ledger.get(f"{name}/GPBoost/{seed}", lambda f=family, d=data: by_gpboost(f, d, options.gpboost_python))
            for rule in RULES:
                key = f"{name}/gpext, {rule}/{seed}"
                ledger.get(key, lambda f=family, d=data, r=rule: by_gpext(f, d, RULES[r]))


def report(ledger: Ledger) -> str:
    """Return the table: means over the seeds, log densities and errors with their difference from GPBoost's."""
    rows = []
    for name in FAMILIES:
        base = {row["key"].split("/")[2]: row for row in ledger.of(f"{name}/GPBoost/") if "train" in row}
        for method in ("GPBoost", *(f"gpext, {rule}" for rule in RULES)):
            tried = ledger.of(f"{name}/{method}/")
            found = [row for row in tried if "train" in row]
            if not found:
                continue
            ended = "" if len(found) == len(tried) else f" ({len(found)} of {len(tried)} runs ended)"
            cells = [name, method + ended]
            for score in ("log_density", "rmse"):
                cells.append(f"{np.mean([row[score] for row in found]):.4f}")
                both = [(row, base[seed]) for row in found if (seed := row["key"].split("/")[2]) in base]
                if method != "GPBoost" and len(both) > 1:
                    gap = np.array([ours[score] - peer[score] for ours, peer in both])
                    cells[-1] += f" ({gap.mean():+.4f} +- {gap.std(ddof=1) / math.sqrt(len(gap)):.4f})"
            cells += [f"{np.mean([row[key] for row in found]):.2f}" for key in ("train", "predict")]
            rows.append(cells)
    head = ["family", "method", "log density of a test datum", "RMSE", "seconds to train", "seconds to predict"]
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = command_line(__doc__, quick="60 data, one seed")
    parser.add_argument("--families", nargs="+", choices=tuple(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--gpboost-python", default=None, help="interpreter that has gpboost; without it, gpext alone")
    measure_and_report(parser.parse_args(arguments), run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
