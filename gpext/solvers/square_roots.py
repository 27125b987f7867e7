r"""The square root of a positive semidefinite matrix given by its products, times a vector [Chow & Saad 2014].

    A^1/2 z ~ |z| Q_k T_k^1/2 e_1,      Q_k, T_k = Q_k' A Q_k  of k steps of Lanczos' recursion from z / |z|

The largest eigenvalues are found first. If the remaining ones extend down to zero the error falls like 1 / k, and the
distance between the results of k / 2 and k steps is about the error of the latter; if the error falls faster, that
distance is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.solvers.lanczos import tridiagonalise
from gpext.solvers.steps import Product

_FIRST = 16  # steps; doubled whenever they have proved too few


@dataclass(frozen=True)
class RootProduct:
    """The result of a product with a square root.

    Example:
        >>> import torch
        >>> from gpext.solvers import square_root_times
        >>> A = torch.diag(torch.tensor([1.0, 4.0]).double())
        >>> found = square_root_times(lambda v: A @ v, torch.ones(2).double(), tolerance=1e-8)
        >>> found.value.round(decimals=4), found.num_steps
        (tensor([1., 2.], dtype=torch.float64), 2)
    """

    value: Tensor  # A^1/2 z (n,)
    error: float  # an estimate of |value - A^1/2 z|
    num_steps: int  # k of the last attempt; all attempts together have taken less than twice as many products


@torch.no_grad()
def square_root_times(matvec: Product, z: Tensor, *, tolerance: float, max_steps: int | None = None) -> RootProduct:
    """Return A^1/2 z.

    Args:
        matvec: v -> A v for (n, 1); A symmetric positive semidefinite, to rounding.
        z: (n,).
        tolerance: on the length of the error.
        max_steps: maximum number of steps, n numbers kept for each; by default n, which leaves no error but rounding.

    Example:
        >>> import torch
        >>> A = torch.diag(torch.tensor([1.0, 4.0, 9.0]).double())
        >>> square_root_times(lambda v: A @ v, torch.ones(3).double(), tolerance=1e-8).value
        tensor([1.0000, 2.0000, 3.0000], dtype=torch.float64)
    """
    length = z.norm()
    if not bool(length > 0):
        return RootProduct(torch.zeros_like(z), 0.0, 0)
    most = len(z) if max_steps is None else min(max_steps, len(z))
    steps = min(_FIRST, most)
    while True:
        Q, T = tridiagonalise(matvec, (z / length).unsqueeze(-1), steps)
        half, value = (length * _root_column(Q[0], T[0], k) for k in ((steps + 1) // 2, steps))
        error = 0.0 if steps == len(z) else float((value - half).norm())
        if error <= tolerance or steps == most:
            return RootProduct(value, error, steps)
        steps = min(2 * steps, most)


def _root_column(Q: Tensor, T: Tensor, k: int) -> Tensor:
    """Return Q_k T_k^1/2 e_1 (n,)."""
    values, axes = torch.linalg.eigh(T[:k, :k])
    return Q[:, :k] @ (axes @ (values.clamp_min(0).sqrt() * axes[0]))  # negative by rounding alone
