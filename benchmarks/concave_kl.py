r"""Full-data inference against its peers [KMM12 Sec. 7].

Parts, any of which may be named on the command line:

* flops: k(x, x') = sigma^2 exp(-|x - x'|^2 / (2 s^2)), (log s, log sigma) over {-1, 1, 3}^2; Ionosphere (80 % of 351),
  Sonar and USPS 3 against 5 with the logit, Glass with stick-breaking; standardised features. Floating point
  operations and seconds until the bound rises by less than 1e-3, and until it is within 1e-3 of its final value:
  KMM12's Algorithm 1 as printed, gpext's two schedules, and Opper & Archambeau's parameterisation with L-BFGS.
* sweeps: a sequential sweep, a parallel one, and a Cholesky factorisation with a triangular solve.
* training: USPS 3 against 5 to convergence: gpext, scikit-learn's GaussianProcessClassifier, and gpytorch's full
  variational GP (NGD + Adam).
* classes: ordinal and multinomial likelihoods against gpytorch's SoftmaxLikelihood with an SVGP.

    GPEXT_DATA=folder OMP_NUM_THREADS=1 python -m benchmarks.concave_kl --output benchmarks/results/concave_kl.json
    python -m benchmarks.concave_kl --quick
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor
from tqdm import tqdm

import gpext
from benchmarks.augmented_svi import machine, package_versions, write_atomically
from benchmarks.concave_kl_methods import RISE, Climb, opper, ours, printed
from benchmarks.datasets import Dataset, load
from benchmarks.tables import table_of
from gpext.bounds import Bound, PiecewiseQuadratic, Quadrature
from gpext.inference import KL, InferenceWarning
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    MultinomialLogitLikelihood,
    OrdinalLogitLikelihood,
    StickBreakingLikelihood,
)

THETA = (-1.0, 1.0, 3.0)
LARGEST_FOR_PRINTED = 500  # data; its loop over data is in Python
Row = dict[str, Any]


# ---- flops ---------------------------------------------------------------------------------------------------------


def squared_exponential(x: Tensor, log_s: float, log_sigma: float) -> Tensor:
    """Return sigma^2 exp(-|x - x'|^2 / (2 s^2))."""
    return math.exp(2 * log_sigma) * torch.exp(-0.5 * torch.cdist(x, x).square() / math.exp(2 * log_s))


def ways_up(prior: MultivariateNormal, likelihood: Any, y: Tensor, bound: Bound) -> dict[str, Callable[[], Climb]]:
    """Return the methods that apply, by name."""
    methods: dict[str, Callable[[], Climb]] = {"parallel": partial(ours, prior, likelihood, y, bound, "parallel")}
    if isinstance(likelihood, BernoulliLogitLikelihood):
        methods["sequential"] = partial(ours, prior, likelihood, y, bound, "sequential")
        if len(y) < LARGEST_FOR_PRINTED:
            methods["printed"] = partial(printed, prior, y, bound)
    return methods


def flops(datasets: Sequence[str], thetas: Sequence[float], max_iterations: int) -> Iterator[Row]:
    """Yield a row for each data set, theta, bound and method."""
    for name in datasets:
        data = load(name, test_fraction=0.2)
        x, y = data.train_x, data.train_y
        classes = int(y.max()) + 1
        likelihood: Any = BernoulliLogitLikelihood() if data.task == "binary" else StickBreakingLikelihood(classes)
        latents = () if likelihood.num_latents is None else (likelihood.num_latents,)
        for log_s in thetas:
            for log_sigma in thetas:
                K = squared_exponential(x, log_s, log_sigma)
                mean = torch.zeros(*latents, len(y), dtype=torch.float64)
                prior = MultivariateNormal(mean, to_linear_operator(K.expand(*latents, *K.shape)))
                for bound_name, bound in (("exact", Quadrature()), ("R = 20", PiecewiseQuadratic(20))):
                    methods = ways_up(prior, likelihood, y, bound)
                    if bound_name == "R = 20":
                        baseline = partial(opper, prior, likelihood, y, bound, max_iterations)
                        methods["Opper & Archambeau"] = baseline
                        if len(y) < LARGEST_FOR_PRINTED:
                            methods["Opper & Archambeau, log lambda"] = partial(baseline, log_scale=True)
                    for method, run in methods.items():
                        climb = run()
                        k, near = climb.arrived(), climb.within(RISE)
                        yield {
                            "dataset": name,
                            "num_train": len(y),
                            "log_s": log_s,
                            "log_sigma": log_sigma,
                            "bound": bound_name,
                            "method": method,
                            "iterations": k,
                            "flops": climb.flops[k - 1],
                            "seconds": climb.seconds[k - 1],
                            "at_arrival": climb.bound[k - 1],
                            "optimum": climb.bound[-1],
                            "iterations_to_optimum": near,
                            "flops_to_optimum": climb.flops[near - 1],
                            "status": climb.status,
                            "largest_fall": climb.largest_fall,
                        }


# ---- sweeps --------------------------------------------------------------------------------------------------------


def sweeps(sizes: Sequence[int], rounds: int) -> Iterator[Row]:
    """Yield milliseconds a sweep of each schedule, and of the Cholesky and solve, on a logit problem."""
    for n in sizes:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
        K = squared_exponential(x, 0.0, 1.0)
        f = torch.linalg.cholesky(K + 1e-6 * torch.eye(n)) @ torch.randn(n, generator=generator, dtype=torch.float64)
        y = (torch.rand(n, generator=generator, dtype=torch.float64) < torch.sigmoid(f)).double()
        prior = MultivariateNormal(torch.zeros_like(y), to_linear_operator(K))
        likelihood = BernoulliLogitLikelihood()
        root = torch.full((n,), 0.4, dtype=torch.float64)
        best: dict[str, float] = {}
        counts: dict[str, int] = {}
        for _ in range(rounds):
            started = time.perf_counter()
            chol = torch.linalg.cholesky(torch.eye(n, dtype=torch.float64) + root.unsqueeze(-1) * K * root)
            torch.linalg.solve_triangular(chol, root.unsqueeze(-1) * K, upper=False)
            best["floor"] = min(best.get("floor", math.inf), time.perf_counter() - started)
            for schedule in ("parallel", "sequential"):
                seconds = {}
                for steps in (1, 4):  # the difference excludes the start
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", InferenceWarning)
                        rule = KL(schedule=schedule, max_steps=steps, tolerance=0.0)
                        started = time.perf_counter()
                        result = rule.infer(prior, likelihood, y)
                        seconds[result.num_steps] = time.perf_counter() - started
                (few, short), (many, long) = sorted(seconds.items())
                best[schedule] = min(best.get(schedule, math.inf), (long - short) / (many - few))
        for schedule in ("parallel", "sequential"):
            result = KL(schedule=schedule).infer(prior, likelihood, y)
            counts[schedule] = int((result.trace[-1] - result.trace < 1e-6).nonzero()[0]) + 1
        yield {
            "n": n,
            **{f"{name}_ms": 1e3 * value for name, value in best.items()},
            **{f"{name}_sweeps_to_1e-6": value for name, value in counts.items()},
        }


# ---- training ------------------------------------------------------------------------------------------------------


class LatentModel(gpext.models.LatentGP):
    """A constant mean and a scaled RBF kernel for each latent."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, lengthscale: float, ard: bool = False) -> None:
        super().__init__(x, y, likelihood)
        batch = torch.Size([] if likelihood.num_latents is None else [likelihood.num_latents])
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        kernel = gpytorch.kernels.RBFKernel(batch_shape=batch, ard_num_dims=x.size(-1) if ard else None)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)
        self.to(x)
        kernel.lengthscale = lengthscale

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class PeerModel(gpytorch.models.ApproximateGP):
    """The same prior in gpytorch's own variational machinery: D independent latents, whitened, natural q(u)."""

    def __init__(self, inducing_points: Tensor, num_latents: int | None, lengthscale: float) -> None:
        batch = torch.Size([] if num_latents is None else [num_latents])
        q = gpytorch.variational.NaturalVariationalDistribution(inducing_points.size(-2), batch_shape=batch)
        base = gpytorch.variational.VariationalStrategy(
            self, inducing_points, q, learn_inducing_locations=num_latents is not None
        )
        if num_latents is not None:
            base = gpytorch.variational.IndependentMultitaskVariationalStrategy(base, num_tasks=num_latents)
        super().__init__(base)
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        kernel = gpytorch.kernels.RBFKernel(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)
        self.to(inducing_points)
        kernel.lengthscale = lengthscale

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def train_gpext(data: Dataset, likelihood: Any) -> Row:
    """Train a LatentGP by `gpext.fit` and score it."""
    model = LatentModel(data.train_x, data.train_y, likelihood.double(), math.sqrt(data.train_x.size(-1)))
    mll = gpext.mlls.LatentMarginalLogLikelihood(likelihood, model)
    started = time.perf_counter()
    result = gpext.fit(mll, data.train_x, data.train_y, progress=False)
    seconds = time.perf_counter() - started
    with torch.no_grad():
        latent = model.eval()(data.test_x)
        density = likelihood.log_density(data.test_y, latent.mean, latent.variance)
    return {
        "method": f"gpext {type(likelihood).__name__}",
        "seconds": seconds,
        "test_log_density": density.mean().item(),
        "status": result.status.name,
    }


def train_sklearn(data: Dataset) -> Row:
    """Train scikit-learn's Laplace classifier, from the same start."""
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    kernel = ConstantKernel(math.log(2)) * RBF(math.sqrt(data.train_x.size(-1)))
    started = time.perf_counter()
    model = GaussianProcessClassifier(kernel).fit(data.train_x.numpy(), data.train_y.numpy())
    seconds = time.perf_counter() - started
    probabilities = torch.from_numpy(model.predict_proba(data.test_x.numpy()))
    density = probabilities.gather(-1, data.test_y.long().unsqueeze(-1)).log().mean().item()
    return {
        "method": "scikit-learn GaussianProcessClassifier",
        "seconds": seconds,
        "test_log_density": density,
        "status": "CONVERGED",
    }


def train_gpytorch(data: Dataset, num_classes: int | None, num_inducing: int | None, budget: float) -> Row:
    """Train gpytorch's variational GP with NGD (0.1) and Adam (0.01) until its bound stands still or time is up.

    Binary: BernoulliLikelihood with the training inputs as inducing points. Classes: SoftmaxLikelihood without mixing
    weights, with `num_inducing` of them.
    """
    x, y = data.train_x, data.train_y
    if num_classes is None:
        likelihood: Any = gpytorch.likelihoods.BernoulliLikelihood()
        inducing_points = x
    else:
        likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=num_classes, mixing_weights=False)
        inducing_points = gpext.variational.kmeans_inducing_points(x, num_inducing or len(x))
        y = y.long()
    model = PeerModel(inducing_points, num_classes, math.sqrt(x.size(-1)))
    likelihood = likelihood.double()
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    natural = gpytorch.optim.NGD(model.variational_parameters(), num_data=len(y), lr=0.1)
    adam = torch.optim.Adam(model.hyperparameters(), lr=0.01)
    torch.manual_seed(0)
    started = time.perf_counter()
    values: list[float] = []
    status = "TIME"
    while time.perf_counter() - started < budget:
        natural.zero_grad()
        adam.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        natural.step()
        adam.step()
        values.append(-loss.item())
        if len(values) >= 200 and sum(values[-100:]) / 100 - sum(values[-200:-100]) / 100 < 1e-4:
            status = "CONVERGED"
            break
    seconds = time.perf_counter() - started
    model.eval()
    with torch.no_grad():
        latent = model(data.test_x)
        if num_classes is None:
            density = likelihood.log_marginal(data.test_y, latent)
        else:  # scored exactly, not by the likelihood's ten samples
            assert isinstance(latent, MultitaskMultivariateNormal)
            exact = MultinomialLogitLikelihood(num_classes)
            density = exact.log_density(data.test_y, latent.mean.mT, latent.variance.mT)
    return {
        "method": "gpytorch NGD + Adam" + ("" if num_classes is None else f", SVGP {len(inducing_points)}, softmax"),
        "seconds": seconds,
        "test_log_density": density.mean().item(),
        "status": status,
    }


def training(dataset: str, budget: float) -> Iterator[Row]:
    """Yield a row for each method."""
    data = load(dataset)
    for run in (
        lambda: train_gpext(data, BernoulliLogitLikelihood()),
        lambda: train_sklearn(data),
        lambda: train_gpytorch(data, None, None, budget),
    ):
        yield {"dataset": dataset, "num_train": len(data.train_y), **run()}


def classes(datasets: Sequence[str], budget: float, max_train: int | None, splits: int) -> Iterator[Row]:
    """Yield a row for each data set, split and method."""
    for dataset, split in itertools.product(datasets, range(splits)):
        data = load(dataset, max_train=max_train, seed=split)
        num_classes = int(max(data.train_y.max(), data.test_y.max())) + 1
        ordered = data.task == "ordinal"
        likelihood = OrdinalLogitLikelihood(num_classes) if ordered else MultinomialLogitLikelihood(num_classes)
        about = {"dataset": dataset, "split": split, "num_train": len(data.train_y), "num_classes": num_classes}
        yield {**about, **train_gpext(data, likelihood)}
        num_inducing = min(200, len(torch.unique(data.train_x, dim=0)))
        yield {**about, **train_gpytorch(data, num_classes, num_inducing, budget)}


# ---- report --------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("parts", nargs="*", default=["flops", "sweeps", "training", "classes"])
    parser.add_argument("--quick", action="store_true", help="synthetic data, one theta, a few seconds")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for a peer that has not converged")
    parser.add_argument("--max-train", type=int, help="training rows of the class data sets")
    parser.add_argument("--splits", type=int, default=1, help="random splits of the class data sets")
    parser.add_argument("--datasets", nargs="+", help="instead of those of the parts flops and classes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print their tables and write the rows."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    quick = options.quick
    binary = options.datasets or (["synthetic_binary"] if quick else ["ionosphere", "sonar", "usps_3vs5", "glass"])
    ordered = ["ordinal_boston", "ordinal_machine_cpu", "ordinal_esl", "glass", "vehicle", "usps"]
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "flops": partial(flops, binary, (1.0,) if quick else THETA, 50 if quick else 2000),
        "sweeps": partial(sweeps, (100,) if quick else (300, 1000, 2000), 1 if quick else 3),
        "training": partial(training, "synthetic_binary" if quick else "usps_3vs5", 2.0 if quick else options.budget),
        "classes": partial(classes, options.datasets or ordered, options.budget, options.max_train, options.splits),
    }
    chosen = [part for part in options.parts if not (quick and part in ("training", "classes"))]
    results: dict[str, Any] = {"machine": machine(), "versions": package_versions()}
    for part in chosen:
        rows = []
        for row in tqdm(parts[part](), desc=part, disable=None):
            rows.append(row)
            results[part] = rows
            if options.output:
                write_atomically(options.output, results)
        print(f"\n## {part}\n\n{table_of(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
