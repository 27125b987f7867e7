r"""How well do samplers of the exact posterior mix, and what does a draw cost [GWO20 Tab. 2]?

table    Boston housing with Student-t, Laplace and Matern-3/2 noise, heart disease with the logistic likelihood: the
         Gibbs sampler, Pyro's NUTS and HMC on the whitened latent, and a random walk. Kernel and noise are trained by
         CAVI and then fixed for all samplers.
relaxed  the effect of over-relaxation on the effective sample sizes of f, of its square, and of its tails.
nuts     every marginal mean and standard deviation of the Gibbs sampler against NUTS, N = 100, every likelihood.
noise    the noise scale of a Student-t model: w integrated out (gpext) against the scale mixture of JVV11, plain and
         with its parameter expansion.

    python -m benchmarks.gibbs_mixing --output results/gibbs_mixing.jsonl

Finished rows are not run again. Bulk effective sample sizes and R-hat are ArviZ's (rank-normalised).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import arviz
import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.priors import LogNormalPrior
from torch import Tensor
from tqdm import tqdm

import gpext
from benchmarks.datasets import load
from benchmarks.gibbs_baselines import KERNELS, Sampled, noise_by_scale_mixture, sample_by_pyro
from benchmarks.ledger import Ledger, Row
from gpext import likelihoods
from gpext.inference import CAVI
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.posteriors import DensePrior
from gpext.samplers import GibbsSampler

PARTS = ("table", "relaxed", "nuts", "noise")
PROBLEMS: dict[str, tuple[str, Callable[[], gpytorch.likelihoods.Likelihood]]] = {
    "Boston, Student-t": ("boston", likelihoods.StudentTLikelihood),
    "Boston, Laplace": ("boston", likelihoods.LaplaceLikelihood),
    "Boston, Matern-3/2": ("boston", likelihoods.Matern32Likelihood),
    "heart, logistic": ("heart", likelihoods.BernoulliLogitLikelihood),
}
METHODS = ["Gibbs", *KERNELS]
ALL = {
    "Student-t": likelihoods.StudentTLikelihood,
    "Laplace": likelihoods.LaplaceLikelihood,
    "Matern-3/2": likelihoods.Matern32Likelihood,
    "logistic": likelihoods.BernoulliLogitLikelihood,
    "SVM": likelihoods.BayesianSVMLikelihood,
    "negative binomial": likelihoods.NegativeBinomialLogitLikelihood,
    "from phi alone": lambda: likelihoods.SuperGaussianLikelihood(lambda r: torch.exp(1 - torch.sqrt(1 + 4 * r))),
}


class Model(gpext.models.LatentGP):
    """A squared exponential kernel with a length scale for every input, and a constant mean."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.Likelihood) -> None:
        super().__init__(x, y, likelihood, CAVI())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=x.size(-1)))
        self.to(x)
        self.covar_module.base_kernel.lengthscale = 3.0

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def trained(dataset: str, make: Callable[[], gpytorch.likelihoods.Likelihood], quick: bool) -> Model:
    """Return a model trained on all rows of a data set; if quick, one with few rows and without training."""
    data = load(dataset, test_fraction=0.0)
    rows = 12 if quick else None
    x, y = data.train_x[:rows], data.train_y[:rows]
    model = Model(x, y, make().to(x))
    if not quick:
        gpext.fit(LatentMarginalLogLikelihood(model.likelihood, model), x, y, progress=False, max_steps=100)
    return model


def prior_of(model: Model) -> MultivariateNormal:
    """Return the trained prior at the data, with enough jitter for the Cholesky factor that whitening needs."""
    model.train()
    with torch.no_grad():
        prior = model(model.train_inputs[0])
        jitter = 1e-8 * torch.eye(prior.event_shape[0], dtype=prior.mean.dtype)
        return MultivariateNormal(prior.mean.detach(), prior.covariance_matrix.detach() + jitter)


def sample_by_gibbs(sampler: GibbsSampler, *, num_samples: int, num_chains: int, warmup: int, seed: int) -> Sampled:
    """Run gpext's sampler; the time excludes the warm-up."""
    generator = torch.Generator().manual_seed(seed)
    warm = sampler.run(1, num_chains, warmup, generator=generator, progress=False)
    draws = sampler.run(num_samples, resume=warm, progress=False)
    return Sampled(draws.latent[:, 1:].double(), draws.seconds)


def diagnose(sampled: Sampled) -> Row:
    """Return the table's statistics of draws."""
    chains, draws, size = sampled.latent.shape
    exported = arviz.convert_to_dataset({"f": sampled.latent.numpy()})
    bulk, r_hat = arviz.ess(exported)["f"].values, arviz.rhat(exported)["f"].values
    centred = sampled.latent - sampled.latent.mean(1, keepdim=True)
    lag = (centred[:, 1:] * centred[:, :-1]).mean(1) / centred.square().mean(1)
    return {
        "chains": chains,
        "draws": draws,
        "size": size,
        "ms": 1e3 * sampled.seconds / (chains * draws),
        "lag1": float(lag.mean()),
        "rhat": float(np.max(r_hat)),
        "ess": float(np.median(bulk)),
        "least": float(np.min(bulk)),
        "per_second": float(np.median(bulk)) / sampled.seconds,
        "least_per_second": float(np.min(bulk)) / sampled.seconds,
    }


def run_table(ledger: Ledger, options: argparse.Namespace) -> None:
    """Sample every problem by every method."""
    for name in options.problems:
        dataset, make = PROBLEMS[name]
        model = trained(dataset, make, options.quick)
        prior, targets, likelihood = prior_of(model), model.train_targets, model.likelihood.requires_grad_(False)
        for method in tqdm(options.methods, desc=name, disable=None):
            draws = options.draws if method in ("Gibbs", "MH") else options.reference_draws
            count = {"num_samples": draws, "num_chains": options.chains, "warmup": options.warmup, "seed": 0}
            if method == "Gibbs":
                run = partial(sample_by_gibbs, GibbsSampler(prior, likelihood, targets), **count)
            else:
                run = partial(sample_by_pyro, method, prior, likelihood, targets, **count)
            about = {"problem": name, "method": method}
            key = f"table/{name}/{method}/{options.chains}x{draws}"
            ledger.get(key, lambda run=run, about=about: {**about, **diagnose(run())})


def run_relaxed(ledger: Ledger, options: argparse.Namespace) -> None:
    """Sample two problems at several over-relaxations."""
    draws = min(options.draws, 1000)
    for name in ("heart, logistic", "Boston, Laplace"):
        dataset, make = PROBLEMS[name]
        model = trained(dataset, make, options.quick)
        prior, likelihood = prior_of(model), model.likelihood.requires_grad_(False)
        for rho in tqdm((0.0, 0.3, 0.5, 0.6, 0.7, 0.85), desc=name, disable=None):
            sampler = GibbsSampler(prior, likelihood, model.train_targets, overrelaxation=rho)

            def measure(sampler: GibbsSampler = sampler, name: str = name, rho: float = rho) -> Row:
                counts = {"num_samples": draws, "num_chains": options.chains, "warmup": 100, "seed": 3}
                f = sample_by_gibbs(sampler, **counts).latent
                square = (f - f.mean((0, 1))).square()
                sets = [arviz.convert_to_dataset({"f": values.numpy()}) for values in (f, square)]
                sizes = [arviz.ess(s)["f"].values for s in sets] + [arviz.ess(sets[0], method="tail")["f"].values]
                per_draw = [np.array(size) / f[..., 0].numel() for size in sizes]
                return {
                    "problem": name,
                    "overrelaxation": rho,
                    "median": [float(np.median(size)) for size in per_draw],
                    "least": [float(np.min(size)) for size in per_draw],
                }

            ledger.get(f"relaxed/{name}/{rho:g}/{options.chains}x{draws}", measure)


def run_nuts(ledger: Ledger, options: argparse.Namespace) -> None:
    """Compare marginal means and standard deviations with NUTS."""
    size = 20 if options.quick else 100
    x = torch.linspace(0, 6, size, dtype=torch.float64)
    covariance = 1.5 * torch.exp(-0.5 * (x.unsqueeze(-1) - x) ** 2) + 1e-6 * torch.eye(size, dtype=torch.float64)
    prior = MultivariateNormal(torch.zeros_like(x), covariance)
    generator = torch.Generator().manual_seed(0)
    f = torch.sin(2 * x) + 0.3 * torch.randn(size, dtype=torch.float64, generator=generator)
    draws = options.draws, options.reference_draws
    counts = {"num_chains": options.chains, "warmup": options.warmup, "seed": 1}
    for name, make in tqdm(ALL.items(), desc="against NUTS", disable=None):
        likelihood = make().double().requires_grad_(False)
        y = (3 * f.abs()).floor() if name == "negative binomial" else f
        y = (f > 0).double() if name in ("logistic", "SVM") else y
        key = f"nuts/{name}/{size}/{options.chains}x{draws[0]}/{draws[1]}"
        compare = partial(compare_with_nuts, prior, likelihood, y, draws, counts)
        ledger.get(key, lambda name=name, compare=compare: {"likelihood": name, **compare()})


def compare_with_nuts(
    prior: MultivariateNormal,
    likelihood: gpytorch.likelihoods.Likelihood,
    y: Tensor,
    draws: tuple[int, int],
    counts: dict[str, int],
) -> Row:
    """Return z-scores of every marginal mean and standard deviation, by ArviZ's Monte Carlo standard errors."""
    ours = sample_by_gibbs(GibbsSampler(prior, likelihood, y), num_samples=draws[0], **counts)
    nuts = sample_by_pyro("NUTS", prior, likelihood, y, num_samples=draws[1], **counts)
    row: Row = {"size": y.size(-1), "ours": diagnose(ours), "nuts": diagnose(nuts)}
    for moment, of in (("mean", torch.mean), ("sd", torch.std)):
        values = [of(sampled.latent.flatten(0, 1), 0) for sampled in (ours, nuts)]
        errors = [
            torch.from_numpy(arviz.mcse(arviz.convert_to_dataset({"f": s.latent.numpy()}), method=moment)["f"].values)
            for s in (ours, nuts)
        ]
        row[f"z_{moment}"] = ((values[0] - values[1]) / torch.hypot(*errors)).tolist()
    return row


def run_noise(ledger: Ledger, options: argparse.Namespace) -> None:
    """Compare three ways to move the noise scale of a Student-t model."""
    model = trained("boston", likelihoods.StudentTLikelihood, options.quick)
    model.likelihood.deg_free = 4.0
    flat = LogNormalPrior(0.0, 20.0)  # of the squared scale: uniform in its logarithm over the range of the data
    model.likelihood.register_prior("noise_prior", flat, "noise")
    prior = prior_of(model)
    dense = DensePrior.of(prior.mean, prior.covariance_matrix, 0.0)
    draws = min(options.draws, 2000)
    count = {"num_samples": draws, "num_chains": options.chains, "warmup": options.warmup, "seed": 2}

    def collapsed() -> Row:
        sampler = GibbsSampler(model, hyperparameters=["likelihood.noise"], jitter=1e-8)
        generator = torch.Generator().manual_seed(2)
        warm = sampler.run(1, options.chains, options.warmup, generator=generator, progress=False)
        found = sampler.run(draws, resume=warm, progress=False)
        log_scale = 0.5 * found.hyperparameters["likelihood.noise"][:, 1:].log()
        return {**diagnose(Sampled(log_scale.double(), found.seconds)), "mean": float(log_scale.mean())}

    def augmented(expanded: bool) -> Row:
        found = noise_by_scale_mixture(dense, model.train_targets, 4.0, expanded=expanded, **count)
        return {**diagnose(found), "mean": float(found.latent.mean())}

    suffix = f"{options.chains}x{draws}"
    ledger.get(f"noise/w integrated out/{suffix}", collapsed)
    ledger.get(f"noise/scale mixture, expanded/{suffix}", lambda: augmented(True))
    ledger.get(f"noise/scale mixture, plain/{suffix}", lambda: augmented(False))


def report_table(ledger: Ledger) -> str:
    """Return the table of all problems and methods."""
    lines = [
        "| problem | method | chains x draws | ms a draw | lag-1 | R-hat | ESS: median, least | ESS/s: median, least "
        "| Gibbs / this |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    ours: dict[str, float] = {}
    for row in ledger.of("table/"):
        problem, method, size = row["problem"], row["method"], f"{row['chains']} x {row['draws']}"
        if method == "Gibbs":
            ours[problem] = row["per_second"]
        ratio = f"{ours[problem] / row['per_second']:.3g}" if problem in ours else ""
        lines.append(
            f"| {problem} | {method} | {size} | {row['ms']:.2f} | {row['lag1']:.3f} | {row['rhat']:.4f} | "
            f"{row['ess']:.0f}, {row['least']:.0f} | {row['per_second']:.3g}, {row['least_per_second']:.3g} | {ratio} |"
        )
    return "\n".join(lines)


def report_relaxed(ledger: Ledger) -> str:
    """Return effective sample sizes a draw."""
    lines = [
        "| problem | over-relaxation | ESS a draw of f: median, least | of its square | of its tails |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in ledger.of("relaxed/"):
        pairs = zip(row["median"], row["least"], strict=True)
        cells = " | ".join(f"{median:.2f}, {least:.2f}" for median, least in pairs)
        lines.append(f"| {row['problem']} | {row['overrelaxation']:g} | {cells} |")
    return "\n".join(lines)


def report_nuts(ledger: Ledger) -> str:
    """Return the largest z-scores of each likelihood."""
    lines = [
        "| likelihood | N | largest z of a mean | of a sd | R-hat ours, NUTS | least ESS ours, NUTS |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in ledger.of("nuts/"):
        means, sds = (max(map(abs, row[name])) for name in ("z_mean", "z_sd"))
        lines.append(
            f"| {row['likelihood']} | {row['size']} | {means:.2f} | {sds:.2f} | {row['ours']['rhat']:.4f}, "
            f"{row['nuts']['rhat']:.4f} | {row['ours']['least']:.0f}, {row['nuts']['least']:.0f} |"
        )
    return "\n".join(lines)


def report_noise(ledger: Ledger) -> str:
    """Return the table of how the three samplers of the noise scale mix."""
    lines = [
        "| way | chains x draws | ms a draw | lag-1 | R-hat | ESS | ESS/s | mean of log s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in ledger.of("noise/"):
        way, size = row["key"].split("/")[1], f"{row['chains']} x {row['draws']}"
        lines.append(
            f"| {way} | {size} | {row['ms']:.2f} | {row['lag1']:.3f} | {row['rhat']:.4f} | {row['ess']:.0f} | "
            f"{row['per_second']:.3g} | {row['mean']:.4f} |"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="12 data and few draws, some seconds")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), help="of the table")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="of the table")
    parser.add_argument("--chains", type=int, default=5)
    parser.add_argument("--draws", type=int, default=10_000, help="of each chain of Gibbs and the random walk")
    parser.add_argument("--reference-draws", type=int, default=10_000, help="of each chain of NUTS and HMC")
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--report-only", action="store_true", help="print the tables of --output and stop")
    options = parser.parse_args(arguments)
    options.parts = options.parts or list(PARTS)
    if not set(options.parts) <= set(PARTS):
        parser.error(f"parts are {', '.join(PARTS)}; got {options.parts}")
    if options.quick:
        options.chains, options.draws, options.reference_draws, options.warmup = 2, 60, 20, 20
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and print the tables."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    ledger = Ledger(options.output)
    run = {"table": run_table, "relaxed": run_relaxed, "nuts": run_nuts, "noise": run_noise}
    report = {"table": report_table, "relaxed": report_relaxed, "nuts": report_nuts, "noise": report_noise}
    for part in options.parts:
        if not options.report_only:
            run[part](ledger, options)
        print(f"\n## {part}\n\n{report[part](ledger)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
