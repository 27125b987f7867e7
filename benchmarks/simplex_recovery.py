r"""Recover probabilities from quantised ones with a Dirichlet GP [Cha13 Sec. 4.3, Fig. 2].

Data: x is drawn from three Gaussians of the plane, N(c_k, I) with equal weights, c_k on a circle of some radius about
the origin, one at the top; p(x) are the posterior probabilities of the three. Targets are p quantised: an entry counts
as present where it is at least 0.2, and the entries that are present share equally ("binary"); or ("kept") entries
below 0.2 are set to zero and the row is divided by its sum. The paper's description allows both; the first agrees with
its statement that labels "only indicate the presence/absence of the concept", "similar to the synthetic experiment".
The paper does not say how zeros were smoothed; here they are by `smoothed`. 100 training points; errors (mean absolute,
over points and classes) at 300 fresh draws, and on the map [-4, 4]^2 of 20 x 20 points, as in the paper's figure.

Methods, all with isotropic squared exponential kernels whose parameters maximise the marginal likelihood:

* Dirichlet GP by Laplace and by Taylor: zero means, a kernel for each latent, predictive means;
* one-vs-all GPC of the presence of each class, divided by the sum: scikit-learn's (Laplace, logistic, 3 restarts),
  and EP (`gpext.inference.EP`, probit), the better approximation;
* constrained GP: scikit-learn's regression on the targets less their mean, one kernel for all classes, so that
  predictions sum to one [Salzmann & Urtasun 2010], truncated to [0, 1]; with a noise variance (3 restarts), and
  without, interpolating the quantised targets.

    python -m benchmarks.multivariate_efd simplex --output results/multivariate_efd.jsonl
    python -m benchmarks.simplex_recovery docs/evidence/multivariate_efd_simplex.png    # the figure
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from torch import Tensor
from tqdm import tqdm

from benchmarks.ledger import Ledger, Row
from benchmarks.simplex_models import RULES, DirichletGP, present_by_ep, smoothed, train

THRESHOLD = 0.2
DESIGNS = {  # radius of the circle of centres, targets, training points
    "radius 1.5": (1.5, "binary", 100),
    "radius 1": (1.0, "binary", 100),
    "radius 2": (2.0, "binary", 100),
    "radius 1.5, kept": (1.5, "kept", 100),
}
REPETITIONS = 10
FIRST_SEED = 1000  # the designs were explored with other seeds
METHODS = (
    *RULES,
    "one-vs-all GPC",
    "constrained GP",
    "one-vs-all GPC, EP",
    "constrained GP, no noise",
    "the targets",
)
DRAWN = METHODS[:4]  # in the figure


class Problem(NamedTuple):
    """Training points and targets; probabilities at fresh draws and on the map."""

    x: Tensor  # (N, 2)
    shares: Tensor  # quantised (N, 3)
    draws: tuple[Tensor, Tensor]  # points (M, 2), probabilities (M, 3)
    map: tuple[Tensor, Tensor]


def centres(radius: float) -> Tensor:
    """Return the means of the three Gaussians (3, 2)."""
    angle = math.pi / 2 + 2 * math.pi * torch.arange(3, dtype=torch.float64) / 3
    return radius * torch.stack([angle.cos(), angle.sin()], -1)


def probabilities(x: Tensor, radius: float) -> Tensor:
    """Return p(k | x) (N, 3)."""
    return torch.softmax(-0.5 * (x.unsqueeze(-2) - centres(radius)).square().sum(-1), -1)


def quantised(probs: Tensor, targets: str) -> Tensor:
    """Return probabilities thresholded and divided by their sum."""
    kept = (probs >= THRESHOLD).to(probs) * (1 if targets == "binary" else probs)
    return kept / kept.sum(-1, keepdim=True)


def problem(design: str, seed: int, quick: bool) -> Problem:
    """Draw the data of a design."""
    radius, targets, num_train = DESIGNS[design]
    num_train, num_test, side = (20, 10, 4) if quick else (num_train, 300, 20)
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(3, (num_train + num_test,), generator=generator)
    noise = torch.randn(num_train + num_test, 2, generator=generator, dtype=torch.float64)
    x, test_x = (centres(radius)[which] + noise).split([num_train, num_test])
    line = torch.linspace(-4, 4, side, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    return Problem(
        x,
        quantised(probabilities(x, radius), targets),
        (test_x, probabilities(test_x, radius)),
        (grid, probabilities(grid, radius)),
    )


def dirichlet(rule: str, max_steps: int | None, x: Tensor, shares: Tensor, new: Tensor) -> Tensor:
    """Return the predictive means at new points."""
    model = DirichletGP(x, smoothed(shares), RULES[rule], shared=False, ard=False, constant=False)
    train(model, max_steps)
    with torch.no_grad():
        return model.likelihood(model(new)).mean


def one_against_all(restarts: int, x: Tensor, shares: Tensor, new: Tensor) -> Tensor:
    """Return the classes' probabilities of being present, divided by their sum."""
    columns = []
    for present in (shares > 0).numpy().T:
        kernel = ConstantKernel(1.0, (1e-3, 1e6)) * RBF(1.0, (1e-2, 1e2))
        classifier = GaussianProcessClassifier(kernel, n_restarts_optimizer=restarts, random_state=0)
        columns.append(classifier.fit(x.numpy(), present).predict_proba(new.numpy())[:, 1])
    probs = torch.from_numpy(np.stack(columns, -1))
    return probs / probs.sum(-1, keepdim=True)


def one_against_all_by_ep(max_steps: int | None, x: Tensor, shares: Tensor, new: Tensor) -> Tensor:
    """Return the same probabilities by EP."""
    probs = present_by_ep(x, shares > 0, new, max_steps)
    return probs / probs.sum(-1, keepdim=True)


def constrained(restarts: int, noise: bool, x: Tensor, shares: Tensor, new: Tensor) -> Tensor:
    """Return the predictions of regression on the shares, truncated."""
    kernel = ConstantKernel(1.0, (1e-3, 1e6)) * RBF(1.0, (1e-2, 1e2))
    kernel = kernel + WhiteKernel(0.1, (1e-8, 1e2)) if noise else kernel
    regressor = GaussianProcessRegressor(kernel, alpha=1e-8, n_restarts_optimizer=restarts, random_state=0)
    mean = shares.mean(0)
    regressor.fit(x.numpy(), (shares - mean).numpy())
    return (torch.from_numpy(regressor.predict(new.numpy())) + mean).clamp(0, 1)


def predictors(quick: bool) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return the methods, as functions of training points, shares and new points."""
    steps, restarts = (2, 0) if quick else (None, 3)
    return {
        **{rule: partial(dirichlet, rule, steps) for rule in RULES},
        "one-vs-all GPC": partial(one_against_all, restarts),
        "one-vs-all GPC, EP": partial(one_against_all_by_ep, steps),
        "constrained GP": partial(constrained, restarts, True),
        "constrained GP, no noise": partial(constrained, restarts, False),
    }


def predict(method: str, given: Problem, new: Tensor, quick: bool) -> Tensor:
    """Return predicted probabilities (M, 3)."""
    with warnings.catch_warnings():  # scikit-learn's, about its bounds and long steps of its line search
        for category in (ConvergenceWarning, RuntimeWarning):
            warnings.simplefilter("ignore", category)
        return predictors(quick)[method](given.x, given.shares, new)


def measure(design: str, method: str, seed: int, quick: bool) -> Row:
    """Return the errors of a method."""
    given = problem(design, seed, quick)
    started = time.perf_counter()
    if method == "the targets":
        found = [quantised(probs, DESIGNS[design][1]) for _, probs in (given.draws, given.map)]
    else:
        points = torch.cat([given.draws[0], given.map[0]])
        found = list(predict(method, given, points, quick).split([len(given.draws[0]), len(given.map[0])]))
    row: Row = {"design": design, "method": method, "seconds": time.perf_counter() - started}
    for name, predicted, (_, probs) in zip(("draws", "map"), found, (given.draws, given.map), strict=True):
        row[name] = float((predicted - probs).abs().mean())
    return row


def run_simplex(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure every method on every design."""
    quick = options.quick
    prefix = "simplex/quick" if quick else "simplex"
    designs = list(DESIGNS)[:1] if quick else list(DESIGNS)
    seeds = [FIRST_SEED + i for i in range(1 if quick else REPETITIONS)]
    keys = [(design, seed, method) for design in designs for seed in seeds for method in METHODS]
    for design, seed, method in tqdm(keys, desc="simplex", disable=None):
        ledger.get(f"{prefix}/{design}/{seed}/{method}", partial(measure, design, method, seed, quick))


def report_simplex(ledger: Ledger) -> str:
    """Return the errors, averaged over the repetitions, with standard errors."""
    lines = ["| design | method | MAE at fresh draws | MAE on the map | seconds |", "| --- | --- | --- | --- | --- |"]
    rows = ledger.of("simplex/")
    for design in DESIGNS:
        for method in METHODS:
            found = [row for row in rows if (row["design"], row["method"]) == (design, method)]
            if found:
                cells = " | ".join(with_error([row[name] for row in found]) for name in ("draws", "map"))
                seconds = sum(row["seconds"] for row in found) / len(found)
                lines.append(f"| {design} | {method} | {cells} | {seconds:.1f} |")
    return "\n".join(lines)


def with_error(values: list[float], digits: int = 3) -> str:
    """Return a mean and its standard error."""
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {np.std(values, ddof=1) / len(values) ** 0.5:.{digits}f}"


def draw_simplex(path: Path, quick: bool = False) -> None:
    """Draw the training set and the maps, probabilities as colours, of the first design and seed [Cha13 Fig. 2]."""
    from matplotlib.figure import Figure

    design = next(iter(DESIGNS))
    given = problem(design, FIRST_SEED, quick)
    side = round(len(given.map[0]) ** 0.5)
    maps = {"truth": given.map[1]}
    for method in DRAWN:
        maps[method] = predict(method, given, given.map[0], quick)
    canvas = Figure(figsize=(9, 6.3), layout="constrained")
    axes = canvas.subplots(2, 3).flat
    axes[0].scatter(*given.x.T, c=given.shares.numpy(), s=14, edgecolors="0.4", linewidths=0.3)
    axes[0].set(title="training set, quantised", xlim=(-4, 4), ylim=(-4, 4), aspect="equal")
    for ax, (name, probs) in zip(axes[1:], maps.items(), strict=True):
        image = probs.view(side, side, 3).transpose(0, 1).numpy()
        ax.imshow(image.clip(0, 1), origin="lower", extent=(-4, 4, -4, 4), interpolation="bilinear")
        error = float((probs - given.map[1]).abs().mean())
        ax.set(title=name if name == "truth" else f"{name}: {error:.3f}")
    canvas.savefig(path, dpi=110)


if __name__ == "__main__":
    draw_simplex(Path(sys.argv[1]))
