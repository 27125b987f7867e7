"""The systems of :mod:`benchmarks.unbiased_cg`, dense: K + noise I of Concrete, right-hand sides, exact gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.datasets import load
from gpext.solvers import LowRankPreconditioner, partial_cholesky

LENGTHSCALE = 2.0


@dataclass(frozen=True)
class Problem:
    """k = exp(-|x - x'|^2 / (2 l^2)) + noise on standardised data; derivatives in log s, log l and log noise."""

    x: Tensor  # (n, d)
    y: Tensor  # (n,)
    noise: float

    @classmethod
    def concrete(cls, rows: int, noise: float) -> Problem:
        """Return the problem of the first rows of Concrete, in the order of :func:`benchmarks.datasets.load`."""
        data = load("concrete", max_train=rows, test_fraction=0.0)
        return cls(data.train_x, data.train_y, noise)

    @cached_property
    def kernel(self) -> Tensor:
        """K (n, n)."""
        return torch.exp(-0.5 * self._squares)

    @cached_property
    def matrix(self) -> Tensor:
        """A = K + noise I (n, n)."""
        return self.kernel + self.noise * torch.eye(len(self.y), dtype=self.y.dtype)

    @cached_property
    def derivatives(self) -> list[Tensor]:
        """The derivatives of A in log s, log l and log noise, each (n, n)."""
        return [self.kernel, self.kernel * self._squares, self.matrix - self.kernel]

    @cached_property
    def chol(self) -> Tensor:
        """The Cholesky factor of A (n, n)."""
        return torch.linalg.cholesky(self.matrix)

    @cached_property
    def condition(self) -> float:
        """The condition number of A."""
        values = torch.linalg.eigvalsh(self.matrix)
        return float(values[-1] / values[0])

    def solve(self, b: Tensor) -> Tensor:
        """Return A^-1 b (n, R), by the Cholesky factor."""
        return torch.cholesky_solve(b, self.chol)

    @cached_property
    def gradient(self) -> Tensor:
        """The gradient of the log marginal likelihood (3,)."""
        a, inverse = self.solve(self.y[:, None])[:, 0], torch.cholesky_inverse(self.chol)
        return torch.stack([0.5 * a @ B @ a - 0.5 * (inverse * B).sum() for B in self.derivatives])

    @cached_property
    def probe_variance(self) -> Tensor:
        """The variance of the gradient with one vector of random signs, all solves exact (3,)."""
        inverse, found = torch.cholesky_inverse(self.chol), []
        for B in self.derivatives:
            M = inverse @ B
            M = 0.5 * (M + M.mT)
            found.append(0.5 * (M.square().sum() - M.diagonal().square().sum()))
        return torch.stack(found)

    def signs(self, number: int, seed: int) -> Tensor:
        """Return vectors of random signs (n, R)."""
        generator = torch.Generator().manual_seed(seed)
        return (2 * torch.randint(2, (len(self.y), number), generator=generator) - 1).to(self.y)

    def preconditioner(self, rank: int | None = None) -> LowRankPreconditioner:
        """Return a preconditioner by a partial Cholesky factor; if None, its rank is chosen for solves to 1e-2."""
        noise = torch.full_like(self.y, self.noise)
        root = partial_cholesky(
            lambda index: self.kernel[:, index],
            self.kernel.diagonal(),
            rank=rank,
            noise=self.noise,
            tolerance=1e-2,
            generator=torch.Generator().manual_seed(0),
        )
        return LowRankPreconditioner.of(root, noise)

    @property
    def product(self) -> Callable[[Tensor], Tensor]:
        """The function v -> A v."""
        return lambda v: self.matrix @ v

    @cached_property
    def _squares(self) -> Tensor:
        distance = torch.cdist(self.x, self.x, compute_mode="donot_use_mm_for_euclid_dist")
        return (distance / LENGTHSCALE).square()
