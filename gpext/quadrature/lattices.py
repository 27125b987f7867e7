r"""Nested lattices in a ball, to integrate smooth functions of up to three variables that fall off like a Gaussian.

By Poisson's summation the error of a rule that gives the points of a lattice equal weights is the Fourier transform of
the integrand summed over the dual lattice, without its origin: it falls geometrically with the shortest dual vector,
if the integrand is analytic in a strip, and faster for a Gaussian. The lattices here are nested,

    h Z^D,    with the centres of its cells,    (h/2) Z^D,    with the centres of its cells,    ...

so that no point is used twice. Each has a shortest dual vector sqrt(2) times that of the one before (twice, if D = 1):
what two successive rules differ by, to the power sqrt(2), is the error of the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_STEP, _REACH = 1.5, 8.0  # h and the radius of the first ball, in standard deviations
_FURTHER = 1.4  # radius of the next ball, of this one's
_SHELL = 0.9  # of the radius, from where on there should be
_LITTLE = 1e-10  # of the integral
_MOST_POINTS = (2**12, 2**16, 2**17)  # of one, two and three variables

MOST_VARIABLES = len(_MOST_POINTS)


@dataclass(frozen=True)
class LatticeRule:
    """Points of equal weights and what they make of an integral."""

    points: Tensor  # (Q, D)
    log_weight: float
    value: Tensor
    error: float  # relative to one or the value, whichever is larger


def integrate_on_lattices(
    total: Callable[[Tensor], Tensor], variables: int, *, logarithm: bool, tolerance: float, device: torch.device
) -> LatticeRule:
    """Return a rule whose error is below the tolerance, or the best with as many points as are allowed.

    Args:
        total: the sum of the integrand over points (Q, D), or its logarithm; any shape.
        variables: D, at most `MOST_VARIABLES`.
        logarithm: whether it is the logarithm; the value then is that of the integral.
        tolerance: of the error.
        device: of the points.
    """
    add = torch.logaddexp if logarithm else torch.add
    most = _MOST_POINTS[variables - 1]
    reach = _REACH
    while True:
        sets = _sets(variables, reach)
        points, log_weight = next(sets)
        outer = points.norm(dim=-1) > _SHELL * reach
        shell = total(points[outer].to(device))
        running = add(total(points[~outer].to(device)), shell)
        value = _weighted(running, log_weight, logarithm)
        lost = (shell - running).exp() if logarithm else _relative(_weighted(shell, log_weight, False), value)
        beyond = float(lost.max())
        if beyond <= _LITTLE or len(points) * _FURTHER**variables > most:
            break
        reach *= _FURTHER
    used, change = [points], torch.ones_like(value)
    while True:
        points, log_weight = next(sets)
        running = add(running, total(points.to(device)))
        used.append(points)
        before, value = value, _weighted(running, log_weight, logarithm)
        last, change = change, _relative(value - before, value)
        error = float(torch.maximum(change ** math.sqrt(2), last.square()).max())
        if error <= tolerance or 2 * sum(map(len, used)) > most:
            break
    error = max(error, beyond if beyond > _LITTLE else 0.0)
    return LatticeRule(torch.cat(used).to(device), log_weight, value, error)


def _weighted(total: Tensor, log_weight: float, logarithm: bool) -> Tensor:
    return total + log_weight if logarithm else total * math.exp(log_weight)


def _relative(difference: Tensor, value: Tensor) -> Tensor:
    return difference.abs() / (1 + value.abs())


def _sets(variables: int, reach: float) -> Iterator[tuple[Tensor, float]]:
    """Yield the points that each lattice has beyond those before it, and the log weight of all of them together."""
    step, log_cell = _STEP, variables * math.log(_STEP)
    yield _shifted(variables, step, reach, 0), log_cell
    while True:
        yield _shifted(variables, step, reach, variables), log_cell - math.log(2)
        log_cell -= variables * math.log(2)
        if variables > 1:
            between = [_shifted(variables, step, reach, halves) for halves in range(1, variables)]
            yield torch.cat(between), log_cell
        step /= 2


@lru_cache(maxsize=64)
def _shifted(variables: int, step: float, reach: float, halves: int) -> Tensor:
    """Return the points h (k + s) in the ball, of all integers k and all shifts s by 1/2 in so many directions."""
    half = math.ceil(reach / step) + 1
    line = torch.arange(-half, half, dtype=torch.float64)
    grid = torch.cartesian_prod(*[line] * variables).view(-1, variables)
    shifts = torch.cartesian_prod(*[torch.tensor([0.0, 0.5], dtype=torch.float64)] * variables).view(-1, variables)
    shifts = shifts[shifts.sum(-1) == halves / 2]
    points = step * (grid + shifts.unsqueeze(1)).flatten(0, 1)
    return points[points.norm(dim=-1) <= reach]
