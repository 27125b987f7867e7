r"""Whether inference and training end honestly: random problems under every rule and likelihood, both dtypes.

    python -m benchmarks.honest_endings --count 10000 --fits 1000 --output benchmarks/results/honest_endings.jsonl
    python -m benchmarks.honest_endings --quick

Half of them are mild and half extreme, see :mod:`benchmarks.honest_problems` and :mod:`benchmarks.honest_fits`.

The law that every problem is held to, with a name for each way of breaking it:

* `exception`: no exception; all problems are valid.
* `infinite`: an evidence, or the objective of a training, is never +inf.
* `converged_nan`: of what says that it has converged, evidence, moments and derivatives are finite; after any training
  that says that there is a posterior, predictions are, and after every training the parameters.
* `warning`: no warning of another library.
* `slow`: no call takes more than 20 seconds; of a training, no step.
* `order`: CAVI <= KL <= the exact evidence, where it can be integrated (all latent values one number).
* `lost`: a status that says that there is no posterior; honest, but counted: the posteriors exist.
"""

from __future__ import annotations

import argparse
import math
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from linear_operator.utils.warnings import NumericalWarning

from benchmarks.honest_fits import FitProblem, random_fit
from benchmarks.honest_problems import FAMILIES, Problem, random_problem
from benchmarks.ledger import Ledger, Row, measure_and_report
from gpext import FitStatus
from gpext.bounds import conditional_log_prob
from gpext.inference import DenseBlocksWarning, InferenceWarning, Status
from gpext.quadrature import QuadratureWarning, log_expectation

QUICK, QUICK_FITS = 100, 10  # problems
_LONGEST = 20.0  # seconds of a call
_SLACK = {torch.float32: 1e-5, torch.float64: 1e-9}  # of an evidence: what bounds may be out of order by
_FOUND = (Status.CONVERGED, Status.REDUCED_POWER)
_ENDED = (*_FOUND, Status.MAX_STEPS, Status.STALLED)
_WITHOUT_POSTERIOR = (FitStatus.NO_POSTERIOR, FitStatus.BREAKDOWN)


def judge(problem: Problem) -> Row:
    """Return what became of a problem: how it ended, how long it took, and which parts of the law it broke."""
    row: Row = {"family": problem.family, "rule": problem.rule_name, "size": problem.mean.size(-1)}

    def inferred(clock: _Clock, row: Row) -> list[str]:
        result = clock.timed(lambda: problem.infer(problem.rule_name))
        row |= {"status": result.status.name, "steps": result.num_steps}
        row["evidence"] = float(result.log_evidence.detach())
        return _broken_by(problem, result, clock) + _out_of_order(problem, result, clock)

    return _judged(row | {"dtype": str(problem.mean.dtype)}, inferred)


def judge_fit(problem: FitProblem) -> Row:
    """Return what became of a training, as of a problem."""
    row: Row = {"family": problem.family, "rule": problem.rule_name, "kind": problem.kind, "size": len(problem.x)}

    def trained(clock: _Clock, row: Row) -> list[str]:
        clock.start()
        result = problem.fit(lambda _step, _objective: clock.lap())
        clock.lap()
        row |= {"status": result.status.name, "steps": result.num_steps, "evidence": result.objective}
        broken = ["infinite"] if result.objective == torch.inf else []
        numbers = list(problem.mll.parameters())
        if result.status in _WITHOUT_POSTERIOR:
            broken.append("lost")
        else:
            with torch.no_grad():
                predicted = clock.timed(lambda: problem.mll.model.eval()(problem.x))
                numbers += [predicted.mean, predicted.variance, torch.tensor(result.objective, dtype=torch.float64)]
        finite = all(bool(each.isfinite().all()) for each in numbers)
        return broken if finite else [*broken, "converged_nan"]

    return _judged(row | {"dtype": str(problem.x.dtype)}, trained)


def _judged(row: Row, work: Callable[[_Clock, Row], list[str]]) -> Row:
    """Return the row of some work, with what it broke by itself, by what it raised and by how long it took."""
    broken: list[str] = []
    clock = _Clock()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", InferenceWarning)
        warnings.simplefilter("ignore", DenseBlocksWarning)
        warnings.simplefilter("ignore", QuadratureWarning)
        # So gpytorch calls a predictive variance that is less than the rounding of the kernel, and rightly.
        warnings.filterwarnings("ignore", "Negative variance values", NumericalWarning)
        try:
            broken += work(clock, row)
        except Warning as warning:
            broken.append("warning")
            row["error"] = f"{type(warning).__name__}: {warning}"[:300]
        except Exception as error:  # any is a finding: its place is written down
            broken.append("exception")
            place = traceback.extract_tb(error.__traceback__)[-1]
            own = [frame for frame in traceback.extract_tb(error.__traceback__) if "gpext" in frame.filename]
            at = own[-1] if own else place
            row["error"] = f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno}: {error}"[:300]
    row["seconds"] = clock.longest
    if clock.longest > _LONGEST:
        broken.append("slow")
    return row | {"broken": broken}


class _Clock:
    """The longest of several calls, in seconds."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.start()

    def timed(self, call: Any) -> Any:
        self.start()
        try:
            return call()
        finally:
            self.lap()

    def start(self) -> None:
        """Begin a call."""
        self._since = time.perf_counter()

    def lap(self) -> None:
        """End a call, and begin another."""
        now = time.perf_counter()
        self.longest, self._since = max(self.longest, now - self._since), now


def _broken_by(problem: Problem, result: Any, clock: _Clock) -> list[str]:
    evidence = result.log_evidence.detach()
    broken = ["infinite"] if bool((evidence == torch.inf).any()) else []
    if result.status not in _ENDED:
        broken.append("lost")
    clock.timed(lambda: result.log_loo)
    if problem.likelihood_has_one_latent:
        clock.timed(lambda: result.loo_tail)
    numbers = [evidence, result.posterior.mean, result.posterior.variance]
    if result.log_evidence.requires_grad:
        parameters = [problem.covariance, *(p for p in problem.likelihood.parameters() if p.requires_grad)]
        gradients = torch.autograd.grad(result.log_evidence, parameters, allow_unused=True)
        numbers += [gradient for gradient in gradients if gradient is not None]
    if result.status in _FOUND and not all(bool(each.isfinite().all()) for each in numbers):
        broken.append("converged_nan")
    return broken


def _out_of_order(problem: Problem, result: Any, clock: _Clock) -> list[str]:
    """Return whether CAVI <= KL <= exact is violated, where two of them are known and have converged."""
    if problem.rule_name not in ("kl", "cavi") or result.status not in _FOUND:
        return []
    values = {problem.rule_name: float(result.log_evidence.detach())}
    if "cavi" in FAMILIES[problem.family].rules:
        other = "kl" if problem.rule_name == "cavi" else "cavi"
        second = clock.timed(lambda: problem.infer(other))
        if second.status in _FOUND:
            values[other] = float(second.log_evidence.detach())
    if problem.rank_one:
        values["exact"] = exact_evidence(problem, result.posterior.mean[:1])
    if not all(map(math.isfinite, values.values())):
        return []  # said by its own name
    present = [values[name] for name in ("cavi", "kl", "exact") if name in values]
    slack = max(1e-6, _SLACK[problem.mean.dtype] * max(abs(value) for value in present))
    ordered = all(low <= high + slack for low, high in pairwise(present))
    return [] if ordered else [f"order {present}"]


def exact_evidence(problem: Problem, near: torch.Tensor) -> float:
    """Return log p(y) where all latent values are the same, by quadrature over it, with a knot near its mass (1,)."""
    mean, variance = problem.mean[:1].double(), problem.covariance.detach()[0, :1].double()
    y = problem.targets.unsqueeze(-1)

    def log_prob(f: torch.Tensor) -> torch.Tensor:
        return conditional_log_prob(problem.likelihood, y, f.unsqueeze(-2)).sum(-2)

    knots = torch.cat([problem.targets.double(), near.double()]).unsqueeze(-1)
    with torch.no_grad():
        return float(log_expectation(log_prob, mean, variance, knots=knots).sum())


# ---- the run and its tables ----------------------------------------------------------------------------------------


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Judge the problems that are missing."""
    for seed in range(options.first, options.first + options.count):
        ledger.get(f"problem {seed}", lambda seed=seed: judge(random_problem(seed)))  # type: ignore[misc]
    for seed in range(options.first, options.first + options.fits):
        ledger.get(f"fit {seed}", lambda seed=seed: judge_fit(random_fit(seed)))  # type: ignore[misc]


def report(ledger: Ledger) -> str:
    """Return counts by rule and by what was broken, and the problems behind them."""
    parts = [("problems", ledger.of("problem ")), ("trainings", ledger.of("fit "))]
    return "\n\n".join(_table(name, rows) for name, rows in parts if rows)


def _table(name: str, rows: list[Row]) -> str:
    lines = [f"{len(rows)} {name}; longest call {max(row['seconds'] for row in rows):.1f} s", ""]
    statuses = Counter((row["rule"], row.get("status", "none")) for row in rows)
    lines += [f"{rule:<10}{status:<24}{count:>6}" for (rule, status), count in sorted(statuses.items())]
    kinds = Counter(kind.split()[0] for row in rows for kind in row["broken"])
    lines += ["", *(f"{kind:<16}{count:>6}" for kind, count in kinds.most_common())]
    for row in rows:
        if row["broken"]:
            about = f"{row['family']}, {row['rule']}, n = {row['size']}, {row['dtype']}"
            how = f"{row.get('status')} in {row['seconds']:.1f} s"
            lines.append(f"{row['key']}: {', '.join(row['broken'])}: {about}: {how} {row.get('error', '')}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> Ledger:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="how many problems")
    parser.add_argument("--fits", type=int, default=0, help="how many trainings")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a hundred problems and ten trainings")
    parser.add_argument("--output", type=Path, help="rows as JSON lines; an interrupted run resumes")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick:
        options.count, options.fits = QUICK, QUICK_FITS
    return measure_and_report(options, run, report)


if __name__ == "__main__":
    main()
