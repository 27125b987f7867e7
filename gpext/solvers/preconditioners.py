r"""Preconditioners L L' + D of a kernel matrix with noise, A = K + D, from some of its columns.

    P^-1 r = D^-1 r - D^-1 L (I + L' D^-1 L)^-1 L' D^-1 r

L is a partial Cholesky factor of K. Its pivots are drawn with probabilities proportional to what is left of the
diagonal, a block at a time [Chen et al. 2022, Epperly et al. 2024], or taken where that is largest, one at a time. What
a block takes from the trace tells the size of the next eigenvalues, and from that how many steps of conjugate gradients
another block would save: the rank is chosen where a block costs more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_BLOCK = 50
_ENTRY = 60.0  # what an entry of K costs, in floating-point operations of a product of matrices; half by symmetry
_WIDTH = 256  # of a block of columns of a Gram matrix
_ROOM = 512  # columns that L has room for at first; twice as many whenever they are full
_PASS = 130.0  # what an entry of L costs a step, likewise: it is read twice, for a few right-hand sides
_PATIENCE = 3  # blocks in a row that seem not to pay: what a single one takes from the trace says little
_MOST_NUMBERS = 2**27  # of L: a gigabyte in float64
_ROUNDING = 1e-12  # of the trace: what is left is rounding


@dataclass(frozen=True)
class LowRankPreconditioner:
    """L L' + D; call it for P^-1 r."""

    root: Tensor  # L (n, k)
    noise: Tensor  # the diagonal of D (n,), positive
    chol: Tensor  # of I + L' D^-1 L (k, k)

    @classmethod
    def of(cls, root: Tensor, noise: Tensor) -> LowRankPreconditioner:
        """Return the preconditioner.

        Raises:
            ValueError: the noise is not positive.
        """
        if not bool((noise > 0).all()):
            raise ValueError(f"a preconditioner needs positive noise; the smallest is {noise.min().item():g}.")
        return cls(root, noise, torch.linalg.cholesky(_one_plus_gram(root * noise.rsqrt().unsqueeze(-1))))

    def __call__(self, r: Tensor) -> Tensor:
        """Return P^-1 r (..., n, R)."""
        scaled = r / self.noise.unsqueeze(-1)
        rows = scaled.mT.contiguous() @ self.root  # for a few columns several times as fast as L' @ scaled
        inner = torch.cholesky_solve(rows.mT, self.chol)
        return scaled - (inner.mT.contiguous() @ self.root.mT).mT / self.noise.unsqueeze(-1)

    def whitened(self, matvec: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return v -> R A R' v, where R P R' = I: a matrix near I, with log|R A R'| = log|A| - log|P|.

        R = (I + B B')^{-1/2} D^{-1/2} with B = D^{-1/2} L, by the eigenvectors of B'B.

        Args:
            matvec: v -> A v for (n, R).
        """
        scale = self.noise.rsqrt().unsqueeze(-1)
        B = scale * self.root
        squares, axes = torch.linalg.eigh(B.mT @ B)
        size = (1 + squares.clamp_min(0)).sqrt()  # below zero by rounding alone
        B = B @ (axes * (size * (1 + size)).rsqrt())

        def root(v: Tensor) -> Tensor:
            return v - B @ (B.mT @ v)

        return lambda v: root(scale * matvec(scale * root(v)))

    @property
    def inverse_root(self) -> Tensor:
        """W (n, k) with P^-1 = D^-1 - W W'."""
        scaled = self.root / self.noise.unsqueeze(-1)
        return torch.linalg.solve_triangular(self.chol.mT, scaled, upper=True, left=False)

    @property
    def rank(self) -> int:
        """The number of columns of L, k."""
        return self.root.size(-1)

    @property
    def log_det(self) -> Tensor:
        """log|P| ()."""
        return self.noise.log().sum() + 2 * self.chol.diagonal().log().sum()


@torch.no_grad()
def partial_cholesky(
    columns: Callable[[Tensor], Tensor],
    diagonal: Tensor,
    *,
    rank: int | None = None,
    noise: float | None = None,
    pivots: Literal["random", "largest"] = "random",
    tolerance: float = 1e-8,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return L (n, k) with L L' near K, K - L L' positive semidefinite.

    Args:
        columns: indices (B,) -> those columns of K (n, B).
        diagonal: of K (n,).
        rank: k, at most; None to choose it, which needs the noise.
        noise: a typical entry of D.
        pivots: drawn at random, or the largest.
        tolerance: of the solves the rank is chosen for.
        generator: for the pivots, on the CPU.

    Raises:
        ValueError: neither a rank nor the noise, or one that cannot be.
    """
    if rank is None and noise is None:
        raise ValueError("expected a rank, or the noise by which to choose it.")
    if rank is not None and rank < 0:
        raise ValueError(f"rank must not be negative; got {rank}.")
    if noise is not None and not noise > 0:
        raise ValueError(f"noise must be positive; got {noise}.")
    n = len(diagonal)
    most = min(n, rank if rank is not None else max(_MOST_NUMBERS // n, 1))
    room, left = diagonal.new_empty(min(most, _ROOM), n), diagonal.clone()  # of L'
    rows = room[:0]
    trace = [float(left.sum())]
    block = _BLOCK if pivots == "random" else 1
    in_vain = 0
    while len(rows) < most and trace[-1] > _ROUNDING * trace[0]:
        size = min(block, most - len(rows))
        if pivots == "random":
            chosen = _drawn(left, size, generator)
        else:
            chosen = left.argmax().unsqueeze(0)
        G = columns(chosen).mT - rows[:, chosen].mT @ rows
        added = _rows_of_factor(G, chosen, _ROUNDING * trace[0] / n)
        if len(rows) + len(added) > len(room):
            room = torch.cat([rows, rows.new_empty(min(most, 2 * len(room)) - len(rows), n)])
        room[len(rows) : len(rows) + len(added)] = added
        rows = room[: len(rows) + len(added)]
        left = (left - added.square().sum(0)).clamp_min_(0)  # by rounding alone
        left[chosen] = 0
        trace.append(float(left.sum()))
        if rank is None and noise is not None:
            in_vain = 0 if _pays(trace, block, len(rows), n, noise, tolerance) else in_vain + 1
            if in_vain == _PATIENCE:
                break
    return rows.mT.contiguous()


def _one_plus_gram(B: Tensor) -> Tensor:
    """Return I + B'B (k, k), of which only the lower triangle's blocks are computed; the rest is zero."""
    inner = torch.eye(B.size(-1), dtype=B.dtype, device=B.device)
    for start in range(0, B.size(-1), _WIDTH):
        block = slice(start, start + _WIDTH)
        inner[start:, block] += B[:, start:].mT @ B[:, block]
    return inner


def _drawn(left: Tensor, size: int, generator: torch.Generator | None) -> Tensor:
    """Return different indices (at most `size`,) drawn with probabilities proportional to `left`."""
    available = int((left > 0).sum())
    drawn = torch.multinomial(left.double().cpu(), min(size, available), generator=generator)
    return drawn.to(left.device)


def _rows_of_factor(G: Tensor, chosen: Tensor, negligible: float) -> Tensor:
    """Return rows whose outer products add up to G' G[:, chosen]^-1 G, the directions that are rounding left out."""
    inner = G[:, chosen]
    values, axes = torch.linalg.eigh(0.5 * (inner + inner.mT))
    kept = values > max(negligible, 1e-10 * float(values[-1]))
    return (axes[:, kept] * values[kept].rsqrt()).mT @ G


def _pays(trace: list[float], block: int, rank: int, n: int, noise: float, tolerance: float) -> bool:
    """Return whether another block saves more products than it costs.

    The eigenvalues that follow are about what a column of the last block took from the trace, and fall by the next
    block as they did by this one; conjugate gradients take sqrt(1 + lambda / noise) log(2 / tolerance) / 2 steps, each
    with a product and an application of P.
    """
    if len(trace) < 3:
        return True
    last, before = (trace[-2] - trace[-1]) / block, (trace[-3] - trace[-2]) / block
    if last <= 0:
        return False

    def steps(eigenvalue: float) -> float:
        return 0.5 * math.sqrt(1 + eigenvalue / noise) * math.log(2 / tolerance)

    after = steps(last * min(last / before, 1.0))
    step = 0.5 * _ENTRY * n * n + _PASS * n * rank
    cost = _ENTRY * n * block + 3.0 * n * rank * block + n * block * block + after * _PASS * n * block
    return (steps(last) - after) * step > cost


def nystrom(
    matvec: Callable[[Tensor], Tensor],
    size: int,
    rank: int,
    *,
    like: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return L (n, k) with L L' = K Q (Q' K Q)^-1 Q' K, for Q a basis of random directions [Frangella et al. 2023].

    Args:
        matvec: v -> K v for (n, R).
        size: n.
        rank: k.
        like: a tensor of the dtype and on the device to work in.
        generator: for the directions, on the CPU.
    """
    normal = torch.randn(size, rank, dtype=torch.float64, generator=generator).to(like)
    Q = torch.linalg.qr(normal).Q
    Y = matvec(Q)
    shift = torch.finfo(Y.dtype).eps * float(Y.norm())  # keeps what follows positive definite; taken off again
    Y = Y + shift * Q
    root = torch.linalg.solve_triangular(torch.linalg.cholesky(Q.mT @ Y).mT, Y, upper=True, left=False)
    axes, singular, _ = torch.linalg.svd(root, full_matrices=False)
    return axes * (singular.square() - shift).clamp_min(0).sqrt()
