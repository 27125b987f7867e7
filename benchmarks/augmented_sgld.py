r"""Do Langevin steps given augmenting scales draw the hyperposterior of a non-Gaussian GP?

"student_t" is a sine at 300 points with Gaussian noise of sd 0.2, a twentieth of them outliers with additional noise of
sd 1; the model is a GP with k = s exp(-(x - x')^2 / (2 l^2)) and Student-t noise of squared scale `noise` and nu
degrees of freedom. Priors: LogNormal(0, 1) for s and l, LogNormal(-2, 1) for the noise, LogNormal(1.5, 0.5) above 2 for
nu. The reference is implemented here, without gpext and in the textbook form of the scale mixture: y_i = f_i +
N(0, noise / lambda_i), lambda_i ~ Gamma(nu / 2, nu / 2), with f integrated out in every move of (s, l, noise):

    lambda | f, y                   exact
    log (s, l, noise) | lambda, y   random-walk Metropolis on N(y | 0, K + noise / lambda), dense
    log nu | lambda                 random-walk Metropolis
    f | lambda, y                   exact, dense (except for 1e-9 s on the diagonal of its covariance)

"ionosphere" has 300 rows of a real classification problem, a logit likelihood, and s and l as above, with the median
distance as the unit of l. There the reference is gpext's own GibbsSampler, which moves hyperparameters by slices.

    python -m benchmarks.augmented_sgld --output results/augmented_sgld.jsonl

An interrupted or killed run resumes: finished rows are not run again, and gpext's chains continue from their draws,
which are stored beside the output.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import arviz
import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.priors import LogNormalPrior
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.spatial.distance import pdist, squareform
from torch import Tensor

from benchmarks.datasets import load
from benchmarks.ledger import Ledger, Row, measure_and_report
from benchmarks.tables import AGAINST, against, table
from gpext.likelihoods import AugmentedLikelihood, BernoulliLogitLikelihood, StudentTLikelihood
from gpext.models import LatentGP
from gpext.operators import UnbiasedSolver
from gpext.samplers import AugmentedSGLDSampler, GibbsDraws, GibbsSampler, SamplingStatus

PROBLEMS = ("student_t", "ionosphere")
METHODS = ("Metropolis", "SGLD, exact gradients", "Gibbs, slices", "SGLD, unbiased gradients")
NAMES = {
    "covar_module.outputscale": "s",
    "covar_module.base_kernel.lengthscale": "l",
    "likelihood.noise": "noise",
    "likelihood.deg_free": "nu",
}
PRIORS = {"s": (0.0, 1.0), "l": (0.0, 1.0), "noise": (-2.0, 1.0), "nu": (1.5, 0.5)}  # of the logarithms
PROBES = 4
LOWEST_NU = 2.0  # gpytorch's constraint
MOVES = 4  # of (s, l, noise) in a sweep of the reference
JITTER = 1e-9  # times s, added to the variances of f given the rest


class Model(LatentGP):
    """A GP with a squared exponential kernel."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: AugmentedLikelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.covar_module.register_prior("outputscale_prior", LogNormalPrior(*PRIORS["s"]), "outputscale")
        self.covar_module.base_kernel.register_prior("lengthscale_prior", LogNormalPrior(*PRIORS["l"]), "lengthscale")
        if isinstance(likelihood, StudentTLikelihood):
            likelihood.register_prior("noise_prior", LogNormalPrior(*PRIORS["noise"]), "noise")
            likelihood.register_prior("deg_free_prior", LogNormalPrior(*PRIORS["nu"]), "deg_free")
        self.to(x)
        if isinstance(likelihood, StudentTLikelihood):
            likelihood.initialize(noise=0.1, deg_free=4.0)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def outliers(size: int) -> tuple[Tensor, Tensor]:
    """Return inputs (n, 1) and targets (n,) of the generated problem."""
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0, 10, size))
    y = np.sin(x) + 0.2 * rng.standard_normal(size)
    y = y + np.where(rng.random(size) < 0.05, 1.0, 0.0) * rng.standard_normal(size)
    return torch.from_numpy(x[:, None]), torch.from_numpy(y)


def model_of(problem: str, size: int) -> Model:
    """Return a model with its data."""
    if problem == "student_t":
        return Model(*outliers(size), StudentTLikelihood())
    data = load(problem, max_train=size, test_fraction=0.0)
    unit = float(torch.pdist(data.train_x).median())
    return Model(data.train_x / unit, data.train_y, BernoulliLogitLikelihood())


# The reference


class ScaleMixture:
    """A chain on the scale mixture of a Student-t, by Metropolis and Gibbs moves.

    Args:
        x: (n, d).
        y: (n,).
        rng: for the random numbers.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> None:
        self.squares, self.y, self.rng = squareform(pdist(x, "sqeuclidean")), y, rng
        self.logs = np.array([PRIORS[name][0] for name in ("s", "l", "noise", "nu")]) + 0.3 * rng.standard_normal(4)
        self.logs[3] = max(self.logs[3], np.log(LOWEST_NU) + 0.1)
        self.f = np.zeros(len(y))
        self.covariance, self.mean, self.size, self.step = 0.05 * np.eye(3), self.logs[:3].copy(), 1.0, 0.3
        self.steps = 0

    def kernel(self, logs: np.ndarray) -> np.ndarray:
        """Return K (n, n)."""
        return np.exp(logs[0] - 0.5 * self.squares * np.exp(-2 * logs[1]))

    def log_density(self, logs: np.ndarray, scales: np.ndarray) -> float:
        """Return log N(y | 0, K + noise / lambda) + log p(log s, log l, log noise)."""
        try:
            factor = cho_factor(self.kernel(logs) + np.diag(np.exp(logs[2]) / scales), lower=True)
        except np.linalg.LinAlgError:
            return -np.inf
        value = -0.5 * self.y @ cho_solve(factor, self.y) - np.log(np.diagonal(factor[0])).sum()
        return value + log_normal_prior(logs[:3], ("s", "l", "noise"))

    def log_density_of_nu(self, log_nu: float, scales: np.ndarray) -> float:
        """Return log p(lambda | nu) + log p(log nu)."""
        half = 0.5 * np.exp(log_nu)
        if 2 * half <= LOWEST_NU:
            return -np.inf
        each = half * np.log(half) - log_gamma(half) + (half - 1) * np.log(scales) - half * scales
        return each.sum() + log_normal_prior(np.array([log_nu]), ("nu",))

    def sweep(self, *, adapt: bool) -> np.ndarray:
        """Return the logarithms (4,) after one sweep."""
        rng, nu = self.rng, np.exp(self.logs[3])
        residual = np.square(self.y - self.f) / np.exp(self.logs[2])
        scales = rng.gamma(0.5 * (nu + 1), 2 / (nu + residual))

        here = self.log_density(self.logs, scales)
        root = np.linalg.cholesky(self.covariance + 1e-10 * np.eye(3))
        for _ in range(MOVES):
            proposal = self.logs.copy()
            proposal[:3] += self.size * 2.38 / np.sqrt(3) * root @ rng.standard_normal(3)
            there = self.log_density(proposal, scales)
            chance = np.exp(min(there - here, 0.0))
            if rng.random() < chance:
                self.logs, here = proposal, there
            if adapt:
                self.adapt(chance)

        for _ in range(3):
            proposed = self.logs[3] + self.step * rng.standard_normal()
            gain = self.log_density_of_nu(proposed, scales) - self.log_density_of_nu(self.logs[3], scales)
            chance = np.exp(min(gain, 0.0))
            if rng.random() < chance:
                self.logs[3] = proposed
            if adapt:
                self.step *= np.exp(0.05 * (chance - 0.44))

        K, noise = self.kernel(self.logs), np.exp(self.logs[2]) / scales
        L = np.linalg.cholesky(K + np.diag(noise))
        reduced = solve_triangular(L, K, lower=True)
        mean = reduced.T @ solve_triangular(L, self.y, lower=True)
        V = K - reduced.T @ reduced
        root = np.linalg.cholesky(V + JITTER * np.exp(self.logs[0]) * np.eye(len(mean)))
        self.f = mean + root @ rng.standard_normal(len(mean))
        return self.logs.copy()

    def adapt(self, chance: float) -> None:
        """Adapt the proposal of the random walk to the chain."""
        self.steps += 1
        rate = 1 / (self.steps + 100)
        gap = self.logs[:3] - self.mean
        self.mean = self.mean + rate * gap
        self.covariance = self.covariance + rate * (np.outer(gap, gap) - self.covariance)
        self.size *= np.exp((self.steps + 100) ** -0.6 * (chance - 0.3))


def log_gamma(value: float) -> float:
    """Return log Gamma."""
    return float(torch.lgamma(torch.tensor(value, dtype=torch.float64)))


def log_normal_prior(logs: np.ndarray, names: Sequence[str]) -> float:
    """Return the log density of logarithms, up to a constant."""
    mean, sd = np.array([PRIORS[name] for name in names]).T
    return float(-0.5 * np.square((logs - mean) / sd).sum())


def metropolis(model: Model, *, draws: int, chains: int, warmup: int) -> tuple[dict[str, np.ndarray], float]:
    """Return draws (C, S) of the logarithms by name, and the seconds a sweep."""
    x, y = model.train_inputs[0].numpy(), model.train_targets.numpy()
    found = np.empty((chains, draws, 4))
    begun = time.perf_counter()
    for chain in range(chains):
        mixture = ScaleMixture(x, y, np.random.default_rng(chain))
        for step in range(-warmup, draws):
            logs = mixture.sweep(adapt=step < 0)
            if step >= 0:
                found[chain, step] = logs
    seconds = (time.perf_counter() - begun) / (chains * (draws + warmup))
    return {name: found[..., j] for j, name in enumerate(("s", "l", "noise", "nu"))}, seconds


# gpext


def sampler_of(method: str, model: Model, step_size: float | None) -> GibbsSampler | AugmentedSGLDSampler:
    """Return the sampler of this name."""
    if method == METHODS[2]:
        return GibbsSampler(model)
    solver = None if method == METHODS[1] else UnbiasedSolver(num_probes=PROBES)
    return AugmentedSGLDSampler(model, solver=solver, step_size=step_size)


def sample(
    sampler: GibbsSampler | AugmentedSGLDSampler, folder: Path | None, *, draws: int, chains: int, warmup: int
) -> GibbsDraws:
    """Return draws, continuing from those in a folder if there are any."""
    generator = torch.Generator().manual_seed(0)
    found = sampler.load(folder) if folder is not None and list(folder.glob("*.pt")) else None
    while found is None or found.num_draws < draws:  # in parts, so that a killed run loses at most one
        part = min(max(draws // 10, 1), draws - (0 if found is None else found.num_draws))
        found = sampler.run(part, chains, warmup, generator=generator, resume=found, checkpoint=folder)
        if found.status is SamplingStatus.INTERRUPTED:
            raise KeyboardInterrupt
        print(found.message, file=sys.stderr, flush=True)
    return found


def seconds_a_sweep(sampler: GibbsSampler | AugmentedSGLDSampler, number: int) -> float:
    """Return the time of one sweep of one chain, timed separately because a run may have been interrupted."""
    found = sampler.run(1, 1, 10, progress=False)  # the warm-up finds a step size
    return sampler.run(number, resume=found, progress=False).seconds / number


def describe(logs: dict[str, np.ndarray], seconds: float) -> Row:
    """Return the table's statistics of draws: moments of the logarithms, their errors, ESS, R-hat."""
    data = arviz.convert_to_dataset(logs)
    ess = [float(v) for v in arviz.ess(data).data_vars.values()]
    chains, draws = next(iter(logs.values())).shape
    return {
        "chains": chains,
        "draws": draws,
        "ms": 1e3 * seconds,
        "names": list(logs),
        "mean": [float(each.mean()) for each in logs.values()],
        "sd": [float(each.std()) for each in logs.values()],
        "mcse": [float(v) for v in arviz.mcse(data).data_vars.values()],
        "mcse_sd": [float(v) for v in arviz.mcse(data, method="sd").data_vars.values()],
        "ess": ess,
        "ess_a_minute": min(ess) / (seconds * chains * draws / 60),
        "rhat": max(float(v) for v in arviz.rhat(data).data_vars.values()),
    }


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Sample by every method."""
    for problem in options.problems:
        for method in options.methods:
            if method == METHODS[0] and problem != "student_t":
                continue
            is_reference = method == METHODS[0]
            draws = options.reference_draws if is_reference else options.draws
            warmup = options.reference_warmup if is_reference else options.warmup
            key = f"{problem}/{options.rows}/{method}/{options.chains}x{draws}+{warmup}"

            def make(
                problem: str = problem, method: str = method, draws: int = draws, warmup: int = warmup, key: str = key
            ) -> Row:
                model = model_of(problem, options.rows)
                counts = {"draws": draws, "chains": options.chains, "warmup": warmup}
                if method == METHODS[0]:
                    logs, seconds = metropolis(model, **counts)
                else:
                    sampler = sampler_of(method, model, options.step_size)
                    folder = None if options.output is None else options.output.with_suffix("") / key.replace("/", "-")
                    found = sample(sampler, folder, **counts).hyperparameters
                    by_name = {NAMES[name]: value.view(value.shape[:2]) for name, value in found.items()}
                    logs = {name: by_name[name].log().numpy() for name in PRIORS if name in by_name}
                    seconds = seconds_a_sweep(sampler, options.timed)
                return {"problem": problem, "rows": options.rows, "method": method, **describe(logs, seconds)}

            ledger.get(key, make)


def report(ledger: Ledger) -> str:
    """Return both tables: comparisons with the first row of the problem, and the costs of a sweep."""
    rows = list(ledger.rows.values())
    compared, costs = [], []
    for row in rows:
        first = next(r for r in rows if (r["problem"], r["rows"]) == (row["problem"], row["rows"]))
        named = [row["problem"], row["method"]]
        for j, name in enumerate(row["names"]):
            compared.append([*named, f"log {name}", *against(row, None if row is first else first, j)])
        costs.append(
            [
                *named,
                f"{row['chains']} x {row['draws']}",
                f"{row['ms']:.1f}",
                f"{min(row['ess']):.0f}",
                f"{row['ess_a_minute']:.1f}",
                f"{row['rhat']:.4f}",
            ]
        )
    head = ["chains x draws", "ms a sweep", "least ESS", "ESS a minute", "rank R-hat"]
    return "\n\n".join(
        [
            table(["problem", "method", "parameter", *AGAINST], compared),
            table(["problem", "method", *head], costs),
        ]
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="20 rows and few draws, some seconds")
    parser.add_argument("--rows", type=int, default=300, help="of the data")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS[:3]))
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--draws", type=int, default=800, help="of each chain of gpext's samplers")
    parser.add_argument("--reference-draws", type=int, default=4000, help="of each chain of the reference")
    parser.add_argument("--reference-warmup", type=int, default=1000)
    parser.add_argument("--warmup", type=int, default=150)
    parser.add_argument("--step-size", type=float, help="of Langevin steps; found by the sampler if not given")
    parser.add_argument("--timed", type=int, default=50, help="sweeps that are timed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--report-only", action="store_true", help="print the tables of --output and stop")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rows, options.chains, options.draws, options.warmup, options.timed = 20, 2, 6, 10, 2
        options.reference_draws, options.reference_warmup = 20, 5
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and print the tables."""
    measure_and_report(parse(arguments), run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
