r"""Preferences: a LatentGP with a pairwise design against BoTorch's PairwiseGP, on the same comparisons.

Items are uniform on [0, 1]^d; their utility is a draw, of standard deviation 2, from a Gaussian process with a squared
exponential kernel of length scale 0.3 sqrt(d) (by 2000 random Fourier features). Comparisons are of random pairs, with
unit normal noise on each utility, three times as many as items; 4000 held-out comparisons are of 400 new items.

Every method has the same prior, a scaled squared exponential kernel with a length scale for every input and the same
priors of its parameters (BoTorch's), the same likelihood (probit), and begins at the same parameters; all maximise the
evidence plus the log priors. The probability of a held-out comparison is Phi(m / sqrt(2 + v)) with the mean and the
variance of the difference under the joint posterior. "Truth" has the true utilities.

    OMP_NUM_THREADS=1 python -m benchmarks.preferences --output preferences.jsonl
    python -m benchmarks.preferences --quick
    OMP_NUM_THREADS=1 python -m benchmarks.preferences --many      # 100,000 comparisons of 5000 items, by minibatches
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.priors import GammaPrior, SmoothedBoxPrior
from linear_operator.operators import DiagLinearOperator
from torch import Tensor
from tqdm import tqdm

import gpext
from benchmarks.ledger import Ledger, Row, command_line, measure_and_report
from benchmarks.tables import table, table_of
from gpext.inference import EP, KL, Laplace, Rule
from gpext.likelihoods import PairwiseLogitLikelihood, PairwiseProbitLikelihood
from gpext.variational import SiteVariationalStrategy

PROBLEMS = ((50, 2), (50, 6), (200, 2), (200, 6), (500, 2), (500, 6))  # items, inputs
RULES: dict[str, Rule] = {"Laplace": Laplace(), "KL": KL(), "EP": EP()}
METHODS = ("truth", "PairwiseGP", *RULES)
SEEDS = 5
_NEW = 400


class Problem:
    """Items, comparisons (winner first), and held-out comparisons of new items."""

    def __init__(self, num_items: int, dim: int, seed: int, num_test: int, num_pairs: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        x = torch.rand(num_items + _NEW, dim, generator=generator, dtype=torch.float64)
        frequencies, phases = (
            draw(dim, 2000) / (0.3 * math.sqrt(dim)),
            2 * math.pi * torch.rand(2000, generator=generator),
        )
        utility = 2 * math.sqrt(2 / 2000) * torch.cos(x @ frequencies + phases) @ draw(2000)
        self.x, self.new_x = x[:num_items], x[num_items:]
        self.new_utility = utility[num_items:]
        self.pairs = _compared(utility[:num_items], num_pairs or 3 * num_items, generator)
        self.new_pairs = _compared(self.new_utility, num_test, generator)


def _compared(utility: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Return pairs (number, 2) of different items, the preferred one first."""
    first = torch.randint(len(utility), (number,), generator=generator)
    second = (first + torch.randint(1, len(utility), (number,), generator=generator)) % len(utility)
    noisy = utility[torch.stack([first, second], -1)]
    noisy = noisy + torch.randn(number, 2, generator=generator, dtype=torch.float64)
    is_first = noisy[:, 0] > noisy[:, 1]
    return torch.where(is_first.unsqueeze(-1), torch.stack([first, second], -1), torch.stack([second, first], -1))


def kernel(dim: int) -> gpytorch.kernels.ScaleKernel:
    """Return the kernel of every method, at its initial parameters."""
    base = gpytorch.kernels.RBFKernel(ard_num_dims=dim, lengthscale_prior=GammaPrior(2.4, 2.7))
    found = gpytorch.kernels.ScaleKernel(base, outputscale_prior=SmoothedBoxPrior(0.01, 100.0)).double()
    base.lengthscale, found.outputscale = 1.4 / 2.7, 1.0
    return found


class PreferenceGP(gpext.models.LatentGP):
    """Utilities with zero mean."""

    def __init__(self, x: Tensor, pairs: Tensor, rule: Rule) -> None:
        likelihood = PairwiseProbitLikelihood()
        won = torch.ones(len(pairs), dtype=x.dtype)
        super().__init__(x, won, likelihood, rule, design=gpext.designs.pairs(pairs, len(x)))
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernel(x.size(-1))

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def by_gpext(rule: Rule, problem: Problem) -> tuple[MultivariateNormal, str]:
    """Return the distribution of the new utilities, and how training ended."""
    model = PreferenceGP(problem.x, problem.pairs, rule)
    mll = gpext.mlls.LatentMarginalLogLikelihood(model.likelihood, model)
    found = gpext.fit(mll, problem.x, model.train_targets, progress=False)
    return model.eval()(problem.new_x), found.status.name


def by_botorch(problem: Problem) -> tuple[MultivariateNormal, str]:
    """Return the distribution of the new utilities by BoTorch's PairwiseGP, trained by its own functions."""
    from botorch.fit import fit_gpytorch_mll
    from botorch.models.pairwise_gp import PairwiseGP, PairwiseLaplaceMarginalLogLikelihood

    model = PairwiseGP(problem.x, problem.pairs, covar_module=kernel(problem.x.size(-1)), consolidate_atol=0.0)
    fit_gpytorch_mll(PairwiseLaplaceMarginalLogLikelihood(model.likelihood, model))
    return model.posterior(problem.new_x).mvn, "CONVERGED"


def measure(num_items: int, dim: int, seed: int, num_test: int) -> dict[str, Row]:
    """Return the scores of every method on one problem, in one run."""
    problem = Problem(num_items, dim, seed, num_test)
    known = MultivariateNormal(problem.new_utility, DiagLinearOperator(torch.zeros_like(problem.new_utility)))
    found: dict[str, Row] = {"truth": _scores(problem, known)}
    for method in METHODS[1:]:
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                f, status = by_botorch(problem) if method == "PairwiseGP" else by_gpext(RULES[method], problem)
            except Exception as error:
                found[method] = {"status": type(error).__name__}
                continue
        seconds = time.perf_counter() - started
        with torch.no_grad():
            found[method] = {**_scores(problem, f), "seconds": seconds, "status": status}
    return found


def _scores(problem: Problem, f: MultivariateNormal) -> Row:
    p = PairwiseProbitLikelihood().win_probability(f, problem.new_pairs).double()
    return {"log_predictive": float(p.log().mean()), "accuracy": float((p > 0.5).double().mean())}


class ManyPreferencesGP(gpytorch.models.ApproximateGP):
    """The same prior with inducing points."""

    def __init__(self, inducing_points: Tensor) -> None:
        super().__init__(SiteVariationalStrategy(self, inducing_points))
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernel(inducing_points.size(-1)).float()

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def measure_many(num_items: int = 5000, num_pairs: int = 100_000, max_steps: int | None = 300) -> Row:
    """Return the scores and the time of the logit link in float32, 200 inducing points, minibatches of 1000."""
    problem = Problem(num_items, 4, 0, 4000, num_pairs)
    x, likelihood = problem.x.float(), PairwiseLogitLikelihood()
    model = ManyPreferencesGP(x[:200].clone())
    design, won = gpext.designs.pairs(problem.pairs, num_items), torch.ones(num_pairs)
    started = time.process_time()
    mll = gpext.mlls.AugmentedELBO(likelihood, model, num_pairs)
    found = gpext.fit(mll, x, won, design=design, batch_size=1000, max_steps=max_steps, progress=False)
    seconds = time.process_time() - started
    with torch.no_grad():
        p = likelihood.win_probability(model(problem.new_x.float()), problem.new_pairs)
    known = MultivariateNormal(problem.new_utility, DiagLinearOperator(torch.zeros_like(problem.new_utility)))
    return {
        "steps": found.num_steps,
        "process seconds": seconds,
        "log predictive": float(p.log().mean()),
        "accuracy": float((p > 0.5).double().mean()),
        "log predictive of the truth": _scores(problem, known)["log_predictive"],
    }


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure every problem."""
    problems, seeds, num_test = (((20, 2),), 1, 200) if options.quick else (PROBLEMS, SEEDS, 4000)
    keys = [(n, d, seed) for n, d in problems for seed in range(seeds)]
    for n, d, seed in tqdm(keys, desc="preferences", disable=None):
        ledger.get(f"{n}/{d}/{seed}", partial(measure, n, d, seed, num_test))


def report(ledger: Ledger) -> str:
    """Return means over seeds, and the difference of log predictive from PairwiseGP's with its standard error."""
    cells = []
    for n, d in sorted({tuple(int(part) for part in key.split("/")[:2]) for key in ledger.rows}):
        rows = ledger.of(f"{n}/{d}/")
        for method in METHODS:
            found = [row[method] for row in rows if "log_predictive" in row[method]]
            if not found:
                cells.append([f"{n}", f"{d}", method, *["failed"] * 4])
                continue
            value, accuracy = (np.mean([row[name] for row in found]) for name in ("log_predictive", "accuracy"))
            both = [row for row in rows if all("log_predictive" in row[m] for m in (method, "PairwiseGP"))]
            gains = [row[method]["log_predictive"] - row["PairwiseGP"]["log_predictive"] for row in both]
            error = f" +- {np.std(gains, ddof=1) / math.sqrt(len(gains)):.4f}" if len(gains) > 1 else ""
            gain = f"{np.mean(gains):+.4f}{error}" if gains and method != "PairwiseGP" else ""
            seconds = f"{np.median([row['seconds'] for row in found]):.1f}" if method != "truth" else ""
            failed = len(rows) - len(found)
            name = f"{method} ({failed} of {len(rows)} failed)" if failed else method
            cells.append([f"{n}", f"{d}", name, f"{value:.4f}", gain, f"{accuracy:.3f}", seconds])
    head = ["items", "inputs", "method", "log predictive", "less PairwiseGP's", "accuracy", "seconds"]
    return table(head, cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = command_line(__doc__, quick="one small problem")
    parser.add_argument("--many", action="store_true", help="100,000 comparisons, by minibatches")
    options = parser.parse_args(arguments)
    if options.many:
        torch.set_num_threads(options.threads)
        print(table_of([measure_many()]))
    else:
        measure_and_report(options, run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
