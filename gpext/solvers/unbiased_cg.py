r"""Estimates of A^-1 b from few steps of conjugate gradients, unbiased by a random end [FE15 Sec. 4.2].

    x~ = x0 + sum_{t < l} d_t + sum_{j = 0}^J d_{l + j} / P_j,       J random, P(J >= j) = P_j

with the increments d_t of CG from x0. Its first l steps are taken anyway: until the residual has fallen to a given
size. The default P_j falls as fast as the increments seemed to do until then; as that is decided before J is drawn, the
mean is that of the whole run. Truncations are independent for each column, and for each of several estimates, which
share the products of one run: two of them are independent given the increments, so that E[x~1' B x~2] = x' B x.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.solvers.conjugate_gradients import check_system
from gpext.solvers.steps import Product, SolveStatus, Step, cg_steps
from gpext.solvers.survival import Geometric, Survival

_DIGITS = 30  # products of rounding with |b| at which a run has ended: what is left is no more than rounding
_SLOWEST, _STEEPEST = 0.002, 1.0  # rates of the default schedule


@dataclass(frozen=True)
class UnbiasedSolve:
    """Estimates of a solution and how they were made."""

    estimates: Tensor  # (E, ..., n, R)
    num_steps: int  # products with A
    first_steps: int  # l, those taken anyway
    truncations: Tensor  # J (E, ..., R)
    survival: Survival
    status: SolveStatus


@torch.no_grad()
def unbiased_cg(
    matvec: Product,
    b: Tensor,
    *,
    num_estimates: int = 1,
    start: Tensor | None = None,
    precondition: Product | None = None,
    tolerance: float = 0.1,
    survival: Survival | None = None,
    max_steps: int | None = None,
    generator: torch.Generator | None = None,
) -> UnbiasedSolve:
    """Return independent unbiased estimates of A^-1 b.

    Args:
        matvec: v -> A v for (..., n, R); A symmetric positive definite.
        b: (..., n, R).
        num_estimates: E, with truncations of their own.
        start: x0, of the shape of b, independent of the draws; zero by default.
        precondition: r -> P^-1 r.
        tolerance: the random part begins where |b - A x| <= tolerance |b| in every column [FE15's alpha = q sqrt n is
            that of a b of n standard normal numbers and tolerance q].
        survival: P_j; by default geometric with the rate at which the residual fell before.
        max_steps: most products, beyond which the estimate is not unbiased, and the status says so; 10 n by default.
        generator: for the truncations, on the CPU.

    Raises:
        ValueError: bad right-hand sides or starts, or no estimate.
    """
    x0 = torch.zeros_like(b) if start is None else start
    check_system(b, x0)
    if num_estimates < 1:
        raise ValueError(f"num_estimates must be at least 1; got {num_estimates}.")
    most = 10 * b.size(-2) if max_steps is None else max_steps
    residual = b if start is None else b - matvec(x0)
    size = b.norm(dim=-2).clamp_min(torch.finfo(b.dtype).tiny)
    run = _Run(cg_steps(matvec, residual, precondition), size, most)
    head, norms = x0, [residual.norm(dim=-2) / size]
    while run.goes_on and bool((norms[-1] > tolerance).any()):
        step = run.step()
        head = head + step.increment
        norms.append(step.residual.norm(dim=-2) / size)
    first = run.steps
    law = decaying(torch.stack(norms)) if survival is None else survival
    last = law.draw(torch.Size((num_estimates, *size.shape)), generator).to(b.device)
    estimates, j = head.expand(num_estimates, *head.shape).clone(), 0
    while run.goes_on and bool((last >= j).any()):
        increment = run.step().increment
        reached = (last >= j).unsqueeze(-2)
        estimates += torch.where(reached, increment * math.exp(-law.log_probability(j)), 0.0)
        j += 1
    return UnbiasedSolve(estimates, run.steps, first, last, law, run.status(bool((last >= j).any())))


class _Run:
    """Steps counted, until nothing but rounding is left."""

    def __init__(self, steps: Iterator[Step], size: Tensor, most: int) -> None:
        self._steps, self._size, self._most = steps, size, most
        self.steps = 0
        self._last: Step | None = None

    @property
    def goes_on(self) -> bool:
        """Whether another step changes the solution, and is allowed."""
        return self.steps < self._most and not self._is_over

    @property
    def _is_over(self) -> bool:
        if self._last is None:
            return False
        left = self._last.residual.norm(dim=-2)
        eps = torch.finfo(left.dtype).eps
        return bool(((left <= _DIGITS * eps * self._size) | self._last.is_broken | ~left.isfinite()).all())

    def step(self) -> Step:
        step = self._last = next(self._steps)
        self.steps += 1
        return step

    def status(self, is_cut: bool) -> SolveStatus:
        """Return how it ended; `is_cut`: before the last increment that was asked for."""
        if self._last is not None and not bool(self._last.residual.isfinite().all()):
            return SolveStatus.NOT_FINITE
        if self._last is not None and bool(self._last.is_broken.any()):
            return SolveStatus.NOT_POSITIVE_DEFINITE
        return SolveStatus.MAX_STEPS if is_cut and not self._is_over else SolveStatus.CONVERGED


def decaying(norms: Tensor) -> Geometric:
    """Return the geometric survival with the slowest rate at which a column's residual fell lately, norms (T, ..., R).

    The slope of log |r| over the last half of the steps, by least squares.
    """
    recent = norms[len(norms) // 2 :].clamp_min(torch.finfo(norms.dtype).tiny).log().flatten(1)
    if len(recent) < 3:
        return Geometric(_STEEPEST)
    t = torch.arange(len(recent), dtype=recent.dtype, device=recent.device)
    t = (t - t.mean()).unsqueeze(-1)
    slopes = (t * recent).sum(0) / t.square().sum()
    return Geometric(min(max(float(-slopes.max()), _SLOWEST), _STEEPEST))
