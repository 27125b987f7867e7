"""gpext beside stock gpytorch on data that scikit-learn brings along: two tables and four figures.

    python benchmarks/demo.py --output demo_output

Three data sets: breast cancer and the handwritten digits 3 and 5 (classification, Bernoulli likelihood with logit
link), and the progression of diabetes with one training target in twenty corrupted (regression, Student-t noise).
Three ways to train one and the same sparse Gaussian process (ARD squared exponential, the same fixed inducing points,
the same start, float64, all data in every step), with the options a newcomer would take:

* gpext: ``gpext.fit(mll, x, y)``;
* gpytorch Adam: ``VariationalELBO``, Adam with learning rate 0.01;
* gpytorch NGD: ``VariationalELBO``, NGD with step 0.1 for q(u) and Adam with learning rate 0.01 for the rest.

The second table is of the same runs with the default priors of ``gpext.priors`` on lengthscales and outputscale, which
``register_priors(mll)`` gives to every method alike: what of a difference is due to the priors is in both tables.

The tables' seconds are training time until the mean test log density is first within 0.01 nats of the best value that
any method had at any time, with "(left)" where the model ended outside again: arriving on the way through is no
merit, and gpext is called first only where it stayed. The clock stands still while a model is evaluated. The test
sets are small, so every difference of final values is printed with its standard error over the test data.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpytorch
import matplotlib
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, only this folder would be searched

import gpext
from benchmarks.harness import Initial, Learner, Problem, Recorder, Trace, choose_inducing_points, train
from benchmarks.methods import METHODS
from benchmarks.ours import LIKELIHOODS, SiteLearner
from benchmarks.scoring import conditional, log_predictive_density
from gpext import plots
from gpext.inference import augmented_sites
from gpext.priors import register_priors

TOLERANCE = 0.01  # nats; a method has converged when it is this close to the best
TEST_SHARE = 1 / 3
CORRUPTED_SHARE = 0.05
FLAG_BELOW = 0.1  # a datum whose weight is below this share of the largest possible one is flagged as an outlier
PEERS = {"gpytorch Adam": "adam", "gpytorch NGD": "ngd"}
METHOD_NAMES = ("gpext", *PEERS)
TABLES = (
    ("table", "Without priors on hyperparameters, as a newcomer would begin:", False),
    ("table_priors", "With the default priors of gpext.priors, the same for every method:", True),
)
STYLES = dict(zip(METHOD_NAMES, zip(plots.COLORS, plots.MARKERS, ("-", "--", ":"), strict=False), strict=True))


@dataclass(frozen=True)
class Outcome:
    """One method on one data set: its course and the trained model."""

    method: str
    trace: Trace
    learner: Learner
    test_log_density: Tensor  # (N*,) at the end


# ---- data ----------------------------------------------------------------------------------------------------------


def classification_problem(name: str, features: np.ndarray, targets: np.ndarray, num_inducing: int) -> Problem:
    """Standardised features, classes 0 and 1."""
    train, test = split(len(targets))
    x = standardise(features, train)
    return make_problem(name, "logit", x, torch.from_numpy(targets.astype(float)), train, test, num_inducing)


def diabetes_problem(num_inducing: int, feature: int | None = None) -> tuple[Problem, Tensor]:
    """The diabetes data with corrupted training targets, and which of these are corrupted.

    Args:
        num_inducing: number of inducing points.
        feature: keep this column alone.
    """
    features, targets = load_diabetes(return_X_y=True)
    train, test = split(len(targets))
    x = standardise(features if feature is None else features[:, [feature]], train)
    rng = np.random.default_rng(1)
    corrupted = rng.choice(train, round(CORRUPTED_SHARE * len(train)), replace=False)
    y = targets.copy()
    y[corrupted] += rng.choice([-1, 1], len(corrupted)) * rng.uniform(4, 8, len(corrupted)) * targets.std()
    # who analyses the data does not know which targets to leave out: median and median absolute deviation
    center = np.median(y[train])
    scale = 1.4826 * np.median(np.abs(y[train] - center))
    problem = make_problem(
        "diabetes, outliers", "student_t", x, torch.from_numpy((y - center) / scale), train, test, num_inducing
    )
    return problem, torch.from_numpy(np.isin(train, corrupted))


def split(num_data: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and test rows."""
    order = np.random.default_rng(0).permutation(num_data)
    num_test = round(TEST_SHARE * num_data)
    return order[num_test:], order[:num_test]


def standardise(features: np.ndarray, train: np.ndarray) -> Tensor:
    """Features with mean 0 and variance 1 on the training rows, constant ones dropped."""
    center, scale = features[train].mean(0), features[train].std(0)
    kept = scale > 0
    return torch.from_numpy((features[:, kept] - center[kept]) / scale[kept])


def make_problem(
    name: str, likelihood: str, x: Tensor, y: Tensor, train: np.ndarray, test: np.ndarray, num_inducing: int
) -> Problem:
    """What every method gets; the lengthscales start at the square root of the number of features."""
    return Problem(
        dataset=name,
        likelihood=likelihood,
        train_x=x[train],
        train_y=y[train],
        test_x=x[test],
        test_y=y[test],
        inducing_points=choose_inducing_points(x[train], min(num_inducing, len(train) // 2), seed=0),
        initial=Initial(lengthscale=math.sqrt(x.shape[-1])),
    )


def all_problems(num_inducing: int) -> list[Problem]:
    """The three data sets."""
    cancer_x, cancer_y = load_breast_cancer(return_X_y=True)
    digits_x, digits = load_digits(return_X_y=True)
    chosen = np.isin(digits, [3, 5])
    return [
        classification_problem("breast cancer", cancer_x, cancer_y, num_inducing),
        classification_problem("digits 3 and 5", digits_x[chosen], digits[chosen] == 5, num_inducing),
        diabetes_problem(num_inducing)[0],
    ]


# ---- training ------------------------------------------------------------------------------------------------------


def run_gpext(
    method: str, problem: Problem, budget: float, max_steps: int | None = None, *, priors: bool = False
) -> Outcome:
    """Train as a user of gpext does, with a callback that evaluates from time to time."""
    x, y = problem.train_x, problem.train_y
    recorder = Recorder(problem, budget=budget)
    recorder.start()
    learner = SiteLearner(problem, seed=0, dtype=torch.float64)
    if priors:
        register_priors(learner.mll)
    recorder.stop()
    recorder.evaluate(learner)
    recorder.start()

    def callback(step: int, value: float) -> bool:
        return not recorder.advance(learner)

    gpext.fit(learner.mll, x, y, max_steps=max_steps, progress=False, callback=callback)
    if recorder.running:  # converged within the budget
        recorder.stop()
        recorder.evaluate(learner)
    return Outcome(method, recorder.trace(), learner, score(problem, learner))


def score(problem: Problem, learner: Learner) -> Tensor:
    """Log density of each test datum."""
    with torch.no_grad():
        mean, variance = learner.latent(problem.test_x)
        density = conditional(problem.likelihood, **learner.likelihood_parameters())
        return log_predictive_density(density, problem.test_y, mean, variance)


def run_peer(
    method: str, problem: Problem, budget: float, max_steps: int | None = None, *, priors: bool = False
) -> Outcome:
    """Train stock gpytorch on the full batch."""
    made: list[Any] = []

    def make_learner() -> Learner:
        entry = METHODS[PEERS[method]]
        assert entry.learner is not None
        made.append(entry.learner(problem, seed=0, dtype=torch.float64, **entry.options))
        if priors:
            register_priors(made[0].objective)
        return made[0]

    size = len(problem.train_y)
    trace = train(
        problem, make_learner, batch_size=size, budget=budget, seed=0, dtype=torch.float64, max_steps=max_steps
    )
    return Outcome(method, trace, made[0], score(problem, made[0]))


def run_all(problems: Sequence[Problem], budget: float, *, priors: bool = False) -> dict[str, list[Outcome]]:
    """Every method on every data set, each warmed up by three steps that do not count."""
    runners: dict[str, Callable[..., Outcome]] = {
        name: run_peer if name in PEERS else run_gpext for name in METHOD_NAMES
    }
    outcomes: dict[str, list[Outcome]] = {problem.dataset: [] for problem in problems}
    with tqdm(total=len(problems) * len(runners), disable=None, leave=False) as bar:
        for problem in problems:
            for name, runner in runners.items():
                bar.set_description(f"{problem.dataset}, {name}")
                runner(name, problem, 60.0, max_steps=3, priors=priors)
                outcomes[problem.dataset].append(runner(name, problem, budget, priors=priors))
                bar.update()
    return outcomes


# ---- table ---------------------------------------------------------------------------------------------------------


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """The table in markdown, aligned."""
    rows = [["data set", "method", "test error", "test log density", "seconds to best - 0.01", "over gpext"]]
    for name, runs in outcomes.items():
        seconds = arrival(runs)
        for run in runs:
            own = seconds["gpext"] if stayed(runs[0], runs) else math.inf
            ratio = seconds[run.method] / own if math.isfinite(own) else math.nan
            arrived = f"{seconds[run.method]:.2f}" + ("" if stayed(run, runs) else " (left)")
            rows.append(
                [
                    name,
                    run.method,
                    f"{run.trace.error[-1]:.3f}" if run.trace.error else "failed",
                    f"{run.trace.log_density[-1]:.3f}" if run.trace.log_density else run.trace.status.value,
                    arrived if math.isfinite(seconds[run.method]) else "not reached",
                    f"{ratio:.2g}" if math.isfinite(ratio) else "",
                ]
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [
        [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))] for r in rows
    ]
    rule = ["-" * w if i < 2 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [aligned[0], rule, *aligned[1:]])


def arrival(runs: Sequence[Outcome]) -> dict[str, float]:
    """Seconds of each method until it is within the tolerance of the best value of any."""
    return {run.method: run.trace.seconds_to(goal(runs)) for run in runs}


def goal(runs: Sequence[Outcome]) -> float:
    """The best log density of any method at any time, less the tolerance."""
    return max(max(run.trace.log_density, default=-math.inf) for run in runs) - TOLERANCE


def stayed(run: Outcome, runs: Sequence[Outcome]) -> bool:
    """Whether the method ended within the tolerance."""
    return bool(run.trace.log_density) and run.trace.log_density[-1] >= goal(runs)


def verdict(outcomes: dict[str, list[Outcome]]) -> list[str]:
    """A sentence a data set: which method was first, and where gpext's defaults ended against the best."""
    lines = []
    for name, runs in outcomes.items():
        seconds = arrival(runs)
        gpext_stayed, peer = stayed(runs[0], runs), min(PEERS, key=lambda method: seconds[method])
        own = seconds["gpext"] if gpext_stayed else math.inf
        if own < seconds[peer]:
            ahead = f", {seconds[peer] / own:.1f} times as fast as {peer}" if math.isfinite(seconds[peer]) else ""
            line = f"{name}: gpext was first{ahead or ', gpytorch not in its time'}"
        elif math.isfinite(seconds[peer]):
            reached = f"needed {own:.2f} s" if math.isfinite(own) else "did not get there"
            if math.isfinite(seconds["gpext"]) and not gpext_stayed:
                reached = f"passed it after {seconds['gpext']:.2f} s but did not stay"
            line = f"{name}: gpext did NOT win; {peer} got there after {seconds[peer]:.2f} s, gpext {reached}"
        else:
            line = f"{name}: neither gpext nor gpytorch got there and stayed"
        ours = next(run for run in runs if run.method == "gpext").test_log_density
        highest = max(runs, key=lambda run: float(run.test_log_density.mean()))
        if highest.method != "gpext":
            line += f"; {highest.method} ended {_with_error(highest.test_log_density - ours)} nats above gpext"
        lines.append(line + ".")
    return lines


def _with_error(differences: Tensor) -> str:
    """Mean and its standard error."""
    return f"{differences.mean():.3f} (standard error {differences.std() / math.sqrt(len(differences)):.3f})"


# ---- figures -------------------------------------------------------------------------------------------------------


def figure_outliers(path: Path, num_inducing: int) -> str:
    """Diabetes against one feature: Gaussian noise is dragged along by the outliers, Student-t noise names them."""
    import matplotlib.pyplot as plt

    problem, corrupted = diabetes_problem(num_inducing, feature=2)
    x, y = problem.train_x, problem.train_y
    grid = torch.linspace(float(x.min()) - 0.3, float(x.max()) + 0.3, 200, dtype=torch.float64)
    robust = SiteLearner(problem, seed=0, dtype=torch.float64)
    gpext.fit(robust.mll, x, y, progress=False)
    flagged = weights(robust, x, y) < FLAG_BELOW

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    center, lower, upper = gaussian_band(x, y, grid)
    plots.observations(x[:, 0], y, ax=axes[0])
    plots.predictive_band(grid, center, lower, upper, ax=axes[0], color=plots.ORANGE)
    axes[0].set_title("Gaussian noise (gpytorch ExactGP)")
    plots.observations(x[:, 0], y, outliers=flagged, ax=axes[1])
    plots.predictive_band(grid, *student_t_band(robust, grid), ax=axes[1])
    axes[1].set_title("Student-t noise (gpext)")
    for ax in axes:
        ring = {"mfc": "none", "color": "black", "markersize": 10, "label": "corrupted on purpose"}
        ax.plot(x[corrupted, 0], y[corrupted], "o", **ring)
        ax.set_xlabel("body mass index (standard deviations from its mean)")
        ax.legend(loc="lower right", fontsize=9)
    axes[0].set_ylabel("disease progression (robust standard deviations)")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return (
        f"one-feature model: {int((flagged & corrupted).sum())} of {int(corrupted.sum())} corrupted targets flagged, "
        f"{int((flagged & ~corrupted).sum())} of {int((~corrupted).sum())} others."
    )


def weights(learner: SiteLearner, x: Tensor, y: Tensor) -> Tensor:
    """E[w_i] over its largest possible value, (N,): how much of a say the model leaves each datum."""
    likelihood = learner.likelihood
    mean, variance = learner.latent(x)
    with torch.no_grad():
        augmentation = likelihood.augmentation(y)
        largest = augmentation.radial.mean(torch.zeros((), dtype=y.dtype)) * augmentation.curvature
        return augmented_sites(augmentation, mean, variance).precision / (2 * largest)


def student_t_band(learner: SiteLearner, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Median and central 95 % of new observations."""
    predictive = learner.likelihood.marginal(latent_distribution(learner, x[:, None]))
    with torch.no_grad():
        lower, center, upper = (predictive.quantile(torch.tensor(p, dtype=x.dtype)) for p in (0.025, 0.5, 0.975))
    return center, lower, upper


def latent_distribution(learner: Learner, x: Tensor) -> MultivariateNormal:
    """The latent marginals as a distribution."""
    mean, variance = learner.latent(x)
    return MultivariateNormal(mean, torch.diag_embed(variance))


class GaussianGP(gpytorch.models.ExactGP):
    """Exact regression with Gaussian noise, for the comparison."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.GaussianLikelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior at ``x``."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def gaussian_band(x: Tensor, y: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and central 95 % of new observations under Gaussian noise."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = GaussianGP(x, y, likelihood).double()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    gpext.fit(mll, x, y, progress=False)
    model.eval()
    likelihood.eval()
    with torch.no_grad():
        predictive = likelihood(model(grid[:, None]))
        half = 1.96 * predictive.variance.sqrt()
        return predictive.mean, predictive.mean - half, predictive.mean + half


def figure_traces(path: Path, outcomes: dict[str, list[Outcome]]) -> None:
    """Test log density against training time, a panel a data set."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(outcomes), figsize=(13, 4.6), layout="constrained")
    for ax, (name, runs) in zip(axes, outcomes.items(), strict=True):
        traces = {run.method: (np.array(run.trace.seconds), np.array(run.trace.log_density)) for run in runs}
        plots.log_density_trace(traces, tolerance=TOLERANCE, ax=ax)
        values = np.concatenate([run.trace.log_density[len(run.trace.log_density) // 3 :] for run in runs])
        best = max(max(run.trace.log_density) for run in runs)
        ax.set_ylim(max(np.min(values), best - 0.6), best + 0.02)
        ax.set_title(name)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def figure_calibration(path: Path, problems: Sequence[Problem], outcomes: dict[str, list[Outcome]]) -> None:
    """Reliability of the classifiers; coverage of the regression's central intervals."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(problems), figsize=(13, 5.0), layout="constrained")
    for ax, problem in zip(axes, problems, strict=True):
        for run in outcomes[problem.dataset]:
            color, marker, line = STYLES[run.method]
            predictive = predictive_distribution(problem, run.learner)
            if problem.likelihood == "logit":
                plots.reliability(
                    problem.test_y, predictive.probs, num_bins=6, ax=ax, label=run.method, color=color, marker=marker
                )
            else:
                plots.coverage(predictive.cdf(problem.test_y), ax=ax, label=run.method, color=color, linestyle=line)
        ax.set_title(problem.dataset if problem.likelihood == "logit" else "diabetes (no outliers in the test data)")
        ax.set_aspect("equal")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def predictive_distribution(problem: Problem, learner: Learner) -> torch.distributions.Distribution:
    """p(y) at the test inputs, integrated accurately for every method alike, at its own parameters."""
    likelihood = LIKELIHOODS[problem.likelihood]().double()
    for name, value in learner.likelihood_parameters().items():
        setattr(likelihood, name, value)
    with torch.no_grad():
        return likelihood.marginal(latent_distribution(learner, problem.test_x))


# ---- command line --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the table, write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder of the figures")
    parser.add_argument("--budget", type=float, default=8.0, help="training seconds of a run")
    parser.add_argument("--num-inducing", type=int, default=100)
    parser.add_argument(
        "--threads", type=int, default=1, help="torch's threads; matrices this small gain nothing from more"
    )
    parser.add_argument("--quick", action="store_true", help="a look in half a minute: not everything converges")
    args = parser.parse_args(arguments)
    if args.quick:
        args.budget, args.num_inducing = 0.3, 20
    torch.set_num_threads(args.threads)
    matplotlib.use("Agg")
    warnings.simplefilter("ignore", gpytorch.utils.warnings.GPInputWarning)
    args.output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()

    problems = all_problems(args.num_inducing)
    for problem in problems:
        print(
            f"{problem.dataset}: {len(problem.train_y)} training and {len(problem.test_y)} test data, "
            f"{problem.train_x.shape[-1]} features, {len(problem.inducing_points)} inducing points"
        )
    print(f"\nTest error: share of wrong classes; of diabetes, RMSE. {args.budget:g} s a run at most.")
    found = {}
    for name, heading, priors in TABLES:
        found[name] = run_all(problems, args.budget, priors=priors)
        text = table(found[name])
        print(f"\n{heading}\n\n{text}\n")
        (args.output / f"{name}.md").write_text(text + "\n", encoding="utf-8")
        for line in verdict(found[name]):
            print(line)
    print("\n" + figure_outliers(args.output / "outliers.png", args.num_inducing))
    figure_traces(args.output / "log_density.png", found["table"])
    figure_traces(args.output / "log_density_priors.png", found["table_priors"])
    figure_calibration(args.output / "calibration.png", problems, found["table"])
    print(f"\nFigures: {', '.join(str(p) for p in sorted(args.output.glob('*.png')))}")
    print(f"{time.perf_counter() - started:.0f} s in all.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
