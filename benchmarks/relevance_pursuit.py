r"""Robust regression against relevance pursuit [Ament et al. 2024] on sparsely corrupted targets.

Functions: Friedman's of five inputs (noise 1) and Hartmann's of six (noise 0.1), 100 inputs uniform in the unit cube. A
share of the targets is corrupted, S being the standard deviation of the function:

* constant: replaced by the mean plus 20 S;
* uniform: replaced by uniform numbers within the function's range, so that no target alone is suspicious;
* student: Student-t noise of two degrees of freedom and scale S is added;
* one-sided: |N(0, (5 S)^2)| is added.

Methods: gpytorch's exact GP; `RobustConjugate` about the prior mean, and thrice more about the leave-one-out means of
the fit before; Student-t noise by KL and by EP, Laplace noise by KL; and BoTorch's
`RobustRelevancePursuitSingleTaskGP` with its own defaults (its priors, its standardisation), which takes minutes a fit.
All others have a constant mean, an ARD squared exponential kernel without priors, and targets less their median over
1.4826 times the median absolute deviation. A score is over 500 new inputs: the root mean squared error of E f in S, and
the mean log density of clean observations in units of S.

A line of JSON is appended for each run, and those that are there are skipped:

    OMP_NUM_THREADS=1 python -m benchmarks.relevance_pursuit --output results.jsonl
    python -m benchmarks.relevance_pursuit --output results.jsonl --table
    python -m benchmarks.relevance_pursuit --output results.jsonl --quick --cells friedman/constant/0.15
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.distributions import Distribution, Normal
from tqdm import tqdm

import gpext
from benchmarks import robust_regression_methods as robust
from benchmarks.tables import table
from gpext.inference import EP, KL, RobustConjugate, Rule
from gpext.likelihoods import LaplaceLikelihood, StudentTLikelihood
from gpext.mlls import LatentMarginalLogLikelihood

CELLS = [
    ("friedman", "none", 0.0),
    ("friedman", "constant", 0.15),
    ("friedman", "uniform", 0.05),
    ("friedman", "uniform", 0.15),
    ("friedman", "uniform", 0.3),
    ("friedman", "student", 0.15),
    ("friedman", "one-sided", 0.15),
    ("hartmann", "constant", 0.15),
    ("hartmann", "uniform", 0.15),
]
DIMENSIONS, NOISE = {"friedman": 5, "hartmann": 6}, {"friedman": 1.0, "hartmann": 0.1}
_SCALE = 1 / math.sqrt(12)  # the standard deviation of a uniform input
RECENTRED = 3
Scores = tuple[Tensor, Distribution]  # E f and p(y) at the test inputs, in the units of the function


@dataclass(frozen=True)
class Problem:
    """Training data, in the unit cube and the units of the function, and clean test data."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_f: Tensor
    test_y: Tensor
    spread: float  # S


def function(name: str, x: Tensor) -> Tensor:
    """Return the function of inputs (N, d) in the unit cube."""
    if name == "friedman":
        wave = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1])
        return wave + 20 * (x[:, 2] - 0.5).square() + 10 * x[:, 3] + 5 * x[:, 4]
    from botorch.test_functions import Hartmann

    return Hartmann(dim=6).double()(x)


def draw(name: str, regime: str, share: float, seed: int, num_train: int = 100, num_test: int = 500) -> Problem:
    """Draw a problem; the corruption of a seed does not change its inputs and its noise."""
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    x = torch.rand(num_train + num_test, DIMENSIONS[name], **options)
    f = function(name, x)
    y = f + NOISE[name] * torch.randn(len(x), **options)
    wide = function(name, torch.rand(4000, x.size(-1), **options))
    spread, count = float(wide.std()), round(share * num_train)
    index = torch.randperm(num_train, generator=generator)[:count]
    z, u = torch.randn(count, **options), torch.rand(count, **options)
    y[index] = {
        "none": y[index],
        "constant": wide.mean() + 20 * spread + 0 * z,
        "uniform": wide.min() + (wide.max() - wide.min()) * u,
        "student": y[index] + spread * z * (-u.log()).rsqrt(),  # N / sqrt(chi^2_2 / 2)
        "one-sided": y[index] + 5 * spread * z.abs(),
    }[regime]
    return Problem(x[:num_train], y[:num_train], x[num_train:], f[num_train:], y[num_train:], spread)


class LatentModel(robust.CommonPrior, gpext.models.LatentGP):
    """A GP with any likelihood."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, rule: Rule) -> None:
        super().__init__(x, y, likelihood.to(x), rule)
        self.begin(x, _SCALE)
        likelihood.noise = robust.NOISE


def _standardised(problem: Problem) -> tuple[Tensor, float, float]:
    centre = problem.y.median()
    scale = 1.4826 * (problem.y - centre).abs().median()
    return (problem.y - centre) / scale, float(centre), float(scale)


def _back(problem: Problem, model: Any, centre: float, scale: float) -> Scores:
    with torch.no_grad():
        latent = model.eval()(problem.test_x)
        mean, predictive = latent.mean, model.likelihood.eval()(latent)
    if isinstance(predictive, MultivariateNormal):
        predictive = Normal(predictive.mean, predictive.stddev)
    transform = torch.distributions.AffineTransform(centre, scale)
    return centre + scale * mean, torch.distributions.TransformedDistribution(
        predictive, [transform], validate_args=False
    )


def exact(problem: Problem) -> Scores:
    """Gaussian noise."""
    y, centre, scale = _standardised(problem)
    model = robust.ExactModel(problem.x, y, _SCALE)
    gpext.fit(ExactMarginalLogLikelihood(model.likelihood, model), problem.x, y, progress=False)
    return _back(problem, model, centre, scale)


def latent(problem: Problem, likelihood: Any, rule: Rule, recentred: int = 0) -> Scores:
    """A likelihood by a rule; `recentred` fits more, each about the leave-one-out means of the last."""
    y, centre, scale = _standardised(problem)
    model = LatentModel(problem.x, y, likelihood, rule)
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    gpext.fit(mll, problem.x, y, progress=False)
    for _ in range(recentred):
        model.inference = model.inference.centred_at(model.result)  # type: ignore[attr-defined]
        gpext.fit(mll, problem.x, y, progress=False)
    return _back(problem, model, centre, scale)


def relevance_pursuit(problem: Problem) -> Scores:
    """BoTorch's model as it comes."""
    from botorch.fit import fit_gpytorch_mll
    from botorch.models.robust_relevance_pursuit_model import RobustRelevancePursuitSingleTaskGP

    model = RobustRelevancePursuitSingleTaskGP(problem.x, problem.y.unsqueeze(-1))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    noise = model.likelihood.noise_covar.base_noise.noise * model.outcome_transform.stdvs.square()
    with torch.no_grad():
        posterior = model.posterior(problem.test_x)
        mean, variance = posterior.mean.squeeze(-1), posterior.variance.squeeze(-1)
        return mean, Normal(mean, (variance + noise.squeeze()).sqrt())


METHODS: dict[str, Callable[[Problem], Scores]] = {
    "exact GP": exact,
    "RobustConjugate": lambda p: latent(p, GaussianLikelihood(), RobustConjugate()),
    "RobustConjugate, recentred": lambda p: latent(p, GaussianLikelihood(), RobustConjugate(), RECENTRED),
    "Student-t, KL": lambda p: latent(p, StudentTLikelihood(), KL()),
    "Student-t, EP": lambda p: latent(p, StudentTLikelihood(), EP()),
    "Laplace noise, KL": lambda p: latent(p, LaplaceLikelihood(), KL()),
    "relevance pursuit": relevance_pursuit,
}


def run(problem: Problem, method: Callable[[Problem], Scores]) -> dict[str, Any]:
    """Return the scores of a method, and the wall-clock and CPU seconds of its training and prediction."""
    started, cpu = time.perf_counter(), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            mean, predictive = method(problem)
        except (RuntimeError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
    taken = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
    error = (mean - problem.test_f).square().mean().sqrt() / problem.spread
    density = predictive.log_prob(problem.test_y).mean() + math.log(problem.spread)
    return {"rmse": error.item(), "log_density": density.item(), **taken}


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Return tables of each cell: of the methods with the most seeds, and of all methods on the seeds that all have."""
    sections = []
    for cell in CELLS:
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for row in rows:
            if (row["function"], row["regime"], row["share"]) == cell:
                found.setdefault(row["method"], {})[row["seed"]] = row
        most = max((len(runs) for runs in found.values()), default=0)
        groups = [[method for method, runs in found.items() if len(runs) == most], list(found)]
        for methods in groups if groups[0] != groups[1] else groups[:1]:
            seeds = sorted(set.intersection(*(set(found[method]) for method in methods))) if methods else []
            if seeds:
                title = f"### {cell[0]}, {cell[1]}, {cell[2]:.0%}: {len(seeds)} data sets"
                sections.append(
                    f"{title}\n\n{_table({method: [found[method][s] for s in seeds] for method in methods})}"
                )
    return "\n\n".join(sections)


def _table(runs: dict[str, list[dict[str, Any]]]) -> str:
    lines = []
    for method, of_seeds in runs.items():
        complete = [row for row in of_seeds if "rmse" in row]
        cells = [_mean([row[key] for row in complete]) for key in ("rmse", "log_density")]
        seconds = sum(row["cpu_seconds"] for row in complete) / max(len(complete), 1)
        lines.append([method, *cells, f"{seconds:.1f}", str(len(of_seeds) - len(complete))])
    return table(("method", "RMSE / S", "log density", "CPU seconds", "failed"), lines)


def _mean(values: Sequence[float]) -> str:
    if not values:
        return ""
    value = torch.tensor(values, dtype=torch.float64)
    error = f" +- {value.std() / math.sqrt(len(value)):.3f}" if len(value) > 1 else ""
    return f"{value.mean():.3f}{error}"


def _name(cell: tuple[str, str, float]) -> str:
    return "/".join(map(str, cell))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="results, one JSON object a line")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--cells", nargs="+", choices=[_name(cell) for cell in CELLS], help="all by default")
    parser.add_argument("--quick", action="store_true", help="20 training data and one seed")
    parser.add_argument("--table", action="store_true", help="run nothing; print the tables of what is there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = options.output.read_text(encoding="utf-8").splitlines() if options.output.exists() else []
    rows = [json.loads(line) for line in lines]
    done = {(row["function"], row["regime"], row["share"], row["seed"], row["method"]) for row in rows}
    cells = [cell for cell in CELLS if options.cells is None or _name(cell) in options.cells]
    seeds = 1 if options.quick else options.seeds
    keys = [(*cell, seed, method) for seed in range(seeds) for cell in cells for method in options.methods]
    for key in tqdm([k for k in keys if k not in done and not options.table], desc="relevance pursuit", disable=None):
        name, regime, share, seed, method = key
        problem = draw(name, regime, share, seed, *((20, 20) if options.quick else ()))
        row = {"function": name, "regime": regime, "share": share, "seed": seed, "method": method}
        rows.append(row | run(problem, METHODS[method]))
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
