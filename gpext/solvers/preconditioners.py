r"""Preconditioners of a kernel matrix with noise, A = K + D, from a partial factor L of K and its residual.

    L L' + D            P^-1 = D^-1 - D^-1 L (I + L' D^-1 L)^-1 L' D^-1
    L L' + (G'G)^-1     P^-1 = G' (I - B (I + B'B)^-1 B') G,    B = G L

G whitens V = K - L L' + D by nearest neighbours, see `neighbour_roots`: where the residual of L is rough, and data
are informative about their neighbours alone, a low rank leaves much that a few neighbours explain [cf. Zhao et al.
2024].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.solvers.neighbour_roots import NeighbourRoot, check_noise

_WIDTH = 256  # of a block of columns of a Gram matrix


@dataclass(frozen=True)
class LowRankPreconditioner:
    """L L' + D; call it for P^-1 r.

    Example:
        >>> import torch
        >>> root, noise = torch.tensor([[1.0], [2.0]]), torch.tensor([0.5, 0.5])
        >>> P = LowRankPreconditioner.of(root, noise)
        >>> ((root @ root.mT + noise.diag()) @ P(torch.ones(2, 1))).round(decimals=4)
        tensor([[1.],
                [1.]])
    """

    root: Tensor  # L (n, k)
    noise: Tensor  # the diagonal of D (n,), positive
    chol: Tensor  # of I + L' D^-1 L (k, k)

    @classmethod
    def of(cls, root: Tensor, noise: Tensor) -> LowRankPreconditioner:
        """Return the preconditioner.

        Raises:
            ValueError: the noise is not positive.
        """
        check_noise(noise)
        return cls(root, noise, torch.linalg.cholesky(_one_plus_gram(root * noise.rsqrt().unsqueeze(-1))))

    def __call__(self, r: Tensor) -> Tensor:
        """Return P^-1 r (..., n, R)."""
        scaled = r / self.noise.unsqueeze(-1)
        return scaled - _within(self.root, self.chol, scaled) / self.noise.unsqueeze(-1)

    def whitened(self, matvec: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return v -> R A R' v, where R P R' = I: a matrix near I, with log|R A R'| = log|A| - log|P|.

        R = (I + B B')^{-1/2} D^{-1/2} with B = D^{-1/2} L.

        Args:
            matvec: v -> A v for (n, R).
        """
        scale = self.noise.rsqrt().unsqueeze(-1)
        root = _inverse_square_root(scale * self.root)
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


@dataclass(frozen=True)
class NeighbourPreconditioner:
    """L L' + (G'G)^-1; call it for P^-1 r.

    Example:
        >>> import torch
        >>> from gpext.solvers.choose_preconditioner import with_neighbours
        >>> x = torch.linspace(0, 1, 20).double().unsqueeze(-1)
        >>> K, noise = torch.exp(-30 * (x - x.mT).abs()), torch.full((20,), 0.1).double()
        >>> none = torch.zeros(20, 0).double()
        >>> P = with_neighbours(lambda i, j: K[i, j], none, K.diagonal(), noise, x)
        >>> A = K + noise.diag()
        >>> float((A @ P(torch.ones(20, 1).double()) - 1).abs().max()) < 0.1
        True
    """

    rest: NeighbourRoot  # G
    root: Tensor  # B = G L (n, k)
    chol: Tensor  # of I + B'B (k, k)

    @classmethod
    def of(cls, root: Tensor, rest: NeighbourRoot) -> NeighbourPreconditioner:
        """Return the preconditioner of L (n, k) and G."""
        B = rest(root)
        return cls(rest, B, torch.linalg.cholesky(_one_plus_gram(B)))

    def __call__(self, r: Tensor) -> Tensor:
        """Return P^-1 r (..., n, R)."""
        scaled = self.rest(r)
        return self.rest.transposed(scaled - _within(self.root, self.chol, scaled))

    def whitened(self, matvec: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return v -> R A R' v, where R P R' = I, as for :class:`LowRankPreconditioner`: R = (I + B B')^{-1/2} G.

        Args:
            matvec: v -> A v for (n, R).
        """
        root = _inverse_square_root(self.root)
        return lambda v: root(self.rest(matvec(self.rest.transposed(root(v)))))

    @property
    def rank(self) -> int:
        """The number of columns of L, k."""
        return self.root.size(-1)

    @property
    def log_det(self) -> Tensor:
        """log|P| ()."""
        return 2 * self.chol.diagonal().log().sum() - 2 * self.rest.log_det


def _within(root: Tensor, chol: Tensor, v: Tensor) -> Tensor:
    """Return B C^-1 B' v (..., n, R) for B (n, k) and the Cholesky factor of C."""
    rows = v.mT.contiguous() @ root  # for a few columns several times as fast as B' @ v
    inner = torch.cholesky_solve(rows.mT, chol)
    return (inner.mT.contiguous() @ root.mT).mT


def _inverse_square_root(B: Tensor) -> Callable[[Tensor], Tensor]:
    """Return v -> (I + B B')^{-1/2} v, by the eigenvectors of B'B."""
    squares, axes = torch.linalg.eigh(B.mT @ B)
    size = (1 + squares.clamp_min(0)).sqrt()  # negative by rounding alone
    scaled = B @ (axes * (size * (1 + size)).rsqrt())
    return lambda v: v - scaled @ (scaled.mT @ v)


def _one_plus_gram(B: Tensor) -> Tensor:
    """Return I + B'B (k, k), of which only the lower triangle's blocks are computed; the rest is zero."""
    inner = torch.eye(B.size(-1), dtype=B.dtype, device=B.device)
    for start in range(0, B.size(-1), _WIDTH):
        block = slice(start, start + _WIDTH)
        inner[start:, block] += B[:, start:].mT @ B[:, block]
    return inner
