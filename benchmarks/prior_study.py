"""Priors on the hyperparameters of small data sets: held-out log densities, chosen on ten sets, verified on twenty.

Every model has a constant mean and a scaled Matern-5/2 kernel with a lengthscale for each column, started from the
data (`gpext.fit(..., initial="data")`) and trained by L-BFGS: an ExactGP with Gaussian noise for regression, a LatentGP
with a Bernoulli-logit likelihood under Laplace for classification. Inputs, and targets of regression, are standardised
by the training part. Variants differ in the registered priors alone (lengthscale; outputscale; noise), but for one that
has none and keeps the iterate with the best leave-one-out log density.

Three splits: a third of the data, up to 1000, is the test part, and of the rest 250 rows are used. Log densities are
of standardised targets; ranks are over variants, of the mean of the three splits, 1 for the best. The tables are in
docs/evidence/priors.md.

    OMP_NUM_THREADS=1 python -m benchmarks.prior_study --output prior_study.jsonl
    OMP_NUM_THREADS=1 python -m benchmarks.prior_study --output prior_study.jsonl --verify
    python -m benchmarks.prior_study --quick     # generated data, one split
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.priors import GammaPrior, LogNormalPrior, Prior
from torch import Tensor

import gpext
from benchmarks.datasets import SOURCES, Dataset, load
from benchmarks.ledger import Ledger, Row, measure_and_report
from benchmarks.tables import table
from gpext.priors import lengthscale_prior, noise_prior, outputscale_prior, register_priors

CHOSEN_ON = (
    *("diabetes", "concrete", "yacht", "wine_red", "pol"),
    *("sonar", "heart_statlog", "australian", "banana", "spambase"),
)
VERIFIED_ON = (
    *("energy", "airfoil", "kin8nm", "power_plant", "elevators", "census_house_8L", "california"),
    *("auto_mpg", "machine_cpu", "stocks", "ionosphere", "breast_wisconsin", "crabs", "magic", "electricity"),
    *("letter", "satimage_0", "segment_0", "vehicle_0", "usps_3vs5"),
)
NUM_SPLITS, NUM_TRAIN, NUM_TEST = 3, 250, 1000


@dataclass(frozen=True)
class Variant:
    """The priors of one variant; `stops` keeps the iterate with the best leave-one-out log density."""

    lengthscale: Callable[[int], Prior] | None = None
    outputscale: Callable[[], Prior] | None = None
    noise: Callable[[], Prior] | None = None
    stops: bool = False


def _old(num_columns: int) -> GammaPrior:
    return GammaPrior(3.0, 6.0)


_wide, _narrow = partial(lengthscale_prior, scale=math.sqrt(3)), lengthscale_prior
_low_noise = partial(LogNormalPrior, -4.0, 1.0)
_gamma_scale = partial(GammaPrior, 2.0, 0.15)

VARIANTS = {
    "none": Variant(),
    "none, best leave-one-out": Variant(stops=True),
    "Hvarfner": Variant(_wide),
    "Hvarfner; -; LN(-4, 1)": Variant(_wide, noise=_low_noise),
    "Hvarfner; Gamma(2, 0.15); LN(-4, 1)": Variant(_wide, _gamma_scale, _low_noise),
    "Hvarfner; LN(0, 1); LN(-4, 1)": Variant(_wide, outputscale_prior, _low_noise),
    "Hvarfner; LN(0, 1)": Variant(_wide, outputscale_prior),
    "Hvarfner, s = 1; LN(0, 1)": Variant(_narrow, outputscale_prior),
    "Hvarfner, s = 1; LN(0, 1); LN(-2, 2)": Variant(_narrow, outputscale_prior, noise_prior),
    "Gamma(3, 6); Gamma(2, 0.15); Gamma(1.1, 0.05)": Variant(_old, _gamma_scale, partial(GammaPrior, 1.1, 0.05)),
}


def measured(name: str, label: str) -> str:
    """Return the variant whose fits count for this one: without noise, the first that differs in its prior at most."""
    if SOURCES[name].task == "regression":
        return label
    wanted = replace(VARIANTS[label], noise=None)
    return next(other for other, variant in VARIANTS.items() if replace(variant, noise=None) == wanted)


class _Exact(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.GaussianLikelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), _kernel(x)
        self.to(x)

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class _Latent(gpext.models.LatentGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: gpext.likelihoods.BernoulliLogitLikelihood) -> None:
        super().__init__(x, y, likelihood, gpext.inference.Laplace())
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), _kernel(x)
        self.to(x)

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def _kernel(x: Tensor) -> gpytorch.kernels.Kernel:
    return gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(ard_num_dims=x.size(-1)))


@torch.no_grad()
def leave_one_out(model: _Exact | _Latent) -> float:
    """Return the mean leave-one-out log density at the current parameters."""
    if isinstance(model, _Latent):
        return model.result.log_loo.mean().item()
    x, y = model.train_inputs[0], model.train_targets
    prior = model.forward(x)
    K = prior.covariance_matrix + model.likelihood.noise * torch.eye(len(y), dtype=y.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(K))
    precision = inverse.diagonal()  # of the left-out predictions [Rasmussen & Williams 2006, Eq. 5.12]
    error = inverse @ (y - prior.mean) / precision
    return (0.5 * precision.log() - 0.5 * precision * error.square() - 0.5 * math.log(2 * math.pi)).mean().item()


def score(data: Dataset, variant: Variant) -> Row:
    """Train under one variant and return the test log density, its error, seconds and status."""
    model: _Exact | _Latent
    mll: gpytorch.mlls.MarginalLogLikelihood
    if data.task == "regression":
        gaussian = gpytorch.likelihoods.GaussianLikelihood()
        model = _Exact(data.train_x, data.train_y, gaussian)
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(gaussian, model)
    else:
        model = _Latent(data.train_x, data.train_y, gpext.likelihoods.BernoulliLogitLikelihood())
        mll = gpext.mlls.LatentMarginalLogLikelihood(model.likelihood, model)
    register_priors(mll, lengthscale=variant.lengthscale, outputscale=variant.outputscale, noise=variant.noise)
    best: list[tuple[float, dict[str, Tensor]]] = []

    def keep(step: int, value: float) -> bool:
        found = leave_one_out(model)
        if not best or found > best[0][0]:
            best[:] = [(found, copy.deepcopy(mll.state_dict()))]
        return False

    started = time.process_time()
    result = gpext.fit(
        mll, data.train_x, data.train_y, initial="data", progress=False, callback=keep if variant.stops else None
    )
    if best:
        mll.load_state_dict(best[0][1])
    seconds = time.process_time() - started
    with torch.no_grad():
        model.eval()
        predictive = model.likelihood(model(data.test_x[:NUM_TEST]))
        y = data.test_y[:NUM_TEST]
        if data.task == "regression":
            log_density = torch.distributions.Normal(predictive.mean, predictive.stddev).log_prob(y)
            error = (predictive.mean - y).square().mean().sqrt()
        else:
            log_density = predictive.log_prob(y)
            error = ((predictive.probs > 0.5) != y.bool()).double().mean()
    return {
        "log_density": log_density.mean().item(),
        "error": error.item(),
        "seconds": seconds,
        "status": result.status.name,
        "steps": result.num_steps,
    }


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure the rows that are missing."""
    if options.quick:
        names, splits = ("synthetic_regression", "synthetic_binary"), 1
    else:
        names, splits = VERIFIED_ON if options.verify else CHOSEN_ON, NUM_SPLITS
    for name in names:
        for split in range(splits):
            data = load(name, fold=(split, NUM_SPLITS), max_train=60 if options.quick else NUM_TRAIN)
            for label in dict.fromkeys(measured(name, each) for each in VARIANTS):
                row = ledger.get(f"{name}/{split}/{label}", partial(score, data, VARIANTS[label]))
                print(name, split, label, f"{row['log_density']:.4f}", f"{row['seconds']:.1f} s", row["status"])


def mean_densities(ledger: Ledger, name: str) -> dict[str, float]:
    """Return the mean log density of each variant that has all splits of a set."""
    found = {}
    for label in VARIANTS:
        rows = [ledger.rows.get(f"{name}/{split}/{measured(name, label)}") for split in range(NUM_SPLITS)]
        values = [row["log_density"] for row in rows if row is not None]
        if len(values) == NUM_SPLITS:
            found[label] = float(np.mean(values))
    return found


def report(ledger: Ledger) -> str:
    """Return a table of log densities for each group of sets, with mean ranks last."""
    texts = []
    for title, names in (("Chosen on", CHOSEN_ON), ("Verified on", VERIFIED_ON)):
        densities = {name: mean_densities(ledger, name) for name in names}
        densities = {name: found for name, found in densities.items() if found}
        if not densities:
            continue
        labels = [label for label in VARIANTS if all(label in found for found in densities.values())]
        lines = [[name, *(f"{found[label]:.3f}" for label in labels)] for name, found in densities.items()]
        ranks = [_ranks([found[label] for label in labels]) for found in densities.values()]
        lines.append(["mean rank", *(f"{rank:.2f}" for rank in np.mean(ranks, 0))])
        means = np.mean([[found[label] for label in labels] for found in densities.values()], 0)
        lines.append(["mean", *(f"{mean:.3f}" for mean in means)])
        texts.append(f"{title} {len(densities)} sets\n\n" + table(["data set", *labels], lines))
    return "\n\n".join(texts)


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Return ranks, 1 for the largest; equal values share the mean of theirs."""
    array = np.asarray(values)
    above = (array[None, :] > array[:, None]).sum(1)
    return above + (np.isclose(array[None, :], array[:, None], atol=1e-9).sum(1) + 1) / 2


def main(arguments: Sequence[str] | None = None) -> Ledger:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--report-only", action="store_true")
    return measure_and_report(parser.parse_args(arguments), run, report)


if __name__ == "__main__":
    main()
