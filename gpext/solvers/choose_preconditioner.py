r"""The cheapest preconditioner of K + D: L L' + D of a rank that pays, L L' + (G'G)^-1, or U'U in float32.

Whether neighbours help is determined by two solves with the data around one datum, so few that factorisations take no
time. These are as dense as the data overall, and the residual of L is as rough there; only correlations longer than
that neighbourhood are lost, which a few neighbours do not capture either. In many dimensions no datum is near another,
so that nearly everything may be lost; therefore neighbours must also explain something of a datum's variance.

A matrix that is far from low rank and not too large has a complete Cholesky factor in single precision instead, if the
first columns of L show that this costs less: n^3 / 3 operations then beat steps that read n^2 / 2 entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gpext.solvers.conjugate_gradients import conjugate_gradients
from gpext.solvers.neighbour_roots import (
    NUM_NEIGHBOURS,
    Entries,
    check_noise,
    data_with_neighbours,
    neighbour_root,
    neighbours_before,
)
from gpext.solvers.partial_cholesky import (
    BLOCK,
    JUDGED,
    cost_of_columns,
    cost_of_step,
    most_steps,
    partial_cholesky,
)
from gpext.solvers.preconditioners import LowRankPreconditioner, NeighbourPreconditioner
from gpext.solvers.single_precision import Block, SinglePrecisionPreconditioner, cost_of_single_precision

_TRIED = 400  # data
_SAVED = 0.3  # of the bound on the steps: about the share that neighbours save where they help
_LAST = 150  # columns of L, whose share of the trace estimates the largest eigenvalue of the remainder
_WORTH = 0.85  # share of the steps, on the data tried, above which neighbours are not used
_EXPLAINED = 0.05  # of the variance: where neighbours explain less, the residual of L is not local
_TRIAL = 2e9  # cost of the trial, see `partial_cholesky`
_COLUMNS = 2.5  # times the formula: about the time that columns of L take
_GROUPED = 200.0  # cost of an entry of L for each datum with which it is used together, likewise


@torch.no_grad()
def automatic_preconditioner(
    columns: Callable[[Tensor], Tensor],
    entries: Entries,
    diagonal: Tensor,
    noise: Tensor,
    points: Tensor,
    *,
    block: Block | None = None,
    tolerance: float = 1e-8,
    generator: torch.Generator | None = None,
) -> LowRankPreconditioner | NeighbourPreconditioner | SinglePrecisionPreconditioner:
    """Return the preconditioner.

    Args:
        columns: indices (B,) -> those columns of K (n, B).
        entries: rows (B,), columns (B,) -> those entries of K (B,).
        diagonal: of K (n,).
        noise: the diagonal of D (n,), positive.
        points: the data (n, d), the nearer the more they are alike by K.
        block: entries of K in float32, as for :class:`SinglePrecisionPreconditioner`, which is not tried without it.
        tolerance: of the solves it is used for.
        generator: for pivots, the order of the data, and the choice of those tried, on the CPU.

    Raises:
        ValueError: the noise is not positive.

    Example:
        >>> import torch
        >>> x = torch.linspace(0, 1, 50).double().unsqueeze(-1)
        >>> K, noise = torch.exp(-(x - x.mT).square()), torch.full((50,), 0.1).double()
        >>> P = automatic_preconditioner(lambda i: K[:, i], lambda i, j: K[i, j], K.diagonal(), noise, x)
        >>> type(P).__name__
        'LowRankPreconditioner'
    """
    check_noise(noise)
    typical = float(noise.mean())

    def is_beaten(L: Tensor) -> bool:
        return block is not None and _single_precision_costs_less(L, diagonal, noise, tolerance)

    make_root = partial(
        partial_cholesky,
        columns,
        diagonal,
        noise=typical,
        tolerance=tolerance,
        is_for_few_solves=True,
        generator=generator,
    )
    root = make_root(is_beaten=is_beaten)
    if block is not None and 0 < root.size(-1) < JUDGED + BLOCK and is_beaten(root):
        single = SinglePrecisionPreconditioner.of(block, diagonal, noise)
        if single is not None:
            return single
        root = make_root() if root.size(-1) >= JUDGED else root  # a shorter root has ended by itself
    n, rank = root.shape
    left = (diagonal - root.square().sum(-1)).clamp_min(0)  # negative by rounding alone
    eigenvalue = float(root[:, -_LAST:].square().sum()) / max(min(rank, _LAST), 1)
    saved = _SAVED * most_steps(eigenvalue, typical, tolerance) * cost_of_step(n, rank)
    cost = _TRIAL + _GROUPED * n * rank * (NUM_NEIGHBOURS + 1)
    if rank > 0 and saved > cost and bool((left > 0).any()):
        share = share_of_steps(entries, root, left, noise, points, tolerance=tolerance, generator=generator)
        if share < _WORTH:
            P = with_neighbours(entries, root, left, noise, points, generator=generator)
            if P.rest.explained > _EXPLAINED:
                return P
    return LowRankPreconditioner.of(root, noise)


def _single_precision_costs_less(L: Tensor, diagonal: Tensor, noise: Tensor, tolerance: float) -> bool:
    """Return whether the factor in single precision costs less than continuing from the first columns of L (n, k).

    The decrease of the trace per column, averaged over a block, is about an eigenvalue of K, and falls as a power of
    the number of columns. The bound on the steps at the best number of columns is about the number of steps that are
    taken after rather more columns.
    """
    n, k = L.shape
    taken = [float(columns.square().mean(-1).sum()) for columns in L[:, :JUDGED].split(BLOCK, -1)]
    power = math.log2(max(taken[1] / taken[3], 1.0)) if k >= JUDGED and taken[3] > 0 else 0.0
    scale = (diagonal + noise).rsqrt()
    ones = (L * scale.unsqueeze(-1)).sum(0).square().sum() / n  # nearly the first eigenvector, as entries are positive
    smallest = (noise * scale.square()).min() + taken[-1] * (k / n) ** power * scale.square().min()
    single = cost_of_single_precision(n, 1 + float(ones), float(smallest), tolerance)
    typical = float(noise.mean())

    def cost_with(rank: int) -> float:
        steps = most_steps(taken[-1] * (k / rank) ** power, typical, tolerance)
        return _COLUMNS * cost_of_columns(n, k, rank - k) + steps * cost_of_step(n, rank)

    ranks = range(k, n + 1, BLOCK)
    return single < min(map(cost_with, ranks))


@torch.no_grad()
def with_neighbours(
    entries: Entries,
    root: Tensor,
    left: Tensor,
    noise: Tensor,
    points: Tensor,
    *,
    generator: torch.Generator | None = None,
) -> NeighbourPreconditioner:
    """Return L L' + (G'G)^-1 in a random order of the data.

    Args:
        entries: rows (B,), columns (B,) -> those entries of K (B,).
        root: L (n, k).
        left: the diagonal of K - L L' (n,).
        noise: the diagonal of D (n,), positive.
        points: the data (n, d).
        generator: for the order, on the CPU.
    """
    neighbours = neighbours_before(points, data_with_neighbours(left, noise, generator))
    return NeighbourPreconditioner.of(root, neighbour_root(entries, root, left, noise, neighbours))


@torch.no_grad()
def share_of_steps(
    entries: Entries,
    root: Tensor,
    left: Tensor,
    noise: Tensor,
    points: Tensor,
    *,
    tolerance: float,
    generator: torch.Generator | None = None,
) -> float:
    """Return the steps with neighbours over those without, on the data around one drawn by its residual variance.

    Args:
        entries: as for :func:`with_neighbours`, like the other arguments.
        root: L (n, k).
        left: (n,), not all of it zero.
        noise: (n,).
        points: (n, d).
        tolerance: of the solves.
        generator: for that datum, the order and the right-hand side, on the CPU.
    """
    centre = torch.multinomial(left.double().cpu(), 1, generator=generator).to(left.device)
    tried = (points - points[centre]).square().sum(-1).topk(min(_TRIED, len(points)), largest=False).indices
    m = len(tried)
    L = root[tried] if root.size(-1) <= m else torch.linalg.qr(root[tried].mT, mode="r").R.mT
    rows, columns = torch.broadcast_tensors(tried.unsqueeze(-1), tried)
    K = entries(rows.reshape(-1), columns.reshape(-1)).view(m, m)
    A = K + torch.diag(noise[tried])
    b = torch.randn(m, 1, dtype=torch.float64, generator=generator, device="cpu").to(A)
    corrected = with_neighbours(lambda i, j: K[i, j], L, left[tried], noise[tried], points[tried], generator=generator)
    steps = [
        conjugate_gradients(A.matmul, b, precondition=P, tolerance=tolerance, max_steps=2 * m).num_steps
        for P in (corrected, LowRankPreconditioner.of(L, noise[tried]))
    ]
    return steps[0] / max(steps[1], 1)
