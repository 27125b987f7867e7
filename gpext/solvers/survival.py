r"""Laws of the random truncation of a sum: P_j = P(J >= j), the probability that increment j is reached.

    E[sum_{j <= J} d_j / P_j] = sum_j d_j    for any P_j > 0 fixed before the draw    [FE15 Sec. 4.2, Rhee & Glynn 2015]

P_j may depend on the run before increment j: given the system that is no more random than the increments. The
increments d_j of conjugate gradients are conjugate, and the remainder of x after them falls; so in the norm of A, or in
any other in which it falls, with R_j = sum_{k >= j} d_k,

    E|x~ - x|_A^2 = sum_j |d_j|_A^2 (1 / P_j - 1),    E|x~ - x|^2 = sum_j (|R_j|^2 - |R_{j+1}|^2) / P_j - |R_0|^2,

smallest, for a given sum of the P_j, where P_j falls as |d_j| or as the remainder. Where P_j falls faster, the terms
that are never reached carry the missing part, and no number of draws shows it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Survival(ABC):
    """P_j for j = 0, 1, ..., with P_0 = 1, never rising.

    Example:
        >>> import torch
        >>> class Half(Survival):
        ...     def log_probability(self, j, fall):
        ...         return fall.new_full(fall.shape, -j).mul(0.6931)  # each increment is as likely as not
        >>> Half().log_probability(2, torch.ones(1)).exp()
        tensor([0.2500])
    """

    @abstractmethod
    def log_probability(self, j: int, fall: Tensor) -> Tensor:
        """Return log P_j of each column (..., R).

        Args:
            j: from 0 on.
            fall: the smallest residual in the Krylov space before increment j, over that where the random part began
                (..., R); from 1 down.
        """


@dataclass(frozen=True)
class Matched(Survival):
    """P_j = max(fall^power, exp(-steepest j)), by the fall of the smallest residual in the Krylov space, MINRES's.

    Nothing has to be known or fitted. A power of 1 suits the solution itself. Derivatives of y' A^-1 y and log|A| are
    nearer to their limits than the solution is to its own, so that they allow more: beyond 4/3 fourth moments, and from
    2 on variances, would come from increments that are almost never reached. Where a good preconditioner leaves a few
    steps, `steepest` costs two more at most, and every entry of a solution has its share of the draws.

    Args:
        power: positive.
        steepest: rate, positive.

    Raises:
        ValueError: one is not.

    Example:
        >>> import torch
        >>> from gpext.solvers import estimator_diagnostics
        >>> A = torch.diag(torch.linspace(1, 9, 9).double())
        >>> report = estimator_diagnostics(lambda v: A @ v, torch.ones(9, 1).double(), survival=Matched())
        >>> bool(report.bias.abs().max() < 1e-8)
        True
    """

    power: float = 1.25
    steepest: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("power", self.power)
        _check_positive("steepest", self.steepest)

    def log_probability(self, j: int, fall: Tensor) -> Tensor:
        """Return log P_j (..., R)."""
        return (self.power * fall.log()).clamp_min(-self.steepest * j)


@dataclass(frozen=True)
class Geometric(Survival):
    """P_j = exp(-rate j).

    Args:
        rate: positive.

    Raises:
        ValueError: it is not.

    Example:
        >>> import torch
        >>> from gpext.solvers import unbiased_cg
        >>> A, draw = torch.diag(torch.linspace(1, 9, 9).double()), torch.Generator().manual_seed(0)
        >>> solve = unbiased_cg(lambda v: A @ v, torch.ones(9, 1).double(), survival=Geometric(0.1), generator=draw)
        >>> solve.solution.shape
        torch.Size([9, 1])
    """

    rate: float

    def __post_init__(self) -> None:
        _check_positive("rate", self.rate)

    @classmethod
    def of_cost(cls, steps: float) -> Geometric:
        """Return the law that reaches this many increments on average, more than one."""
        if not 1 < steps < math.inf:
            raise ValueError(f"the expected number of steps must be more than one and finite; got {steps}.")
        return cls(-math.log1p(-1 / steps))

    def log_probability(self, j: int, fall: Tensor) -> Tensor:
        """Return log P_j (..., R)."""
        return torch.full_like(fall, -self.rate * j)


@dataclass(frozen=True)
class Ulisse(Survival):
    """The published schedule: weights w_r = exp(beta r), P_j = prod_{r <= j} 1 / w_r [FE15 Alg. 2].

    At beta = 1 P_j falls like exp(-j^2 / 2): the tail is never sampled, and the estimate is off in practice.

    Args:
        beta: positive.

    Raises:
        ValueError: it is not.

    Example:
        >>> import torch
        >>> from gpext.solvers import estimator_diagnostics
        >>> A = torch.diag(torch.linspace(1, 9, 9).double())
        >>> report = estimator_diagnostics(lambda v: A @ v, torch.ones(9, 1).double(), survival=Ulisse())
        >>> bool(report.bias.abs().max() < 1e-8)
        True
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("beta", self.beta)

    def log_probability(self, j: int, fall: Tensor) -> Tensor:
        """Return log P_j (..., R)."""
        return torch.full_like(fall, -0.5 * self.beta * j * (j + 1))


@dataclass(frozen=True)
class NoSurvival(Survival):
    """The sum ends where the random part would begin: early stopping, included to show its bias.

    Example:
        >>> import torch
        >>> from gpext.solvers import estimator_diagnostics
        >>> A = torch.diag(torch.linspace(1, 9, 9).double())
        >>> report = estimator_diagnostics(lambda v: A @ v, torch.ones(9, 1).double(), survival=NoSurvival())
        >>> bool(report.bias.abs().max() < 1e-8)
        False
    """

    def log_probability(self, j: int, fall: Tensor) -> Tensor:
        """Return log P_j (..., R)."""
        return torch.full_like(fall, 0.0 if j == 0 else -math.inf)


def law_of(survival: Survival | None) -> Survival:
    """Return the law, Matched() for None.

    Raises:
        TypeError: it is not a law.
    """
    if not isinstance(survival, Survival | None):
        raise TypeError(f"survival must be a law such as gpext.solvers.Matched() or Geometric(0.5); got {survival!r}.")
    return Matched() if survival is None else survival


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite; got {value}.")
