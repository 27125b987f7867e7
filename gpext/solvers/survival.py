r"""Laws of where a sum is cut at random: P_j = P(J >= j), the probability that increment j is reached.

    E[sum_{j <= J} d_j / P_j] = sum_j d_j    for any P_j > 0 fixed before the draw    [FE15 Sec. 4.2, Rhee & Glynn 2015]

The variance is small where P_j falls as fast as |d_j|; where it falls faster, the terms that are never reached carry
what is missing, and no number of draws shows it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Survival(ABC):
    """P_j for j = 0, 1, ..., with P_0 = 1."""

    @abstractmethod
    def log_probability(self, j: int) -> float:
        """Return log P_j."""

    @abstractmethod
    def draw(self, shape: torch.Size, generator: torch.Generator | None = None) -> Tensor:
        """Return independent draws of J, the last increment that is reached, int64."""

    def expected_steps(self) -> float:
        """Return E[J + 1], how many increments a draw takes on average."""
        total, j = 0.0, 0
        while (p := math.exp(self.log_probability(j))) > 1e-16 and j < 10**6:
            total, j = total + p, j + 1
        return total


@dataclass(frozen=True)
class Geometric(Survival):
    """P_j = exp(-rate j).

    Args:
        rate: positive.

    Raises:
        ValueError: it is not.
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be positive and finite; got {self.rate}.")

    @classmethod
    def of_cost(cls, steps: float) -> Geometric:
        """Return the one that takes so many steps on average, more than one."""
        if not 1 < steps < math.inf:
            raise ValueError(f"the expected number of steps must be more than one and finite; got {steps}.")
        return cls(-math.log1p(-1 / steps))

    def log_probability(self, j: int) -> float:
        """Return log P_j."""
        return -self.rate * j

    def draw(self, shape: torch.Size, generator: torch.Generator | None = None) -> Tensor:
        """Return independent draws of J."""
        uniform = 1 - torch.rand(shape, dtype=torch.float64, generator=generator)
        return (-uniform.log() / self.rate).long()


@dataclass(frozen=True)
class Ulisse(Survival):
    """The published schedule: weights w_r = exp(beta r), P_j = prod_{r <= j} 1 / w_r [FE15 Alg. 2].

    At beta = 1 P_j falls like exp(-j^2 / 2): the tail is never sampled, and the estimate is off in practice.

    Args:
        beta: positive.

    Raises:
        ValueError: it is not.
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta must be positive and finite; got {self.beta}.")

    def log_probability(self, j: int) -> float:
        """Return log P_j."""
        return -0.5 * self.beta * j * (j + 1)

    def draw(self, shape: torch.Size, generator: torch.Generator | None = None) -> Tensor:
        """Return independent draws of J: the largest j with P_j above a uniform number."""
        level = -(1 - torch.rand(shape, dtype=torch.float64, generator=generator)).log()
        return (0.5 * ((1 + 8 * level / self.beta).sqrt() - 1)).long()


@dataclass(frozen=True)
class NoSurvival(Survival):
    """The sum ends where the random part would begin: early stopping, whose bias this is to show."""

    def log_probability(self, j: int) -> float:
        """Return log P_j."""
        return 0.0 if j == 0 else -math.inf

    def draw(self, shape: torch.Size, generator: torch.Generator | None = None) -> Tensor:
        """Return zeros."""
        return torch.zeros(shape, dtype=torch.int64)
