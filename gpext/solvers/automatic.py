r"""The preconditioner of K + D that costs least: L L' + D of a rank that pays, or L L' + (G'G)^-1 where that is better.

Whether neighbours help is tried by two solves with the data around one, so few that factorisations take no time. They
are as dense there as all are, and what L leaves is as rough; only what is longer than that neighbourhood is lost, which
a few neighbours do not know either. In many dimensions nobody is near, and that may be nearly all there is: so
neighbours must explain something of a datum's variance, too.
"""

from __future__ import annotations

from collections.abc import Callable

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
from gpext.solvers.partial_cholesky import cost_of_step, most_steps, partial_cholesky
from gpext.solvers.preconditioners import LowRankPreconditioner, NeighbourPreconditioner

_TRIED = 400  # data
_SAVED = 0.3  # about what neighbours save where they help, of the most steps that it can take
_LAST = 150  # columns of L: what one of them took from the trace tells the largest eigenvalues of what is left
_WORTH = 0.85  # of the steps, on the data tried: more and they are not taken
_EXPLAINED = 0.05  # of the variance: where neighbours explain less, what L leaves is alike everywhere, if at all
_TRIAL = 2e9  # what it costs, see `partial_cholesky`
_GROUPED = 200.0  # what an entry of L costs for each of the data together with which it is used, likewise


@torch.no_grad()
def automatic_preconditioner(
    columns: Callable[[Tensor], Tensor],
    entries: Entries,
    diagonal: Tensor,
    noise: Tensor,
    points: Tensor,
    *,
    tolerance: float = 1e-8,
    generator: torch.Generator | None = None,
) -> LowRankPreconditioner | NeighbourPreconditioner:
    """Return the preconditioner.

    Args:
        columns: indices (B,) -> those columns of K (n, B).
        entries: rows (B,), columns (B,) -> those entries of K (B,).
        diagonal: of K (n,).
        noise: the diagonal of D (n,), positive.
        points: the data (n, d), the nearer the more they are alike by K.
        tolerance: of the solves that it is for.
        generator: for pivots, the order of the data, and which are tried, on the CPU.

    Raises:
        ValueError: the noise is not positive.
    """
    check_noise(noise)
    typical = float(noise.mean())
    root = partial_cholesky(
        columns, diagonal, noise=typical, tolerance=tolerance, is_for_few_solves=True, generator=generator
    )
    left = (diagonal - root.square().sum(-1)).clamp_min(0)  # by rounding alone
    n, rank = root.shape
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
        noise: that of D (n,), positive.
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
    """Return the steps with neighbours over those without, on the data around one drawn by what L leaves of it.

    Args:
        entries: as of :func:`with_neighbours`, and so are the others.
        root: L (n, k).
        left: (n,), not all of it zero.
        noise: (n,).
        points: (n, d).
        tolerance: of the solves.
        generator: for the one, the order and the right-hand side, on the CPU.
    """
    centre = torch.multinomial(left.double().cpu(), 1, generator=generator).to(left.device)
    tried = (points - points[centre]).square().sum(-1).topk(min(_TRIED, len(points)), largest=False).indices
    m = len(tried)
    L = root[tried] if root.size(-1) <= m else torch.linalg.qr(root[tried].mT, mode="r").R.mT
    rows, columns = torch.broadcast_tensors(tried.unsqueeze(-1), tried)
    K = entries(rows.reshape(-1), columns.reshape(-1)).view(m, m)
    A = K + torch.diag(noise[tried])
    b = torch.randn(m, 1, dtype=torch.float64, generator=generator).to(A)
    corrected = with_neighbours(lambda i, j: K[i, j], L, left[tried], noise[tried], points[tried], generator=generator)
    steps = [
        conjugate_gradients(A.matmul, b, precondition=P, tolerance=tolerance, max_steps=2 * m).num_steps
        for P in (corrected, LowRankPreconditioner.of(L, noise[tried]))
    ]
    return steps[0] / max(steps[1], 1)
