r"""Does expectation propagation converge, where, at what cost, and is its evidence right [JVV11 Secs. 3, 5]?

Parts, any of which may be named on the command line:

* random: Student-t problems of two families, regular and hard; the share that EP solves at power 1, and at any power.
* map: lengthscale by magnitude, for the two one-dimensional examples of JVV11's Figure 1: around the best evidence, as
  in Figure 4, and in a much larger region; the stage that converged, and the evidence. Draws a figure.
* ais: the evidence by EP at powers 1 and 1/2, Laplace and KL against annealed importance sampling, at settings drawn
  from the map.
* standard: the plain iteration, parallel and sequential, at several dampings, and the double loop, on a coarse map.
* speed: one inference on 2000 data, in units of as many Cholesky factorisations as it has site evaluations.

Convergence is checked independently: the residual of moment matching at the power that the result states, with
integrals by adaptive quadrature instead of the rule that EP itself uses, has to be below 1e-4.

    OMP_NUM_THREADS=1 python -m benchmarks.ep_convergence --output ep.jsonl --figure docs/evidence/ep_map.png
    python -m benchmarks.ep_convergence --quick

Every row is appended to the output when it is done; existing rows are not computed again.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.ep_map import draw_map, grid, is_matched, stage_of
from benchmarks.ep_problems import EXAMPLES, FAMILIES, StudentTProblem, large_problem, random_problem, stated_power
from benchmarks.ep_references import anneal, plain_parallel
from benchmarks.ep_report import report_ais, report_map, report_random, report_speed, report_standard
from benchmarks.ep_schedules import DoubleLoopEP, SequentialEP
from benchmarks.ledger import Ledger, Row
from gpext.inference import EP, KL, InferenceResult, Laplace
from gpext.inference.ep_internals.moment_matching import match
from gpext.inference.problem import Problem
from gpext.quadrature import TiltedMoments, tilted_moments

PARTS = ("random", "map", "ais", "standard", "speed")
PLAIN = (1.0, 0.8, 0.5, 0.3, 0.1)
SEQUENTIAL = (1.0, 0.5)
SWEEPS, LOOKS = 200, 3000
SIDES = {"near": 40, "far": 20}  # of the maps


# ---- one inference -------------------------------------------------------------------------------------------------


def inferred(problem: StudentTProblem, rule: EP) -> Row:
    """Return how EP ended on a problem, with an independent check of its result."""
    started = time.perf_counter()
    try:
        result = rule.infer(problem.prior, problem.likelihood, problem.targets)
    except (RuntimeError, ValueError) as error:  # a finding, not the end of the benchmark
        return {"status": type(error).__name__, "message": str(error), "finite": False, "residual": math.inf}
    return described(problem, result, time.perf_counter() - started)


def described(problem: StudentTProblem, result: InferenceResult, seconds: float) -> Row:
    """Return how EP ended, with an independent check of its result."""
    power = stated_power(result)
    second_order, along, derivatives = (
        sum(int(count) for count in re.findall(rf"(\d+) {stage}", result.message))
        for stage in ("second-order steps", "steps along a branch", "derivatives")
    )
    return {
        "status": result.status.name,
        "power": power,
        "stage": stage_of(result.message),
        "looks": result.num_steps,
        "second_order": second_order,
        "along": along,
        "derivatives": derivatives,
        "seconds": seconds,
        "evidence": result.log_evidence.item(),
        "residual": residual(problem, result, power),
        "finite": is_finite(result),
        "negative": int((result.sites.precision < 0).sum()),
        "message": result.message,
    }


def residual(problem: StudentTProblem, result: InferenceResult, power: float) -> float:
    """Return the largest residual of moment matching at a result's sites, in standard deviations or log variance."""
    likelihood, targets = problem.likelihood, problem.targets

    def adaptive(mean: Tensor, variance: Tensor) -> TiltedMoments:
        log_factor = lambda f: power * likelihood.log_prob(targets, f)  # noqa: E731
        return tilted_moments(log_factor, mean, variance, knots=targets.unsqueeze(0))

    posed = Problem.of(problem.prior, likelihood, targets, 0.0)
    return float(match(posed, adaptive, power, result.conditioned.sites).size)


def is_finite(result: InferenceResult) -> bool:
    """Return whether evidence, sites and marginals are finite and the variances positive."""
    mean, variance = result.conditioned.mean, result.conditioned.variance
    values = (result.log_evidence, mean, variance, result.sites.shift, result.sites.precision)
    return all(bool(value.isfinite().all()) for value in values) and bool((variance > 0).all())


# ---- the parts -----------------------------------------------------------------------------------------------------


def run_random(ledger: Ledger, families: Sequence[str], count: int) -> None:
    for family in families:
        for seed in tqdm(range(count), desc=f"random, {family}", disable=None):
            problem = random_problem(family, seed)
            described = {**problem.about, "deg_free": problem.deg_free, "scale": problem.scale}
            ledger.get(f"random/{family}/{seed}", lambda p=problem, d=described: {**d, **inferred(p, EP())})


def run_map(ledger: Ledger, sides: Mapping[str, int]) -> None:
    for region, side in sides.items():
        for number, example in EXAMPLES.items():
            settings = grid(example, region, side)
            for i, j, lengthscale, magnitude in tqdm(settings, desc=f"{region}, example {number}", disable=None):
                problem = example.problem(lengthscale, magnitude)
                key = f"map/{region}/{number}/{side}/{i}/{j}"
                ledger.get(key, lambda p=problem, at=(i, j): {"at": at, **p.about, **inferred(p, EP())})


def run_ais(ledger: Ledger, count: int, chains: int, temperatures: int) -> None:
    for number, example in EXAMPLES.items():
        settings = grid(example, "near", SIDES["near"])
        chosen = torch.randperm(len(settings), generator=torch.Generator().manual_seed(number))[:count].tolist()
        for i, j, lengthscale, magnitude in tqdm([settings[k] for k in chosen], desc=f"ais, {number}", disable=None):
            problem = example.problem(lengthscale, magnitude)
            key = f"ais/{number}/{i}/{j}/{chains}x{temperatures}"
            ledger.get(key, lambda p=problem: {**p.about, **_evidences(p, chains, temperatures)})


def _evidences(problem: StudentTProblem, chains: int, temperatures: int) -> Row:
    found = anneal(problem, chains=chains, temperatures=temperatures)
    row: Row = {"ais": found.log_evidence, "error": found.standard_error, "effective": found.effective}
    for name, rule in (("one", EP()), ("half", EP(power=0.5))):
        result = inferred(problem, rule)
        row |= {name: result["evidence"], f"{name}_power": result["power"], f"{name}_residual": result["residual"]}
    for name, bound in (("KL", KL()), ("Laplace", Laplace())):
        row[name] = bound.infer(problem.prior, problem.likelihood, problem.targets).log_evidence.item()
    return row


def run_standard(ledger: Ledger, sides: Sequence[int]) -> None:
    for number, example in EXAMPLES.items():
        settings = [(side, *setting) for side in sides for setting in grid(example, "near", side)]
        for side, i, j, lengthscale, magnitude in tqdm(settings, desc=f"standard, {number}", disable=None):
            problem = example.problem(lengthscale, magnitude)
            key = f"standard/{number}/{side}/{i}/{j}"
            ledger.get(key, lambda p=problem: {**p.about, **_plain_outcomes(p)})


def _plain_outcomes(problem: StudentTProblem) -> Row:
    row: Row = {}
    for power, damping in [*((1.0, damping) for damping in PLAIN), (0.5, 1.0)]:
        run = plain_parallel(problem, power=power, damping=damping, max_sweeps=SWEEPS)
        row[f"parallel, delta {damping:g}" + (", power 0.5" if power < 1 else "")] = [run.outcome, run.sweeps]
    rules = {
        f"sequential, delta {damping:g}": SequentialEP(damping=damping, max_steps=SWEEPS) for damping in SEQUENTIAL
    }
    for name, rule in {**rules, "double loop": DoubleLoopEP(max_steps=LOOKS)}.items():
        result = rule.infer(problem.prior, problem.likelihood, problem.targets)
        outcome = {"CONVERGED": "converged", "STALLED": "no progress"}.get(result.status.name, "goes on")
        row[name] = [outcome, result.num_steps]
    ours = inferred(problem, EP())
    outcome = "converged" if is_matched(ours) and ours["power"] == 1 else "smaller power" if is_matched(ours) else "not"
    return row | {"gpext": [outcome, ours["looks"]]}


def run_speed(ledger: Ledger, count: int, repetitions: int) -> None:
    for deg_free in (2.5, 4.0, 10.0):
        problem = large_problem(count, deg_free)
        for k in tqdm(range(repetitions), desc=f"speed, nu = {deg_free:g}", disable=None):
            ledger.get(f"speed/{count}/{deg_free:g}/{k}", lambda p=problem, n=deg_free: {"deg_free": n, **_timed(p)})


def _timed(problem: StudentTProblem) -> Row:
    matrix = problem.covariance + torch.eye(len(problem.targets), dtype=torch.float64)
    alone = []
    for _ in range(5):
        started = time.perf_counter()
        torch.linalg.cholesky_ex(matrix)
        alone.append(time.perf_counter() - started)
    started = time.perf_counter()
    result = EP().infer(problem.prior, problem.likelihood, problem.targets)
    seconds = time.perf_counter() - started
    looks = result.num_steps + 1  # plus the evaluation at the prior
    ratio = seconds / (looks * statistics.median(alone))
    negative = int((result.sites.precision < 0).sum())
    return {"status": result.status.name, "looks": looks, "seconds": seconds, "ratio": ratio, "negative": negative}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="a few problems of each part, some seconds")
    parser.add_argument("--problems", type=int, default=2000, help="of each random family")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--report-only", action="store_true", help="print the tables of --output and stop")
    options = parser.parse_args(arguments)
    options.parts = options.parts or list(PARTS)
    if not set(options.parts) <= set(PARTS):
        parser.error(f"parts are {', '.join(PARTS)}; got {options.parts}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing rows, and print the tables."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    ledger, quick = Ledger(options.output), options.quick
    run: dict[str, Callable[[], None]] = {
        "random": lambda: run_random(ledger, options.families, 3 if quick else options.problems),
        "map": lambda: run_map(ledger, {"near": 2} if quick else SIDES),
        "ais": lambda: run_ais(ledger, 1 if quick else 10, *((50, 50) if quick else (500, 1000))),
        "standard": lambda: run_standard(ledger, (1,) if quick else (1, 8)),
        "speed": lambda: run_speed(ledger, *((100, 1) if quick else (2000, 5))),
    }
    report: dict[str, Callable[[Ledger], str]] = {
        "random": report_random,
        "map": report_map,
        "ais": report_ais,
        "standard": report_standard,
        "speed": report_speed,
    }
    for part in options.parts:
        if not options.report_only:
            run[part]()
        print(f"\n## {part}\n\n{report[part](ledger)}")
    if options.figure is not None and "map" in options.parts:
        draw_map(ledger.of("map/"), options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
