r"""Where EP ends at a smaller power: is there no solution at power 1, and how do its branches end?

At settings of an example's map (`benchmarks.ep_convergence`) where `EP()` does not converge at power 1, two branches of
solutions are followed with more patience than EP has, through their turns (`gpext.inference.ep_internals.arclength`):
in the power, from where EP has ended; and at power 1, while the likelihood narrows from where no datum is far out.
Besides, second-order steps at power 1 start from random sites. A branch ends where it

* reaches power 1 and the likelihood's own width: then there is a solution that EP has missed
* turns back, to a power of nearly zero or a wide likelihood
* has a cavity that becomes infinite: the other data leave a datum's latent value undetermined
* or is lost: no step, however short, returns to it.

    OMP_NUM_THREADS=1 python -m benchmarks.ep_existence --output benchmarks/results/ep_existence.jsonl
    python -m benchmarks.ep_existence --quick

Every row is appended to the output as it is done; what is there is not done again.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path as FilePath

import torch
from tqdm import tqdm

from benchmarks.ep_map import grid
from benchmarks.ep_problems import EXAMPLES, StudentTProblem, stated_power
from benchmarks.ledger import Ledger, Row, measure_and_report
from benchmarks.tables import table_of
from gpext.inference import EP
from gpext.inference.ep_internals.arclength import Branch, follow_arc
from gpext.inference.ep_internals.cavities import Path
from gpext.inference.ep_internals.levenberg_marquardt import levenberg_marquardt
from gpext.inference.ep_internals.moment_matching import match
from gpext.inference.problem import Problem
from gpext.likelihoods.tilted_moments import tilt, widest_needed
from gpext.sites import GaussianSites

GOAL = 1e-6
SIDE, QUICK = 40, 34 * 40 + 3  # of the map; a setting whose branch turns back with all its cavities narrow
LOWEST, BELOW = 0.01, -0.1  # of the power; of the way from the wide likelihood
CARE = 0.1  # EP has 1 in the width, 0.3 in the power


def examined(problem: StudentTProblem, looks: int, starts: int) -> Row:
    """Return where EP ends, and where that is a smaller power what becomes of the branches."""
    with torch.no_grad():
        result = EP().infer(problem.prior, problem.likelihood, problem.targets)
    power = stated_power(result)
    row: Row = {"status": result.status.name, "power": power}
    if power == 1:
        return row
    posed = Problem.of(problem.prior, problem.likelihood, problem.targets, 0.0)
    found = match(posed, tilt(posed.likelihood, posed.targets, power), power, result.conditioned.sites)
    at_end = GaussianSites(found.cavity_mean / found.cavity_variance, 1 / found.cavity_variance)
    at_prior = GaussianSites(posed.mean / posed.prior.variance, 1 / posed.prior.variance)
    follow = partial(follow_arc, posed, max_evaluations=looks, tolerance=GOAL, step_scale=CARE)
    branches = {
        "by power": follow(_by_power(posed), at_end, power, lowest=LOWEST),
        "by width": follow(_by_width(posed), at_prior, 0.0, lowest=BELOW),
    }
    endings = {name: _ending(branch) for name, branch in branches.items()}
    return row | endings | {"starts": starts, "random": _from_random_sites(posed, starts)}


def _by_power(posed: Problem) -> Path:
    return lambda t: (tilt(posed.likelihood, posed.targets, t), t)


def _by_width(posed: Problem) -> Path:
    """Return the path at power 1 from a likelihood so wide that the solution is next to the prior."""
    widest = widest_needed(posed.likelihood, posed.targets, posed.mean, posed.prior.variance)
    return lambda t: (tilt(posed.likelihood, posed.targets, 1.0, widening=widest ** (1 - t)), 1.0)


def _ending(branch: Branch) -> Row:
    """Return how a branch ends, how far it goes, how often it turns, and its widest cavity over the marginal."""
    t = torch.tensor([place.t for place in branch.places], dtype=torch.float64)
    turns = int((t.diff().sign().diff() != 0).sum())
    least = min((place.point.least_share for place in branch.places), default=1.0)
    farthest = t.max().item() if len(t) else None
    return {"reason": branch.reason, "farthest": farthest, "turns": turns, "cavity": least, "looks": len(branch.trace)}


def _from_random_sites(posed: Problem, starts: int) -> int:
    """Return from how many random sites second-order steps come to a solution at power 1.

    Each datum's site is that of Gaussian noise of the likelihood's scale, weakened by a factor that is log-uniform in
    [1e-4, 1]: some count, some are outliers.
    """
    generator = torch.Generator().manual_seed(0)
    at = lambda sites: match(posed, tilt(posed.likelihood, posed.targets, 1.0), 1.0, sites)  # noqa: E731
    arrived = 0
    for _ in range(starts):
        weaker = 10 ** (-4 * torch.rand(len(posed.targets), generator=generator, dtype=torch.float64))
        precision = weaker / posed.likelihood.noise.double()
        begin = at(GaussianSites(precision * posed.targets, precision))
        end, _ = levenberg_marquardt(at, begin, max_steps=100, patience=12, tolerance=GOAL)
        arrived += float(end.size) < GOAL
    return arrived


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    example, side = EXAMPLES[options.example], options.side
    settings = grid(example, "near", side)
    chosen = settings if options.at is None else [settings[k] for k in options.at]
    for i, j, lengthscale, magnitude in tqdm(chosen, disable=None):
        problem = example.problem(lengthscale, magnitude)
        key = f"existence/{options.example}/{side}/{i}/{j}"
        ledger.get(key, lambda p=problem: {**p.about, **examined(p, options.looks, options.starts)})


def report(ledger: Ledger) -> str:
    """Return how the branches end where EP is not at power 1, counted and one by one."""
    rows = ledger.of("existence/")
    reduced = [row for row in rows if row["power"] < 1]
    counts = Counter((row["by power"]["reason"], row["by width"]["reason"]) for row in reduced)
    lines = [
        {
            "lengthscale": f"{row['lengthscale']:.2f}",
            "magnitude": f"{row['magnitude']:.2f}",
            "EP ends at": f"{row['power']:.3g}",
            "branch in the power": _told(row["by power"]),
            "branch in the width": _told(row["by width"]),
            "random starts": f"{row['random']} of {row['starts']}",
        }
        for row in reduced
    ]
    head = f"{len(rows)} settings, at power 1 {len(rows) - len(reduced)}"
    tallies = [f"* in the power {one}, in the width {other}: {count}" for (one, other), count in counts.most_common()]
    return "\n\n".join([head, "\n".join(tallies), table_of(lines)]) if lines else head


def _told(ending: Row) -> str:
    farthest = "" if ending["farthest"] is None else f", farthest {ending['farthest']:.3f}"
    return f"{ending['reason']}{farthest}, turns {ending['turns']}, 1 - tau v {ending['cavity']:.0e}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="one setting, with few looks")
    parser.add_argument("--example", type=int, choices=EXAMPLES, default=2)
    parser.add_argument("--side", type=int, default=SIDE, help="of the map")
    parser.add_argument("--at", type=int, nargs="+", help="only these of its settings, in the order of the map")
    parser.add_argument("--looks", type=int, default=1000, help="along one branch, at most")
    parser.add_argument("--starts", type=int, default=100, help="from random sites")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=FilePath)
    parser.add_argument("--report-only", action="store_true", help="print the tables of --output and stop")
    options = parser.parse_args(arguments)
    if options.quick:
        options.side, options.at, options.looks, options.starts = SIDE, [QUICK], 120, 2
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine what is missing, and print the tables."""
    measure_and_report(parse(arguments), run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
