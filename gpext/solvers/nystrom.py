"""The Nystrom approximation of a matrix given by its products, from products with random directions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


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

    Example:
        >>> import torch
        >>> K = torch.diag(torch.tensor([9.0, 1.0, 0.0]).double())
        >>> L = nystrom(lambda v: K @ v, 3, 2, like=K, generator=torch.Generator().manual_seed(0))
        >>> torch.allclose(L @ L.mT, K, atol=1e-6)  # K has rank 2
        True
    """
    normal = torch.randn(size, rank, dtype=torch.float64, generator=generator, device="cpu").to(like)
    Q = torch.linalg.qr(normal).Q
    Y = matvec(Q)
    shift = torch.finfo(Y.dtype).eps * float(Y.norm())  # keeps Q' Y positive definite; subtracted again
    Y = Y + shift * Q
    root = torch.linalg.solve_triangular(torch.linalg.cholesky(Q.mT @ Y).mT, Y, upper=True, left=False)
    axes, singular, _ = torch.linalg.svd(root, full_matrices=False)
    return axes * (singular.square() - shift).clamp_min(0).sqrt()
