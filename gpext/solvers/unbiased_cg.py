r"""Estimates of A^-1 b from few steps of conjugate gradients, unbiased by a random end [FE15 Sec. 4.2].

    x~ = x0 + sum_{t < l} d_t + sum_{j = 0}^J d_{l + j} / P_j,       J random, P(J >= j) = P_j

with the increments d_t of CG from x0. Its first l steps are always taken, until the residual has fallen to a given
size. From there P_j falls by default with the smallest residual in the Krylov space; that depends on A, b and x0 and
not on J, so the mean is that of the whole run. Truncations are independent for each of several estimates, which share
the products of one run: two of them are independent given the increments, so that E[x~1' B x~2] = x' B x. They are
independent for each column as well, or shared by all columns of an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpext.solvers.conjugate_gradients import LinearSolve, check_system
from gpext.solvers.steps import Product, SolveStatus, Step, cg_steps
from gpext.solvers.survival import Survival, law_of

_DIGITS = 30  # times rounding times |b|: the residual at which a run has ended, and only rounding is left


@dataclass(frozen=True)
class UnbiasedSolve(LinearSolve):
    """Estimates of a solution and how they were made.

    `solution` is the mean of the estimates, unbiased as they are; `residual_norm` is, by its recursion, that of the run
    where it ended, not that of an estimate; single estimates are far from the solution.

    Example:
        >>> import torch
        >>> from gpext.solvers import unbiased_cg
        >>> A, draw = torch.diag(torch.linspace(1, 9, 9).double()), torch.Generator().manual_seed(0)
        >>> solve = unbiased_cg(lambda v: A @ v, torch.ones(9, 1).double(), num_estimates=2, generator=draw)
        >>> solve.estimates.shape
        torch.Size([2, 9, 1])
    """

    estimates: Tensor  # (E, ..., n, R) or (E, n)
    first_steps: int  # l, products with A that are taken anyway
    truncations: Tensor  # J (E, ..., R) or (E,)
    survival: Survival


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
    share_columns: bool = False,
    max_steps: int | None = None,
    generator: torch.Generator | None = None,
) -> UnbiasedSolve:
    """Return independent unbiased estimates of A^-1 b.

    Args:
        matvec: v -> A v for (..., n, R); A symmetric positive definite.
        b: (n,) or (..., n, R).
        num_estimates: E, with independent truncations.
        start: x0, of the shape of b, independent of the draws; zero by default.
        precondition: r -> P^-1 r.
        tolerance: the random part begins where |b - A x| <= tolerance |b| in every column [FE15's alpha = q sqrt n is
            that of a b of n standard normal numbers and tolerance q].
        survival: P_j; by default :class:`gpext.solvers.Matched`.
        share_columns: whether the columns of an estimate end together, with the P_j of the slowest. A run lasts until
            its last column has ended, so that this saves products; but x~_a' B x~_b of two columns a and b of one
            estimate is biased then.
        max_steps: maximum number of products, beyond which the estimate is not unbiased, as the status then states;
            10 n by default.
        generator: for the truncations, on the CPU.

    Raises:
        TypeError: b is not of a floating type, matvec is not a function, or survival not a law.
        ValueError: bad right-hand sides or starts, a negative tolerance or max_steps, or no estimate.

    Example:
        >>> import torch
        >>> A = torch.diag(torch.linspace(1, 9, 9).double())
        >>> solve = unbiased_cg(lambda v: A @ v, torch.ones(9, 1).double(), generator=torch.Generator().manual_seed(0))
        >>> solve.solution.shape, solve.status.name
        (torch.Size([9, 1]), 'CONVERGED')
    """
    if b.dim() == 1:
        found = unbiased_cg(
            matvec,
            b.unsqueeze(-1),
            num_estimates=num_estimates,
            start=None if start is None else start.unsqueeze(-1),
            precondition=precondition,
            tolerance=tolerance,
            survival=survival,
            max_steps=max_steps,
            generator=generator,
        )
        return replace(
            found,
            solution=found.solution.squeeze(-1),
            residual_norm=found.residual_norm.squeeze(-1),
            estimates=found.estimates.squeeze(-1),
            truncations=found.truncations.squeeze(-1),
        )
    if num_estimates < 1:
        raise ValueError(f"num_estimates must be at least 1; got {num_estimates}.")
    law = law_of(survival)
    run = Run(matvec, b, start=start, precondition=precondition, tolerance=tolerance, max_steps=max_steps)
    head = run.first_steps()
    first = run.steps
    levels = _levels(truncation_shape(b, num_estimates, share_columns), generator).to(b.device)
    estimates = head.expand(num_estimates, *head.shape).clone()
    reached, truncations, j = torch.ones_like(levels, dtype=torch.bool), torch.zeros_like(levels).long(), 0
    while True:
        log_p = log_survival(law, j, run.fall, share_columns)
        reached = reached & (levels >= -log_p)
        if not run.goes_on or not bool(reached.any()):
            break
        increment = run.step().increment  # d_{l + j}
        estimates += torch.where(reached.unsqueeze(-2), increment * (-log_p).exp().unsqueeze(-2), 0.0)
        truncations = torch.where(reached, j, truncations)
        j += 1
    truncations = truncations.expand(num_estimates, *b.shape[:-2], b.size(-1))
    status = run.status(bool(reached.any()))
    return UnbiasedSolve(estimates.mean(0), run.steps, run.left, status, estimates, first, truncations, law)


def truncation_shape(b: Tensor, num_estimates: int, share_columns: bool) -> torch.Size:
    """Return the shape of independent truncations, (E, ..., R) or (E, ..., 1)."""
    return torch.Size((num_estimates, *b.shape[:-2], 1 if share_columns else b.size(-1)))


def log_survival(law: Survival, j: int, fall: Tensor, share_columns: bool) -> Tensor:
    """Return log P_j (..., R), or (..., 1) for all columns together."""
    log_p = law.log_probability(j, fall)
    return log_p.amax(-1, keepdim=True) if share_columns and log_p.size(-1) else log_p


def _levels(shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    """Return -log u with u uniform: increment j is reached where it is -log P_j or more."""
    return -(1 - torch.rand(shape, dtype=torch.float64, generator=generator, device="cpu")).log()


class Run:
    """Counted steps of conjugate gradients, until only rounding is left.

    Args:
        matvec, b, start, precondition, tolerance, max_steps: as for :func:`unbiased_cg`.
    """

    def __init__(
        self,
        matvec: Product,
        b: Tensor,
        *,
        start: Tensor | None,
        precondition: Product | None,
        tolerance: float,
        max_steps: int | None,
    ) -> None:
        self._start = torch.zeros_like(b) if start is None else start
        check_system(matvec, b, self._start, tolerance, max_steps)
        self._residual = b if start is None else b - matvec(start)
        self._size = b.norm(dim=-2).clamp_min(torch.finfo(b.dtype).tiny)
        self._most = 10 * b.size(-2) if max_steps is None else max_steps
        self._steps = cg_steps(matvec, self._residual, precondition)
        z = self._residual if precondition is None else precondition(self._residual)
        self._first = (self._residual * z).sum(-2)
        self._smallest = self._inverse = torch.ones_like(self._first)
        self._is_broken = torch.zeros_like(self._first, dtype=torch.bool)
        self._tolerance = tolerance
        self.steps = 0

    @property
    def goes_on(self) -> bool:
        """Whether another step changes the solution, and is allowed."""
        return self.steps < self._most and not self._is_over

    @property
    def left(self) -> Tensor:
        """The residual over that of b (..., R)."""
        return self._residual.norm(dim=-2) / self._size

    @property
    def _is_over(self) -> bool:
        left = self.left
        digits = _DIGITS * torch.finfo(left.dtype).eps
        return bool(((left <= digits) | self._is_broken | ~left.isfinite()).all())

    def first_steps(self) -> Tensor:
        """Step until every residual meets the tolerance; return the iterate (..., n, R), from which `fall` counts."""
        x = self._start
        while self.goes_on and bool((self.left > self._tolerance).any()):
            x = x + self.step().increment
        self._smallest = self._inverse
        return x

    @property
    def fall(self) -> Tensor:
        """The smallest residual in the Krylov space over its value after the first steps (..., R).

        rho_t^-2 = sum_{i <= t} 1 / (r_i' P^-1 r_i), in the norm of P^-1 [Zhou & Walker 1994]
        """
        return torch.where(self._inverse.isfinite(), (self._smallest / self._inverse).sqrt(), 0.0)

    def step(self) -> Step:
        """Take a step."""
        step = next(self._steps)
        self._residual, self._is_broken = step.residual, step.is_broken
        self._inverse = self._inverse + torch.where(step.rz > 0, self._first / step.rz, torch.inf)
        self.steps += 1
        return step

    def status(self, is_cut: bool) -> SolveStatus:
        """Return how the run ended; `is_cut`: before the last increment that was needed."""
        if not bool(self._residual.isfinite().all()):
            return SolveStatus.NOT_FINITE
        if bool(self._is_broken.any()):
            return SolveStatus.NOT_POSITIVE_DEFINITE
        return SolveStatus.MAX_STEPS if is_cut and not self._is_over else SolveStatus.CONVERGED
