r"""Are Langevin draws from stochastic gradients those of Metropolis-Hastings, and what does a draw cost [FE15 Fig. 5]?

Rows of Concrete, zero mean, k = s exp(-|x - x'|^2 / (2 l^2)) + noise. The reference is a random walk with exact
marginal likelihoods. Compared are log s, log l and log noise. The paper does not state its priors: here they are
LogNormal(0, 1.5^2) for s and l and LogNormal(-2, 1.5^2) for the noise, independent.

    python -m benchmarks.sgld_posterior --rows 300 --output results/sgld_posterior.jsonl

An interrupted or killed run resumes: finished rows are not run again, and chains continue from their checkpoint beside
the output.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import arviz
import gpytorch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior
from torch import Tensor

from benchmarks.datasets import load
from benchmarks.ledger import Ledger, Row, measure_and_report
from benchmarks.tables import AGAINST, against, table
from gpext.kernels import keops
from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.operators import UnbiasedSolver
from gpext.samplers import HyperPosterior, MetropolisHastings, SamplingStatus, SGLDSampler

METHODS = ("Metropolis-Hastings", "SGLD, exact gradients", "SGLD, unbiased gradients")
PROBES = 4  # as in the paper
ALL_ROWS = {"concrete": 1030, "census_house_8L": 22784}
TIMED_STEPS = 200
SLICES = (0.1, 0.2, 0.5, 1.0)  # of the draws, at which the PSRF is given


class Model(gpytorch.models.ExactGP):
    """The model of the paper [FE15 Eq. 1]."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(keops.RBFKernel())
        self.covar_module.register_prior("outputscale_prior", LogNormalPrior(0.0, 1.5), "outputscale")
        self.covar_module.base_kernel.register_prior("lengthscale_prior", LogNormalPrior(0.0, 1.5), "lengthscale")
        likelihood.register_prior("noise_prior", LogNormalPrior(-2.0, 1.5), "noise")
        self.to(x)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def sampler_of(method: str, model: Model, solver: UnbiasedSolver | None = None) -> MetropolisHastings | SGLDSampler:
    """Return the sampler of this name; the solver is for unbiased gradients."""
    if method == METHODS[0]:
        return MetropolisHastings(ExactMarginalLogLikelihood(model.likelihood, model))
    if method == METHODS[1]:
        return SGLDSampler(ExactMarginalLogLikelihood(model.likelihood, model))
    return SGLDSampler(UnbiasedMarginalLogLikelihood(model.likelihood, model, PROBES, solver=solver))


def sample(
    sampler: MetropolisHastings | SGLDSampler, checkpoint: Path | None, *, draws: int, chains: int, warmup: int
) -> HyperPosterior:
    """Return draws, continuing from a checkpoint if there is one."""
    found = sampler.load(checkpoint) if checkpoint is not None and list(checkpoint.glob("*.pt")) else None
    done = 0 if found is None else found.raw.size(1)
    if found is None or done < draws:
        found = sampler.run(draws - done, chains, warmup, resume=found, checkpoint=checkpoint)
    if found.status is SamplingStatus.INTERRUPTED:
        raise KeyboardInterrupt
    return found


def describe(found: HyperPosterior, seconds_a_step: float, steps: float) -> Row:
    """Return the table's statistics of draws: moments of the logarithms, their errors, ESS, PSRF."""
    logs = {name: draws.flatten(1).log().numpy() for name, draws in found.draws.items()}  # one number each
    data = arviz.convert_to_dataset(logs)
    chains, draws = found.raw.shape[:2]
    ess = arviz.ess(data)
    psrf = {}
    for part in SLICES:
        head = arviz.convert_to_dataset({name: each[:, : max(int(part * draws), 4)] for name, each in logs.items()})
        psrf[f"{part:g}"] = max(float(v) for v in arviz.rhat(head, method="identity").data_vars.values())
    minutes = seconds_a_step * chains * steps / 60
    return {
        "status": found.status.name,
        "chains": chains,
        "draws": draws,
        "ms": 1e3 * seconds_a_step,
        "names": list(logs),
        "mean": [float(each.mean()) for each in logs.values()],
        "sd": [float(each.std()) for each in logs.values()],
        "mcse": [float(v) for v in arviz.mcse(data).data_vars.values()],
        "mcse_sd": [float(v) for v in arviz.mcse(data, method="sd").data_vars.values()],
        "ess": [float(v) for v in ess.data_vars.values()],
        "ess_a_minute": min(float(v) for v in ess.data_vars.values()) / minutes,
        "rhat": max(float(v) for v in arviz.rhat(data).data_vars.values()),
        "psrf": psrf,
    }


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Sample by every method."""
    data = load(options.data, max_train=options.rows, test_fraction=0.0)
    for method in options.methods:
        is_reference = method == METHODS[0]
        draws = options.reference_draws if is_reference else options.draws
        chains = options.reference_chains if is_reference else options.chains
        key = f"{options.data}/{method}/{options.rows}/{chains}x{draws}+{options.warmup}"
        solver = None
        if method == METHODS[2]:
            solver = UnbiasedSolver(num_probes=options.probes, rank=options.rank, controlled=options.controlled)
            key += f"/{options.probes} probes/rank {options.rank}" + "/controlled" * options.controlled

        def make(
            method: str = method,
            draws: int = draws,
            chains: int = chains,
            key: str = key,
            solver: UnbiasedSolver | None = solver,
        ) -> Row:
            sampler = sampler_of(method, Model(data.train_x, data.train_y), solver)
            folder = None if options.output is None else options.output.with_suffix("") / key.replace("/", "-")
            found = sample(sampler, folder, draws=draws, chains=chains, warmup=options.warmup)
            # Half of the warm-up steps use a second estimate.
            steps = draws + options.warmup * (1.5 if solver is not None else 1.0)
            seconds, processor = seconds_a_step(sampler)
            described = describe(found, seconds, steps)
            named = {"data": options.data, "method": method, "rows": options.rows, "warmup": options.warmup}
            return {**named, **described, "processor_ms": 1e3 * processor}

        ledger.get(key, make)


def seconds_a_step(sampler: MetropolisHastings | SGLDSampler) -> tuple[float, float]:
    """Return wall-clock and CPU time of one step, timed separately because a run may have been interrupted."""
    fixed = {"step_size": 0.1} if isinstance(sampler, SGLDSampler) else {}
    sampler.run(1, 1, 0, progress=False, **fixed)  # one-time work
    begun = time.perf_counter()
    sampler.run(1, 1, 0, progress=False, **fixed)
    once = time.perf_counter() - begun
    begun, processor = time.perf_counter(), time.process_time()
    sampler.run(1 + TIMED_STEPS, 1, 0, progress=False, **fixed)
    spent = time.process_time() - processor
    return (time.perf_counter() - begun - once) / TIMED_STEPS, max(spent - once, 0.0) / TIMED_STEPS


def report(ledger: Ledger) -> str:
    """Return both tables: comparisons with the reference, and the costs of a draw."""
    rows = list(ledger.rows.values())
    compared, costs = [], []
    for row in rows:
        same = [r for r in rows if (r["data"], r["rows"]) == (row["data"], row["rows"]) and r is not row]
        reference = next((r for r in same if r["method"] == METHODS[0]), None)
        named = [str(row["rows"]), row["method"]]
        for j, name in enumerate(row["names"]):
            compared.append([*named, f"log {name.rsplit('.', 1)[-1]}", *against(row, reference, j)])
        costs.append(
            [
                *named,
                f"{row['chains']} x {row['draws']}",
                f"{row['ms']:.1f} ({row['processor_ms']:.1f})",
                f"{min(row['ess']):.0f}",
                f"{row['ess_a_minute']:.1f}",
                f"{row['rhat']:.4f}",
                ", ".join(f"{value:.3f}" for value in row["psrf"].values()),
            ]
        )
    parts = ", ".join(f"{100 * part:g} %" for part in SLICES)
    head = ["chains x draws", "ms a step (of the processor)", "least ESS", "ESS a minute", "rank R-hat"]
    return "\n\n".join(
        [
            table(["rows", "method", "parameter", *AGAINST], compared),
            table(["rows", "method", *head, f"PSRF after {parts}"], costs),
        ]
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="20 rows and few draws, some seconds")
    parser.add_argument("--data", choices=list(ALL_ROWS), default="concrete")
    parser.add_argument("--rows", type=int, help="of the data; all by default")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--chains", type=int, default=10, help="of SGLD")
    parser.add_argument("--draws", type=int, default=4000, help="of each chain of SGLD")
    parser.add_argument("--probes", type=int, default=PROBES, help="of an unbiased gradient")
    parser.add_argument("--rank", type=int, help="of the preconditioner; chosen by what it saves by default")
    parser.add_argument("--controlled", action="store_true", help="derivatives of log|A| that the preconditioner knows")
    parser.add_argument("--reference-chains", type=int, default=4)
    parser.add_argument("--reference-draws", type=int, default=10_000)
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--report-only", action="store_true", help="print the tables of --output and stop")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rows, options.chains, options.draws, options.warmup = 20, 2, 20, 50
        options.reference_chains, options.reference_draws = 2, 20
    options.rows = ALL_ROWS[options.data] if options.rows is None else options.rows
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and print the tables."""
    measure_and_report(parse(arguments), run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
