r"""Newton's method on the equations of EP near a solution, in its cavities (see :mod:`~.ep_internals.cavities`).

Cavities of a result at other hyperparameters are such a place, where its sites are often not even proper: a datum's own
site has much of the old prior in it. Derivatives, four times the cost of an evaluation, are taken anew only where a
step with the last ones has not brought the residuals down by much.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from gpext.inference.ep_internals.cavities import Path, Point, differentiate, evaluate
from gpext.inference.problem import Problem
from gpext.posteriors import JointPosterior, Posterior
from gpext.sites import GaussianSites

_FAST = 0.3  # of the residuals, left by a step after which the derivatives still serve
_MOST_HALVINGS = 2
_LONGEST = 10.0  # step, in standard deviations and factors of e
_STEADY = 1e-3  # of the tolerance, at least: what is small here is larger in the sites by 1 / (r v^)


def cavities_of(posterior: Posterior | JointPosterior, power: float) -> GaussianSites | None:
    """Return b and r of the cavities (N,) at some power, if all are proper."""
    if isinstance(posterior, JointPosterior) or posterior.mean.dim() > 1:
        return None
    rest = 1 - power + power * posterior.cavity_share  # r v
    precision = rest / posterior.variance
    shift = precision * posterior.mean - power * posterior.weights
    proper = (precision > 0) & precision.isfinite() & shift.isfinite()
    return GaussianSites(shift, precision) if bool(posterior.positive_definite & proper.all()) else None


@torch.no_grad()
def newton(
    problem: Problem, path: Path, cavity: GaussianSites, *, max_evaluations: int, tolerance: float
) -> tuple[Point | None, list[Tensor], int]:
    """Return the solution at t = 1 next to some cavities or None, log Z at each evaluation, and how many derivatives.

    Args:
        problem: prior, likelihood and targets of one posterior.
        path: the tilted distributions and the power at t = 1.
        cavity: b and r (N,).
        max_evaluations: most factorisations.
        tolerance: of the residuals of the sites.
    """
    here = evaluate(problem, path, 1.0, cavity)
    trace, taken = [here.value], 0
    steps: list[Tensor] = []
    solve = None
    while here.size < torch.inf:
        if here.size < 0.5 * tolerance * max(here.least_share, _STEADY):
            return here, trace, taken
        fresh = solve is None
        if solve is None:
            solve, origin, steps, taken = _inverse(here), here, [], taken + 1
        step = broyden_updated(solve(here.residual), steps)
        if not float(step.norm()) < _LONGEST:  # nan as well
            break
        ahead, halvings = here, 0
        while not ahead.size < here.size and halvings <= (_MOST_HALVINGS if fresh else 0):
            if len(trace) >= max_evaluations:
                return None, trace, taken
            ahead = evaluate(problem, path, 1.0, origin.moved(here.cavity, step / 2**halvings))
            trace.append(ahead.value)
            halvings += 1
        if ahead.size < here.size:
            steps.append(step)
            if halvings > 1 or ahead.size > _FAST * here.size:
                solve = None
            here = ahead
        elif fresh:
            break
        else:
            solve = None
    return None, trace, taken


def _inverse(point: Point) -> Callable[[Tensor], Tensor]:
    """Return the rule from residuals (2N,) to Newton's step at fixed t, its derivatives those at a point."""
    none = torch.zeros_like(point.residual[:1])
    across = differentiate(point).across(torch.cat([torch.zeros_like(point.residual), none + 1]))
    return lambda residual: across(torch.cat([-residual, none]).unsqueeze(0)).squeeze(0)[:-1]


def broyden_updated(step: Tensor, steps: list[Tensor]) -> Tensor:
    """Return a step by what the steps before have taught of the derivatives [Broyden 1965; Kelley 1995, Sec. 7.3]."""
    for before, after in pairwise(steps):
        step = step + after * (before @ step) / before.square().sum()
    return step / (1 - (steps[-1] @ step) / steps[-1].square().sum()) if steps else step
