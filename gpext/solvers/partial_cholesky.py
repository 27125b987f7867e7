r"""A partial Cholesky factor L of a kernel matrix K, from some of its columns, for a preconditioner L L' + D of K + D.

Its pivots are drawn with probabilities proportional to the remaining diagonal, a block at a time [Chen et al. 2022,
Epperly et al. 2024], or taken where that is largest, one at a time. The decrease of the trace by each block gives the
size of the next eigenvalues, and from that the number of steps of conjugate gradients that another block would save:
the rank is chosen where a block costs more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

BLOCK = 50
JUDGED = 4 * BLOCK  # columns of L from which the decay of the eigenvalues is estimated
_ENTRY = 60.0  # cost of an entry of K, in floating-point operations of a product of matrices; half by symmetry
_ROOM = 512  # columns allocated for L at first; doubled whenever they are full
_PASS = 130.0  # cost of an entry of L per step, likewise: it is read twice, for a few right-hand sides
_PATIENCE = 3  # successive blocks that seem not to pay: the decrease of the trace by a single one varies much
_AVERAGED = 3  # blocks, where none should be wasted
_OF_BOUND = 0.2  # of the bound on steps: 0.35 to 1 are taken, 0.2 to 0.75 with neighbours, but columns cost more, too
_MOST_NUMBERS = 2**27  # of L: a gigabyte in float64
_ROUNDING = 1e-12  # of the trace: a smaller remainder is rounding


@torch.no_grad()
def partial_cholesky(
    columns: Callable[[Tensor], Tensor],
    diagonal: Tensor,
    *,
    rank: int | None = None,
    noise: float | None = None,
    pivots: Literal["random", "largest"] = "random",
    tolerance: float = 1e-8,
    is_for_few_solves: bool = False,
    is_beaten: Callable[[Tensor], bool] | None = None,
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
        is_for_few_solves: whether the rank may cost no more than it saves in a solve or two. Otherwise it is rather too
            high than too low: a kept L is used for many solves, and one that controls a variance has to be near K.
        is_beaten: whether an alternative to L costs less, judged by its first `JUDGED` columns, where it then ends.
        generator: for the pivots, on the CPU.

    Raises:
        ValueError: neither a rank nor the noise is given, or one is out of range.

    Example:
        >>> import torch
        >>> K = torch.diag(torch.tensor([9.0, 1.0, 0.25]).double())
        >>> L = partial_cholesky(lambda i: K[:, i], K.diagonal(), rank=2, pivots="largest")
        >>> (K - L @ L.mT).diagonal()
        tensor([0.0000, 0.0000, 0.2500], dtype=torch.float64)
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
    block = BLOCK if pivots == "random" else 1
    in_vain, patience = 0, 1 if is_for_few_solves else _PATIENCE
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
        left = (left - added.square().sum(0)).clamp_min_(0)  # negative by rounding alone
        left[chosen] = 0
        trace.append(float(left.sum()))
        if is_beaten is not None and len(rows) - len(added) < JUDGED <= len(rows) and is_beaten(rows.mT):
            break
        if rank is None and noise is not None:
            pays = _pays(trace, block, len(rows), n, noise, tolerance, is_for_few_solves)
            in_vain = 0 if pays else in_vain + 1
            if in_vain == patience:
                break
    return rows.mT.contiguous()


def _drawn(left: Tensor, size: int, generator: torch.Generator | None) -> Tensor:
    """Return distinct indices (at most `size`,) drawn with probabilities proportional to `left`."""
    available = int((left > 0).sum())
    drawn = torch.multinomial(left.double().cpu(), min(size, available), generator=generator)
    return drawn.to(left.device)


def _rows_of_factor(G: Tensor, chosen: Tensor, negligible: float) -> Tensor:
    """Return rows whose outer products add up to G' G[:, chosen]^-1 G, without directions that are rounding."""
    inner = G[:, chosen]
    values, axes = torch.linalg.eigh(0.5 * (inner + inner.mT))
    kept = values > max(negligible, 1e-10 * float(values[-1]))
    return (axes[:, kept] * values[kept].rsqrt()).mT @ G


def most_steps(eigenvalue: float, noise: float, tolerance: float) -> float:
    """Return the bound on the steps of conjugate gradients where L leaves eigenvalues up to this one."""
    return 0.5 * math.sqrt(1 + eigenvalue / noise) * math.log(2 / tolerance)


def cost_of_columns(n: int, rank: int, more: int) -> float:
    """Return the cost of `more` further columns of L."""
    return more * n * (_ENTRY + 3.0 * (rank + 0.5 * (more - BLOCK)) + BLOCK)


def cost_of_step(n: int, rank: int) -> float:
    """Return the cost of a product with K and an application of the preconditioner."""
    return 0.5 * _ENTRY * n * n + _PASS * n * rank


def _pays(
    trace: list[float], block: int, rank: int, n: int, noise: float, tolerance: float, is_for_few_solves: bool
) -> bool:
    """Return whether another block saves more products than it costs.

    The next eigenvalues are about the decrease of the trace per column of the last block, or averaged over the last
    blocks, and fall over the next block as they did over this one.
    """
    blocks = min(_AVERAGED, (len(trace) - 1) // 2) if is_for_few_solves else 1
    if len(trace) < 3:
        return True
    last = (trace[-1 - blocks] - trace[-1]) / (blocks * block)
    before = (trace[-1 - 2 * blocks] - trace[-1 - blocks]) / (blocks * block)
    if last <= 0:
        return False
    share = _OF_BOUND if is_for_few_solves else 1.0
    now = share * most_steps(last, noise, tolerance)
    after = share * most_steps(last * min(last / before, 1.0) ** (1 / blocks), noise, tolerance)
    cost = cost_of_columns(n, rank, block) + after * _PASS * n * block
    return (now - after) * cost_of_step(n, rank) > cost
