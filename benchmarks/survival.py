r"""Survival analysis: gpext's piecewise constant hazards and Weibull times against lifelines' Cox and Weibull models.

`effects`: linear effects, where both packages have the same model. Cox's partial likelihood is the profile likelihood
of Poisson data with an interval for each time of an event [Holford 1980; Breslow 1974], so that a Gaussian process of
the log hazard that is linear in the covariates, with a prior so wide that it does not matter, has Cox's estimates as
its posterior mode, and Cox's standard errors by Laplace. Coefficients and log hazards are the latent values of a
LatentGP with a design, h = A f. lifelines treats ties by Efron's method, Poisson data amount to Breslow's.

`held-out`: five folds. The log density is that of the test data, time and event or censoring, in years; concordance is
Harrell's, with the risk by the cumulative hazard at the median time of events (Weibull: minus the median time). The
density of lifelines' Cox model is that of its piecewise constant baseline, with the breaks of the GP.

* Cox, Weibull AFT: lifelines, linear effects;
* piecewise GP: intervals with as many events each; KL, sparse (FITC). Additive: a Matern-5/2 process of log time,
  linear effects of the covariates, the same times a process of log time, and a squared exponential process of place and
  of every other covariate. Interacting: the first of these and one squared exponential process of all inputs;
* Weibull GP: `Censored(WeibullLikelihood())`, log scale = linear effects and a squared exponential process of the
  covariates; KL, exact.

Real data from $GPEXT_DATA (leukemia, 1043 patients). Install lifelines beside gpext. One thread:

    GPEXT_DATA=folder python -m benchmarks.survival --output results/survival.jsonl
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import AdditiveKernel, Kernel, LinearKernel, MaternKernel, ProductKernel, RBFKernel, ScaleKernel
from linear_operator import to_linear_operator
from torch import Tensor
from tqdm import tqdm

import gpext
from benchmarks.datasets import Dataset, load
from benchmarks.ledger import Ledger, Row, measure_and_report
from benchmarks.tables import table
from gpext.inference import KL, Laplace, Rule
from gpext.likelihoods import Censored, Offset, PoissonLikelihood, WeibullLikelihood
from gpext.survival import concordance_index, event_breaks, parametric_hazard, piecewise_hazard, split

SETS = ("synthetic_survival", "leukemia")
NAMES = {
    "synthetic_survival": [f"x{k}" for k in range(1, 7)],
    "leukemia": ["xcoord", "ycoord", "age", "sex", "log(1 + wbc)", "deprivation"],
}
RULES = {"Laplace": Laplace(), "KL": KL()}
INTERVALS = (10, 50, None)  # None: one for each time of an event
FOLDS = 5
NUM_INTERVALS = 10
NUM_INDUCING = 100
PRIOR_DEVIATION = 10.0  # variances are differences from the prior ones: more would cost digits


def lifelines() -> Any:
    """Return the package.

    Raises:
        SystemExit: it is not installed.
    """
    try:
        import lifelines
    except ImportError as error:
        raise SystemExit("this benchmark compares with lifelines: pip install lifelines.") from error
    return lifelines


def frame(x: Tensor, y: Tensor) -> Any:
    """Return the table that lifelines takes."""
    import pandas as pd

    data = pd.DataFrame(x.numpy(), columns=[f"x{k}" for k in range(x.size(-1))])
    return data.assign(time=y[:, 0].numpy(), event=y[:, 1].numpy())


class Effects(gpext.models.LatentGP):
    """Independent coefficients, of which the data see A f."""

    def __init__(self, design: gpext.designs.Design, counts: Tensor, likelihood: Offset, rule: Rule) -> None:
        index = torch.arange(design.shape[1], dtype=counts.dtype).unsqueeze(-1)
        super().__init__(index, counts, likelihood, rule, design=design)

    def forward(self, index: Tensor) -> MultivariateNormal:
        """Return the prior of the coefficients."""
        same = (index == index.mT).to(index.dtype)
        return MultivariateNormal(torch.zeros_like(index[..., 0]), to_linear_operator(PRIOR_DEVIATION**2 * same))


def effects_by_gpext(name: str, rule: str, intervals: int | None) -> Row:
    """Return posterior means and standard deviations of linear effects on the log hazard."""
    data = load(name, test_fraction=0.0)
    t, event = data.train_y.unbind(-1)
    started = time.perf_counter()
    breaks = event_breaks(t, event, len(t) if intervals is None else intervals)
    if intervals is None:  # every time of an event ends an interval, and none is behind the last
        breaks = torch.cat([t.new_zeros(1), t[event == 1].unique()])
        breaks[-1] = t.max()
    split_data = split(t, event, breaks, covariates=data.train_x)
    rows, columns = len(split_data.counts), data.train_x.size(-1)
    size = len(breaks) - 1
    index = torch.cat([split_data.interval[:, None], size + torch.arange(columns).expand(rows, -1)], 1)
    weights = torch.cat([torch.ones(rows, 1, dtype=t.dtype), split_data.inputs[:, 1:]], 1)
    design = gpext.designs.Design(
        torch.arange(rows).repeat_interleave(1 + columns), index.flatten(), weights.flatten(), (rows, size + columns)
    )
    likelihood = Offset(PoissonLikelihood(), split_data.exposure.log())
    model = Effects(design, split_data.counts, likelihood, RULES[rule]).eval()
    with torch.no_grad():
        found = model(model.train_inputs[0][size:])
    seconds = time.perf_counter() - started
    return {
        "set": name,
        "method": f"gpext, {rule}, {'every event' if intervals is None else intervals}",
        "rows": rows,
        "mean": found.mean.tolist(),
        "sd": found.variance.sqrt().tolist(),
        "status": model.result.status.name,
        "seconds": seconds,
    }


def effects_by_lifelines(name: str) -> Row:
    """Return Cox's estimates and their standard errors."""
    data = load(name, test_fraction=0.0)
    started = time.perf_counter()
    found = lifelines().CoxPHFitter().fit(frame(data.train_x, data.train_y), "time", "event")
    seconds = time.perf_counter() - started
    mean, sd = found.params_.to_numpy(), found.standard_errors_.to_numpy()
    return {"set": name, "method": "lifelines, Cox", "mean": mean.tolist(), "sd": sd.tolist(), "seconds": seconds}


class LatentFunction(gpext.models.LatentGP):
    """A Gaussian process with a constant mean."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, kernel: Kernel, inducing: Tensor | None = None) -> None:
        super().__init__(x, y, likelihood, KL(), inducing_inputs=inducing)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel
        self.to(x)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def of_time() -> Kernel:
    """Return a kernel of log time, the first input."""
    return ScaleKernel(MaternKernel(2.5, active_dims=(0,)))


def linear(first: int) -> Kernel:
    """Return a kernel of linear effects of the covariates, the inputs from `first` on."""
    return LinearKernel(active_dims=tuple(range(first, first + 6)), ard_num_dims=6)


def additive() -> Kernel:
    """Return a baseline, linear effects, linear effects that change with time, and smooth effects."""
    smooth = [ScaleKernel(RBFKernel(active_dims=group)) for group in ((1, 2), (3,), (4,), (5,), (6,))]
    return AdditiveKernel(of_time(), linear(1), ProductKernel(of_time(), linear(1)), *smooth)


def interacting() -> Kernel:
    """Return a baseline and a function of time and all covariates."""
    return AdditiveKernel(of_time(), ScaleKernel(RBFKernel(ard_num_dims=7)))


Scores = tuple[Tensor | None, Tensor]  # log densities (N*,), if the model has them, and risks (N*,)


def intervals_of(data: Dataset) -> tuple[Tensor, float]:
    """Return the breaks of the training data, the last behind all data, and the median time of events."""
    t, event = data.train_y.unbind(-1)
    breaks = event_breaks(t, event, NUM_INTERVALS)
    breaks[-1] = max(float(breaks[-1]), float(data.test_y[:, 0].max()))
    return breaks, float(t[event == 1].median())


def piecewise_gp(
    make_kernel: Callable[[], Kernel], num_iterations: int, data: Dataset, max_steps: int
) -> tuple[Scores, Row]:
    """Return scores of the GP of piecewise constant hazards, its inducing inputs after so many k-means iterations."""
    breaks, middle = intervals_of(data)
    t, event = data.train_y.unbind(-1)
    log_time = (0.5 * (breaks[1:] + breaks[:-1])).log()
    coordinates = (log_time - log_time.mean()) / log_time.std()
    train = split(t, event, breaks, covariates=data.train_x, coordinates=coordinates)
    likelihood = Offset(PoissonLikelihood(), train.exposure.log())
    inducing = gpext.variational.kmeans_inducing_points(train.inputs, NUM_INDUCING, num_iterations=num_iterations)
    model = LatentFunction(train.inputs, train.counts, likelihood, make_kernel(), inducing)
    mll = gpext.mlls.LatentMarginalLogLikelihood(likelihood, model)
    found = gpext.fit(mll, train.inputs, train.counts, max_steps=max_steps, initial="data", progress=False)
    hazard = piecewise_hazard(model, train, data.test_x)
    generator = torch.Generator().manual_seed(0)
    log_p = hazard.log_density(*data.test_y.unbind(-1), num_draws=2000, generator=generator)
    risk = hazard.cumulative_hazard(torch.tensor([middle], dtype=t.dtype), num_draws=2).mean.squeeze(-1)
    return (log_p, risk), {"rows": len(train.counts), "steps": found.num_steps, "status": found.status.name}


def weibull_gp(data: Dataset, max_steps: int) -> tuple[Scores, Row]:
    """Return scores of the GP of the log scale of Weibull times."""
    t, event = data.train_y.unbind(-1)
    limits = torch.stack([t, torch.where(event == 1, t, torch.inf)], -1)
    likelihood = Censored(WeibullLikelihood()).double()
    kernel = AdditiveKernel(linear(0), ScaleKernel(RBFKernel(ard_num_dims=6)))
    model = LatentFunction(data.train_x, limits, likelihood, kernel)
    mll = gpext.mlls.LatentMarginalLogLikelihood(likelihood, model)
    found = gpext.fit(mll, data.train_x, limits, max_steps=max_steps, initial="data", progress=False)
    hazard = parametric_hazard(model, likelihood, data.test_x)
    with torch.no_grad():
        log_p = hazard.log_density(*data.test_y.unbind(-1))
        risk = -hazard.quantile_times(0.5).median
    return (log_p, risk), {"rows": len(t), "steps": found.num_steps, "status": found.status.name}


def cox(data: Dataset, max_steps: int) -> tuple[Scores, Row]:
    """Return scores of Cox's model with a piecewise constant baseline, its density from the fitted coefficients."""
    breaks, _ = intervals_of(data)
    fitter = lifelines().CoxPHFitter(baseline_estimation_method="piecewise", breakpoints=breaks[1:-1].numpy())
    params = fitter.fit(frame(data.train_x, data.train_y), "time", "event").params_
    beta = torch.tensor([params["beta_", f"x{k}"] for k in range(data.train_x.size(-1))], dtype=breaks.dtype)
    intercept = params["beta_", "Intercept"]
    baseline = [intercept] + [intercept + params[f"log_lambda{j}_", "Intercept"] for j in range(2, NUM_INTERVALS + 1)]
    log_hazard = torch.tensor(baseline, dtype=breaks.dtype) + (data.test_x @ beta).unsqueeze(-1)
    known = gpext.survival.PiecewiseHazard(breaks, log_hazard, torch.zeros(*log_hazard.shape, len(breaks) - 1).double())
    return (known.log_density(*data.test_y.unbind(-1), num_draws=1), data.test_x @ beta), {}


def partial_cox(data: Dataset, max_steps: int) -> tuple[Scores, Row]:
    """Return the linear predictor of Cox's partial likelihood."""
    found = lifelines().CoxPHFitter().fit(frame(data.train_x, data.train_y), "time", "event")
    return (None, data.test_x @ torch.from_numpy(found.params_.to_numpy())), {}


def weibull_aft(data: Dataset, max_steps: int) -> tuple[Scores, Row]:
    """Return scores of Weibull's regression."""
    fitted = lifelines().WeibullAFTFitter().fit(frame(data.train_x, data.train_y), "time", "event")
    test = frame(data.test_x, data.test_y)
    scale = torch.from_numpy(np.array(fitted.predict_median(test))).flatten()
    shape = math.exp(fitted.params_["rho_", "Intercept"])
    t, event = data.test_y.unbind(-1)
    total = math.log(2) * (t / scale) ** shape  # accumulated hazard
    return (torch.where(event == 1, (shape * total / t).log(), 0.0) - total, -scale), {}


METHODS: dict[str, Callable[[Dataset, int], tuple[Scores, Row]]] = {
    "lifelines, Cox (partial likelihood)": partial_cox,
    "lifelines, Cox (piecewise baseline)": cox,
    "lifelines, Weibull AFT": weibull_aft,
    "gpext, piecewise GP, additive": partial(piecewise_gp, additive, 0),
    "gpext, piecewise GP, interacting": partial(piecewise_gp, interacting, 20),
    "gpext, Weibull GP": weibull_gp,
}


def held_out(name: str, method: str, fold: int, max_steps: int) -> Row:
    """Return the scores of one test part."""
    data = load(name, fold=(fold, FOLDS))
    started = time.perf_counter()
    (log_p, risk), row = METHODS[method](data, max_steps)
    row = {"set": name, "method": method, **row, "seconds": time.perf_counter() - started}
    row["concordance"] = concordance_index(*data.test_y.unbind(-1), risk).index
    return row if log_p is None else {**row, "log_density": log_p.tolist()}


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure the missing rows."""
    for name in SETS if not options.quick else SETS[:1]:
        ledger.get(f"effects/{name}/lifelines", partial(effects_by_lifelines, name))
        for rule in RULES:
            for intervals in INTERVALS[: 1 if options.quick else None]:
                if rule == "KL" and intervals is None:
                    continue  # minutes, and as close to Laplace as with fewer intervals
                ledger.get(f"effects/{name}/{rule}/{intervals}", partial(effects_by_gpext, name, rule, intervals))
        keys = [(method, fold) for fold in range(1 if options.quick else FOLDS) for method in METHODS]
        for method, fold in tqdm(keys, desc=name, disable=None):
            steps = 3 if options.quick else options.max_steps
            ledger.get(f"held-out/{name}/{method}/{fold}", partial(held_out, name, method, fold, steps))


def report(ledger: Ledger) -> str:
    """Return the tables."""
    parts = []
    for name in SETS:
        effects, scores = ledger.of(f"effects/{name}/"), ledger.of(f"held-out/{name}/")
        if effects:
            head = ["method", "rows", *NAMES[name], "seconds"]
            rows = [
                [
                    row["method"],
                    str(row.get("rows", "")),
                    *(f"{m:.3f} ({s:.3f})" for m, s in zip(row["mean"], row["sd"], strict=True)),
                    f"{row['seconds']:.1f}",
                ]
                for row in effects
            ]
            parts += [f"## {name}: log hazard ratios (standard errors)", table(head, rows)]
        if scores:
            parts += [f"## {name}: held out", table(SCORES, [_score(scores, method) for method in METHODS])]
    return "\n\n".join(parts)


SCORES = ["method", "log density of a datum", "minus the additive GP's", "concordance", "seconds a fold"]


def _score(rows: list[Row], method: str) -> list[str]:
    mine = [row for row in rows if row["method"] == method]
    if not mine:
        return [method, "", "", "", ""]
    index, seconds = (np.array([row[key] for row in mine]) for key in ("concordance", "seconds"))
    cells = [method, "", "", f"{index.mean():.3f} ± {_error(index):.3f}", f"{seconds.mean():.1f}"]
    if "log_density" in mine[0]:
        fold_of = {row["key"].rpartition("/")[-1]: row["log_density"] for row in mine}
        ours = [row for row in rows if row["method"] == "gpext, piecewise GP, additive"]
        theirs = {row["key"].rpartition("/")[-1]: row["log_density"] for row in ours}
        pairs = [(fold_of[fold], theirs[fold]) for fold in fold_of if fold in theirs]
        log_p = np.concatenate([row["log_density"] for row in mine])
        gain = np.concatenate([np.subtract(*pair) for pair in pairs]) if pairs else np.zeros(1)
        cells[1] = f"{log_p.mean():.3f} ± {_error(log_p):.3f}"
        cells[2] = f"{gain.mean():.3f} ± {_error(gain):.3f}" if np.abs(gain).max() > 0 else ""
    return cells


def _error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def main(arguments: list[str] | None = None) -> Ledger:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON lines to write to, and to resume from")
    parser.add_argument("--max-steps", type=int, default=100, help="L-BFGS iterations")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few steps on generated data")
    parser.add_argument("--report-only", action="store_true")
    return measure_and_report(parser.parse_args(arguments), run, report)


if __name__ == "__main__":
    main()
