r"""The estimators of gpext beside those of others on thirty tables, untuned, on the same five folds.

A classifier is scored by the mean log probability of the class of a held-out row, the share of errors and the expected
calibration error in 15 bins; a regression by the mean log density of standardised held-out targets, the root mean
squared error and the share of rows in 90 % intervals. At most `--rows` rows (a random sample) are used of a set.

* gpext: `GPClassifier()`, `GPRegressor()`;
* scikit-learn's GP: constant times squared exponential, ARD up to 30 columns, white noise added for regression (to 5000
  training rows);
* linear: logistic regression with its penalty by cross-validation; ridge likewise;
* forest: 500 trees; probabilities are smoothed by one vote a class, regression noise is that of out-of-bag residuals;
* boosting: `HistGradientBoosting...`, its noise that of residuals cross-validated in five folds;
* SVGP: gpytorch's, ARD Matern-5/2, k-means inducing points (at most 256), 1000 steps of Adam with rate 0.01 on batches
  of at most 256; 20 draws for softmax;
* GPBoost: its GP with 20 neighbours (Vecchia), logit or Gaussian, in a process of its own (`--peer-python`); two
  classes or regression only.

Numbers of regression methods without a noise model of their own are Gaussian. A line of JSON is appended for each run,
and those that are there are skipped:

    OMP_NUM_THREADS=1 python -m benchmarks.estimators --output estimators.jsonl
    python -m benchmarks.estimators --output estimators.jsonl --table --figure ranks.png
    python -m benchmarks.estimators --output estimators.jsonl --quick --sets glass --methods gpext linear
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CLASSES = {
    "ionosphere": "y",
    "sonar": "y",
    "heart_statlog": "y",
    "breast_wisconsin": "y",
    "pima": "y",
    "australian": "y",
    "banana": "y",
    "spambase": "y",
    "magic04": "y",
    "usps_3vs5": "y",
    "glass": "y",
    "vehicle": "y",
    "vowel": "y",
    "segment": "y",
    "satimage": "y",
}
NUMBERS = {
    "boston_housing": "y",
    "concrete": "y",
    "energy": "y_heating",
    "yacht": "y",
    "airfoil": "y",
    "kin8nm": "y",
    "power_plant": "y",
    "abalone": "y",
    "wine_quality_red": "y",
    "ordinal_machine_cpu": "y_cont",
    "ordinal_auto_mpg": "y_cont",
    "ordinal_triazines": "y_cont",
    "protein_casp": "y",
    "california_housing": "y",
    "elevators": "y",
}
METHODS = ("gpext", "scikit-learn GP", "linear", "forest", "boosting", "SVGP", "GPBoost")
FOLDS = 5
MOST_OF_SKLEARN = 5000
MOST_SCALES = 30  # columns up to which scikit-learn's kernel has a lengthscale of each: a gradient is N x N x columns


@dataclass(frozen=True)
class Split:
    """One fold: training and test rows; labels are 0, 1, ..., numbers are standardised by the training rows."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    num_classes: int | None


def read(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the features (n, d) and the targets (n,) of a set in `$GPEXT_DATA`."""
    target = CLASSES.get(name) or NUMBERS[name]
    with gzip.open(Path(os.environ["GPEXT_DATA"]) / f"{name}.csv.gz", "rt", encoding="utf-8") as file:
        names = file.readline().strip().split(",")
        values = np.loadtxt(file, delimiter=",", dtype=float, ndmin=2)
    is_target = [c == "split" or c in ("y", "y5", "y10") or c.startswith("y_") for c in names]
    return values[:, ~np.array(is_target)], values[:, names.index(target)]


def split(name: str, fold: int, rows: int) -> Split:
    """Return one of five folds of a random sample of at most `rows` rows."""
    x, y = read(name)
    order = np.random.default_rng(0).permutation(len(y))[:rows]
    test = order[fold::FOLDS]
    train = np.setdiff1d(order, test)
    if name in CLASSES:
        classes, codes = np.unique(y, return_inverse=True)
        return Split(x[train], codes[train], x[test], codes[test], len(classes))
    center, scale = y[train].mean(), y[train].std()
    y = (y - center) / scale
    return Split(x[train], y[train], x[test], y[test], None)


# ---- methods: of a split to probabilities (n, K), or to the mean and a log density with an interval of 90 % --------


def gaussian(mean: np.ndarray, deviation: Any, y: np.ndarray) -> dict[str, float]:
    """Return the scores of Gaussian predictions."""
    log_density = -0.5 * ((y - mean) / deviation) ** 2 - np.log(deviation) - 0.5 * np.log(2 * np.pi)
    inside = np.abs(y - mean) <= 1.6448536 * deviation
    return number_scores(log_density, mean, inside, y)


def number_scores(log_density: np.ndarray, mean: np.ndarray, inside: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return the scores of predictions of numbers."""
    error = float(np.sqrt(np.mean((y - mean) ** 2)))
    return {"log_density": float(log_density.mean()), "error": error, "calibration": float(inside.mean())}


def class_scores(probabilities: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return the scores of predictions of classes."""
    chosen = probabilities[np.arange(len(y)), y]
    most, right = probabilities.max(1), probabilities.argmax(1) == y
    bins = np.minimum((15 * most).astype(int), 14)
    gaps = [abs(most[bins == b].sum() - right[bins == b].sum()) for b in range(15)]
    with np.errstate(divide="ignore"):
        log_density = float(np.log(chosen).mean())
    return {"log_density": log_density, "error": float(1 - right.mean()), "calibration": float(sum(gaps) / len(y))}


def by_gpext(data: Split) -> dict[str, float]:
    """Score the estimators of gpext."""
    from gpext.estimators import GPClassifier, GPRegressor

    if data.num_classes is not None:
        model = GPClassifier().fit(data.train_x, data.train_y)
        return class_scores(model.predict_proba(data.test_x), data.test_y) | {"status": model.fit_result_.status.name}
    model = GPRegressor().fit(data.train_x, data.train_y)
    low, high = model.predict_interval(data.test_x).T
    inside = (low <= data.test_y) & (data.test_y <= high)
    log_density = model.log_density(data.test_x, data.test_y)
    scores = number_scores(log_density, model.predict(data.test_x), inside, data.test_y)
    return scores | {"status": model.fit_result_.status.name, "noise": model.likelihood_name_}


def by_sklearn(data: Split) -> dict[str, float]:
    """Score scikit-learn's Gaussian processes."""
    from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if len(data.train_y) > MOST_OF_SKLEARN:
        return {}
    columns = data.train_x.shape[1]
    kernel = ConstantKernel() * RBF(np.full(columns if columns <= MOST_SCALES else 1, np.sqrt(columns)))
    if data.num_classes is not None:
        model = make_pipeline(StandardScaler(), GaussianProcessClassifier(kernel)).fit(data.train_x, data.train_y)
        return class_scores(model.predict_proba(data.test_x), data.test_y)
    process = GaussianProcessRegressor(kernel + WhiteKernel(0.1))
    model = make_pipeline(StandardScaler(), process).fit(data.train_x, data.train_y)
    mean, deviation = model.predict(data.test_x, return_std=True)
    return gaussian(mean, deviation, data.test_y)


def by_linear(data: Split) -> dict[str, float]:
    """Score logistic regression or ridge regression."""
    from sklearn.linear_model import LogisticRegressionCV, RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if data.num_classes is not None:
        logistic = LogisticRegressionCV(scoring="neg_log_loss", max_iter=1000)
        model = make_pipeline(StandardScaler(), logistic).fit(data.train_x, data.train_y)
        return class_scores(model.predict_proba(data.test_x), data.test_y)
    model = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 13))).fit(data.train_x, data.train_y)
    freedom = max(len(data.train_y) - data.train_x.shape[1] - 1, 1)
    deviation = np.sqrt(np.sum((data.train_y - model.predict(data.train_x)) ** 2) / freedom)
    return gaussian(model.predict(data.test_x), deviation, data.test_y)


def by_forest(data: Split) -> dict[str, float]:
    """Score random forests."""
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    if data.num_classes is not None:
        model = RandomForestClassifier(500, random_state=0).fit(data.train_x, data.train_y)
        smoothed = (500 * model.predict_proba(data.test_x) + 1) / (500 + data.num_classes)
        return class_scores(smoothed, data.test_y)
    model = RandomForestRegressor(500, oob_score=True, random_state=0).fit(data.train_x, data.train_y)
    deviation = np.std(data.train_y - model.oob_prediction_)
    return gaussian(model.predict(data.test_x), deviation, data.test_y)


def by_boosting(data: Split) -> dict[str, float]:
    """Score gradient boosting of histograms."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.model_selection import cross_val_predict

    if data.num_classes is not None:
        model = HistGradientBoostingClassifier(random_state=0).fit(data.train_x, data.train_y)
        return class_scores(model.predict_proba(data.test_x), data.test_y)
    held_out = cross_val_predict(HistGradientBoostingRegressor(random_state=0), data.train_x, data.train_y)
    model = HistGradientBoostingRegressor(random_state=0).fit(data.train_x, data.train_y)
    return gaussian(model.predict(data.test_x), np.std(data.train_y - held_out), data.test_y)


def by_svgp(data: Split) -> dict[str, float]:
    """Score gpytorch's variational process, trained by Adam."""
    import gpytorch
    import torch
    from gpytorch import variational
    from sklearn.cluster import KMeans
    from sklearn.preprocessing import StandardScaler

    torch.manual_seed(0)
    scaler = StandardScaler().fit(data.train_x)
    x, test_x = (torch.from_numpy(scaler.transform(each)) for each in (data.train_x, data.test_x))
    y, test_y = torch.from_numpy(data.train_y), torch.from_numpy(data.test_y)
    centers = KMeans(min(256, len(np.unique(x, axis=0)) // 2), n_init=1, random_state=0).fit(x.numpy()).cluster_centers_
    several = torch.Size([data.num_classes]) if data.num_classes is not None and data.num_classes > 2 else torch.Size()
    points = torch.from_numpy(centers)

    class Process(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            distribution = variational.CholeskyVariationalDistribution(len(points), batch_shape=several)
            strategy: Any = variational.VariationalStrategy(self, points, distribution)
            if several:
                strategy = variational.IndependentMultitaskVariationalStrategy(strategy, num_tasks=several[0])
            super().__init__(strategy)
            self.mean_module = gpytorch.means.ConstantMean(batch_shape=several)
            base = gpytorch.kernels.MaternKernel(2.5, ard_num_dims=x.size(-1), batch_shape=several)
            self.covar_module = gpytorch.kernels.ScaleKernel(base, batch_shape=several)

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    likelihood: Any
    if data.num_classes is None:
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
    elif several:
        likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=data.num_classes, mixing_weights=False)
    else:
        likelihood, y = gpytorch.likelihoods.BernoulliLikelihood(), y.double()
    model, likelihood = Process().double(), likelihood.double()
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.01)
    size = min(256, len(y))
    for _ in range(1000):
        index = torch.randperm(len(y))[:size]
        optimizer.zero_grad()
        loss = -objective(model(x[index]), y[index]).sum()
        loss.backward()
        optimizer.step()
    model.eval(), likelihood.eval()
    with torch.no_grad(), gpytorch.settings.num_likelihood_samples(20):
        found = likelihood(model(test_x))
    if data.num_classes is None:
        return gaussian(found.mean.numpy(), found.variance.sqrt().numpy(), data.test_y)
    probabilities = found.probs.mean(0) if several else torch.stack([1 - found.probs, found.probs], -1)
    return class_scores(probabilities.numpy(), test_y.numpy())


_PEER = """
import resource, sys, time, numpy as np, gpboost as gpb
resource.setrlimit(resource.RLIMIT_CPU, 2 * (int(sys.argv[3]),))
data = np.load(sys.argv[1]); binary = bool(data["binary"])
started = time.process_time()
model = gpb.GPModel(gp_coords=data["train_x"], cov_function="matern_ard", cov_fct_shape=2.5, gp_approx="vecchia",
                    num_neighbors=20, likelihood="bernoulli_logit" if binary else "gaussian")
ones = np.ones((len(data["train_y"]), 1))
model.fit(y=data["train_y"].astype(float), X=ones)
found = model.predict(gp_coords_pred=data["test_x"], X_pred=np.ones((len(data["test_x"]), 1)), predict_var=True,
                      predict_response=True)
np.savez(sys.argv[2], mean=found["mu"], variance=found["var"], seconds=time.process_time() - started)
"""


def by_gpboost(data: Split, python: str | None, longest: float) -> dict[str, float]:
    """Score GPBoost's Gaussian processes, in a process of their own that ends after `longest` CPU seconds."""
    if python is None or data.num_classes not in (None, 2):
        return {}
    center, scale = data.train_x.mean(0), data.train_x.std(0)
    kept = scale > 0
    train_x, test_x = ((each[:, kept] - center[kept]) / scale[kept] for each in (data.train_x, data.test_x))
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "given.npz", Path(folder) / "found.npz"
        np.savez(given, train_x=train_x, test_x=test_x, train_y=data.train_y, binary=data.num_classes is not None)
        limit = math.ceil(longest)
        ended = subprocess.run([python, "-c", _PEER, str(given), str(found), str(limit)], capture_output=True)
        if ended.returncode < 0:
            raise TimeoutError(f"no end within {limit} CPU seconds")
        ended.check_returncode()
        result = np.load(found)
        mean, variance, seconds = result["mean"], result["variance"], float(result["seconds"])
    if data.num_classes is not None:
        return class_scores(np.stack([1 - mean, mean], 1), data.test_y) | {"cpu_seconds": seconds}
    return gaussian(mean, np.sqrt(variance), data.test_y) | {"cpu_seconds": seconds}


@contextmanager
def at_most(cpu_seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block when the process has used so many CPU seconds in it."""

    def end(*_: object) -> None:
        raise TimeoutError(f"no end within {cpu_seconds:g} CPU seconds")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--sets", nargs="*", default=[*CLASSES, *NUMBERS])
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=METHODS)
    parser.add_argument("--folds", nargs="*", type=int, default=range(FOLDS))
    parser.add_argument("--rows", type=int, default=10**9)
    parser.add_argument("--peer-python", help="an interpreter that has gpboost")
    parser.add_argument("--longest", type=float, default=1800, help="CPU seconds of a run")
    parser.add_argument("--quick", action="store_true", help="300 rows and one fold")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--figure", type=Path, help="where to draw the mean ranks")
    options = parser.parse_args(arguments)
    if options.table:
        from benchmarks.estimators_report import draw, report

        sys.stdout.write(report(options.output, options.methods))
        if options.figure is not None:
            draw(options.output, options.figure, options.methods)
        return
    if options.quick:
        options.rows, options.folds = 300, [0]
    methods: dict[str, Callable[[Split], dict[str, float]]] = {
        "gpext": by_gpext,
        "scikit-learn GP": by_sklearn,
        "linear": by_linear,
        "forest": by_forest,
        "boosting": by_boosting,
        "SVGP": by_svgp,
        "GPBoost": lambda data: by_gpboost(data, options.peer_python, options.longest),
    }
    known = options.output.read_text().splitlines() if options.output.exists() else []
    done = {tuple(json.loads(line)[key] for key in ("set", "fold", "rows", "method")) for line in known}
    for fold in options.folds:
        for name in options.sets:
            for method in options.methods:
                if (name, fold, options.rows, method) in done:
                    continue
                data = split(name, fold, options.rows)
                started, at = time.process_time(), time.perf_counter()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        with at_most(options.longest):
                            scores = methods[method](data)
                    except Exception as error:  # a peer's failure is a row of the table
                        scores = {"failed": f"{type(error).__name__}: {error}"[:200]}
                if not scores:
                    continue
                run = {"cpu_seconds": time.process_time() - started, "seconds": time.perf_counter() - at}
                row = {"set": name, "fold": fold, "rows": options.rows, "method": method, "n": len(data.train_y)}
                with options.output.open("a") as file:
                    file.write(json.dumps({**row, **run, **scores}) + "\n")


if __name__ == "__main__":
    main()
