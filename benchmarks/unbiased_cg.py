"""Solves that end at random: are they unbiased, what do they cost, and what does a preconditioner save [FE15 Fig. 2-4]?

Rows of Concrete, k = exp(-|x - x'|^2 / (2 l^2)) + noise with l = 2 on standardised inputs; the condition number is set
by the noise. Gradients are those in log s, log l and log noise. The rows of each part are written as they are finished:

* conditioning: products and errors of CG, preconditioned CG and ULISSE against the condition number;
* schedules: the error of the mean of 100 gradients against products, for laws of survival and first steps;
* draws: the error of the mean of 4000 draws in standard errors, for solutions, and for gradients with a sum of kernels;
* preconditioner: solves to 1e-8 on 5000 data, uniform and real ones, and gradients with a preconditioner that is kept.

    GPEXT_DATA=folder OMP_NUM_THREADS=1 python -m benchmarks.unbiased_cg --output benchmarks/results/unbiased_cg.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks import unbiased_cg_parts as parts
from benchmarks.datasets import load
from benchmarks.ledger import Ledger, measure_and_report
from benchmarks.unbiased_cg_problems import Problem
from benchmarks.unbiased_cg_report import figures, report
from gpext.solvers import Geometric, Matched, NoSurvival, Ulisse

PARTS = ("conditioning", "schedules", "draws", "preconditioner")
SOLUTION_LAWS = {
    "early stopping": NoSurvival(),
    "ULISSE beta=1": Ulisse(1.0),
    "Geometric(0.05)": Geometric(0.05),
    "Geometric(0.02)": Geometric(0.02),
    "Matched": Matched(),
}
KEEPING = ("no preconditioner", "anew", "kept")


def conditioning(ledger: Ledger, options: argparse.Namespace) -> None:
    """Run every method at every noise."""
    for noise in tqdm(options.noises, disable=None):
        problem = Problem.concrete(options.rows, noise)
        about = {"noise": noise, "rows": options.rows, "condition": problem.condition}
        for method in parts.CG_METHODS:
            ledger.get(
                f"conditioning/{options.rows}/{noise:g}/{method}",
                lambda m=method, p=problem, a=about: {**a, "method": m, **parts.cg(p, m)},
            )
        for method in ("CG", *parts.ESTIMATORS):
            ledger.get(
                f"estimator/{options.rows}/{noise:g}/{method}",
                lambda m=method, p=problem, a=about: {**a, "method": m, **parts.estimator(p, m)},
            )


def schedules(ledger: Ledger, options: argparse.Namespace) -> None:
    """Run every law at every tolerance, with and without a preconditioner."""
    for noise in options.schedule_noises:
        problem = Problem.concrete(options.rows, noise)
        for preconditioned in (False, True):
            about = {"noise": noise, "rows": options.rows, "preconditioned": preconditioned}
            tapes = defaultdict(lambda p=problem: parts.Tape(p.product))
            for law in tqdm(parts.LAWS, disable=None):
                for q in options.tolerances:
                    ledger.get(
                        f"schedules/{options.rows}/{noise:g}/{preconditioned}/{law}/{q:g}",
                        lambda n=law, q=q, p=problem, a=about, t=tapes: {
                            **a,
                            "law": n,
                            "q": q,
                            **parts.schedule(p, n, q, a["preconditioned"], options.probe_sets, t),
                        },
                    )


def draws(ledger: Ledger, options: argparse.Namespace) -> None:
    """Average draws of solutions by every law, and of gradients by every method."""
    for noise in options.schedule_noises:
        problem = Problem.concrete(options.rows, noise)
        about = {"noise": noise, "rows": options.rows, "condition": problem.condition}
        for q in (1.0, 0.1):
            for name, law in tqdm(SOLUTION_LAWS.items(), disable=None):
                for preconditioned in (False, True) if name == "Matched" else (False,):
                    ledger.get(
                        f"solution/{options.rows}/{noise:g}/{name}/{q:g}/{preconditioned}/{options.draws}",
                        lambda n=name, law=law, q=q, c=preconditioned, p=problem, a=about: {
                            **a,
                            "law": n,
                            "q": q,
                            "preconditioned": c,
                            **parts.solution_draws(p, law, q, c, options.draws),
                        },
                    )
    data = load("concrete", max_train=options.gradient_rows, test_fraction=0.0)
    for method in tqdm((*parts.GRADIENT_METHODS, "stock inv_quad"), disable=None):
        ledger.get(
            f"gradient/{options.gradient_rows}/{method}/{options.draws}",
            lambda m=method: {
                "method": m,
                **parts.gradient_draws(data.train_x, data.train_y, m, options.draws),
            },
        )


def preconditioner(ledger: Ledger, options: argparse.Namespace) -> None:
    """Run kernels from rough to smooth, on uniform inputs and real ones; gradients on a random walk."""
    for inputs, kernel, lengthscale, noise in tqdm(parts.SYSTEMS, disable=None):

        def measured(name=inputs, kernel=kernel, lengthscale=lengthscale, noise=noise):
            if name == parts.UNIFORM:
                x = parts.uniform(options.num_data)
            else:
                x = load(name, max_train=options.num_data, test_fraction=0.0).train_x
            return {"inputs": name, "dimension": x.size(-1), **parts.preconditioned(x, kernel, lengthscale, noise)}

        ledger.get(f"preconditioner/{options.num_data}/{inputs}/{kernel}/{lengthscale:g}/{noise:g}", measured)
    data = load("concrete", max_train=options.rows, test_fraction=0.0)
    for method in KEEPING:
        ledger.get(
            f"keeping/{options.rows}/{method}/{options.gradients}",
            lambda m=method: {"method": m, **parts.keeping(data.train_x, data.train_y, m, options.gradients)},
        )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, some seconds")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rows", type=int, default=1030, help="of Concrete")
    parser.add_argument("--gradient-rows", type=int, default=300, help="of Concrete, for draws of gradients")
    parser.add_argument("--noises", nargs="+", type=float, default=[1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3])
    parser.add_argument("--schedule-noises", nargs="+", type=float, default=[0.1, 0.01])
    parser.add_argument("--tolerances", nargs="+", type=float, default=[1.0, 0.3, 0.1, 0.03, 0.01])
    parser.add_argument("--probe-sets", type=int, default=2, help="over which the error of truncation is averaged")
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--num-data", type=int, default=5000, help="of the solves to 1e-8")
    parser.add_argument("--gradients", type=int, default=20, help="of a random walk")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--figures", type=Path, help="folder for the figures")
    parser.add_argument("--report-only", action="store_true", help="print the tables of --output and stop")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rows, options.gradient_rows, options.num_data, options.draws = 40, 20, 60, 5
        options.noises, options.schedule_noises, options.tolerances = [0.1], [0.1], [0.3]
        options.probe_sets, options.gradients = 1, 3
    return options


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure the requested parts."""
    measured = {"conditioning": conditioning, "schedules": schedules, "draws": draws, "preconditioner": preconditioner}
    for part in options.parts:
        measured[part](ledger, options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, print the tables and draw the figures."""
    options = parse(arguments)
    ledger = measure_and_report(options, run, report)
    if options.figures is not None:
        figures(ledger, options.figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
