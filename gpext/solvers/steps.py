r"""The steps of conjugate gradients, for several right-hand sides at once [Hestenes & Stiefel 1952].

    z = P^-1 r,   p = z + (r'z / r'z before) p,   increment a p and residual r - a A p,   a = r'z / p'A p

The solution is the sum of the increments; the caller decides where to stop and what to do with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


class SolveStatus(Enum):
    """The outcome of a solve, and what to do about it.

    Example:
        >>> SolveStatus.CONVERGED.name
        'CONVERGED'
    """

    CONVERGED = "converged"
    MAX_STEPS = "stopped: raise max_steps or the noise, or take a preconditioner"
    STALLED = "rounding keeps the residual from falling further: raise the noise, or work in float64"
    NOT_POSITIVE_DEFINITE = (
        "the matrix or the preconditioner is not positive definite: raise the noise, or work in float64"
    )
    NOT_FINITE = "met numbers that are not finite: look for them among inputs and parameters"


@dataclass(frozen=True)
class Step:
    """One step, column by column. Products with P^-1 for the next step are lazy: the last step needs none."""

    increment: Tensor  # of the solution (..., n, R)
    residual: Tensor  # by recursion (..., n, R)
    is_broken: Tensor  # whether p'A p or r'P^-1 r is not positive (..., R)
    precondition: Product | None

    @cached_property
    def z(self) -> Tensor:
        """P^-1 r of that residual (..., n, R)."""
        return self.residual if self.precondition is None else self.precondition(self.residual)

    @cached_property
    def rz(self) -> Tensor:
        """r'P^-1 r of that residual (..., R)."""
        return (self.residual * self.z).sum(-2)


def cg_steps(matvec: Product, residual: Tensor, precondition: Product | None) -> Iterator[Step]:
    """Yield steps without end; a column that has broken down or converged has increments of zero.

    Args:
        matvec: v -> A v, for (..., n, R).
        residual: b - A x0 (..., n, R).
        precondition: r -> P^-1 r, or None.
    """
    r = residual
    z = r if precondition is None else precondition(r)
    p, rz = z, (r * z).sum(-2)
    is_broken = rz < 0
    while True:
        q = matvec(p)
        curvature = (p * q).sum(-2)
        live = (rz > 0) & ~is_broken
        is_broken = is_broken | (live & ~(curvature > 0))
        a = torch.where(live & ~is_broken, rz / curvature, 0.0).unsqueeze(-2)
        r = r - a * q
        step = Step(a * p, r, is_broken, precondition)
        yield step
        before, rz = rz, step.rz
        is_broken = is_broken | (rz < 0)
        p = step.z + torch.where(before > 0, rz / before, 0.0).unsqueeze(-2) * p
