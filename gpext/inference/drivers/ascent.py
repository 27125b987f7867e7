r"""Steps that raise psi(f) = log p(y | f) - (f - mu)' K^-1 (f - mu) / 2, along f and K^-1 (f - mu) together."""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.bounds import conditional_log_prob
from gpext.inference.expansion import Expansion
from gpext.inference.problem import Problem

ROUNDING = 1e-7  # of steps that no longer shrink; Newton's would be squared
UNSEEN = 1e4 * torch.finfo(torch.float64).eps  # of psi's terms, a rise that psi need not show
_SUFFICIENT = 1e-4  # of what the slope promises [Nocedal & Wright Sec. 3.1]
_CONVEX = 0.25  # of slope rate^2: psi no further below its tangent is far less concave than the quadratic, a half below
_QUADRATIC = 1e-5  # below this step, in posterior standard deviations, Newton needs no line search
_EPS = torch.finfo(torch.float64).eps


def height(problem: Problem, at: Expansion, f: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return psi (...) and the size of its terms, given the expansion at f and K^-1 (f - mu)."""
    energy = 0.5 * problem.inner(f - problem.mean, weights)
    return at.log_prob.sum(-1) - energy, 1 + at.log_prob.abs().sum(-1) + energy.abs()


def rise(
    problem: Problem,
    start: tuple[Tensor, Tensor],
    direction: tuple[Tensor, Tensor],
    psi: Tensor,
    size: Tensor,
    slope: Tensor,
    length: Tensor,
    rate: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """Return f and K^-1 (f - mu) a step further, halved until psi rises; None where no step is long enough to show it.

    A direction leads to the top of a quadratic. Where psi turns out to be far less concave, as near a saddle, the step
    is doubled while psi rises.

    Args:
        problem: prior, likelihood and targets.
        start: f and K^-1 (f - mu).
        direction: in which they move.
        psi: at the start (...).
        size: of its terms.
        slope: of psi along the direction.
        length: of the direction, in posterior standard deviations.
        rate: the first share of the direction that is tried.
    """

    def moved(rate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return f, K^-1 (f - mu) and psi."""
        step = problem.per_value(rate)
        f, weights = (a + step * d for a, d in zip(start, direction, strict=True))
        log_p = conditional_log_prob(problem.likelihood, problem.targets, f).sum(-1)
        return f, weights, log_p - 0.5 * problem.inner(f - problem.mean, weights)

    surely = (slope < UNSEEN * size) | (length < _QUADRATIC)
    while True:
        f, weights, higher = moved(rate)
        risen = (higher >= psi + _SUFFICIENT * rate * slope) | surely
        if bool(risen.all()):
            break
        if bool((~risen & ~(rate * slope > _EPS * size)).any()):
            return None
        rate = torch.where(risen, rate, rate / 2)
    longer = (higher - psi > (1 - _CONVEX * rate) * rate * slope) & ~surely
    while bool(longer.any()):
        rate = 2 * rate
        further, its_weights, value = moved(rate)
        longer &= value > higher
        kept = problem.per_value(longer)
        f, weights = torch.where(kept, further, f), torch.where(kept, its_weights, weights)
        higher = torch.where(longer, value, higher)
    return f, weights
