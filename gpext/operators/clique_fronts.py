r"""The fronts of a filled neighbour graph: own values o given those of the boundary b, or a block of its own.

    given the boundary:    p(f_o | f_b) = N(A f_b, E),   A = K_ob K_bb^-1,   W = L_o^-1 [I  -A],   E = L_o L_o'
    alone:                 p(f_o) = N(0, K),             P = K^-1

The prior's precision is the sum of W'W, or P, over the fronts. The derivative of its log density at a covariance V is
(W'W V W'W - W'W) / 2 and, given the boundary, what is due to K_bb. A front alone, which has no children either, is a
Gaussian process of its own, as of a region, or of few data. There V = Z + left right' with Z = (P + T)^-1 and sites of
precision T, and no other product of matrices is needed:

    P Z P - P = T Z T - T
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpext.linalg.products import times


class CliqueFronts(ABC):
    """A batch of B fronts of s own points and b of the boundary, float64; what belongs to missing points is zero.

    Products of a covariance V (..., B, s + b, s + b) are what its derivative needs.
    """

    chol: Tensor  # L_o (..., B, s, s), ones for what is missing
    positive: Tensor  # whether all covariances are positive definite (), bool

    @classmethod
    @abstractmethod
    def stack(cls, parts: Sequence[Any]) -> Any:
        """Return a batch of them, the first dimension."""

    @abstractmethod
    def precision(self) -> Tensor:
        """Return the part of the precision (..., B, s + b, s + b)."""

    @abstractmethod
    def precision_diagonal(self) -> Tensor:
        """Return its diagonal (..., B, s + b)."""

    @abstractmethod
    def precision_times(self, x: Tensor) -> Tensor:
        """Return its product with vectors (..., B, s + b)."""

    @abstractmethod
    def whitened(self, x: Tensor) -> Tensor:
        """Return W x (..., B, s, R), given (..., B, s + b, R)."""

    @abstractmethod
    def half_times(self, own: Tensor, boundary: Tensor) -> Tensor:
        """Return own values L_o own + A boundary (..., B, s), given (..., B, s) and (..., B, b)."""

    @abstractmethod
    def half_transposed_times(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return L_o' own (..., B, s) and A' own (..., B, b)."""

    @abstractmethod
    def products(self, inverse: Tensor, sites: Tensor) -> Any:
        """Return those of Z (..., B, s + b, s + b), given T of own points (..., B, s), zero for what is missing."""

    @abstractmethod
    def joint_products(self, inverse: Tensor, sites: Tensor) -> Any:
        """Return those of each of D latents' Z (..., D, B, s + b, s + b), given that of all of them.

        Args:
            inverse: Z of the D values of every point of a front (..., B, s + b, D, s + b, D).
            sites: T of its own points (..., B, s, D, D), zero for what is missing.
        """

    @abstractmethod
    def plus(self, products: Any, left: Tensor, right: Tensor) -> Any:
        """Return those of V + left right', given (..., B, s + b, R) each."""

    @abstractmethod
    def share(self, products: Any) -> Tensor:
        """Return the diagonal of V and the part of the precision, multiplied (..., B, s + b)."""

    @abstractmethod
    def half_derivative(self, products: Any, covariance: Tensor) -> Tensor:
        """Return Y, from which :meth:`derivative` follows, given K of own and boundary."""

    @abstractmethod
    def derivative(self, half: Tensor) -> Tensor:
        """Return the derivative (..., B, s + b, s + b) in K, where a symmetric matrix does not tell it from another."""


@dataclass(frozen=True)
class FrontsGivenBoundaries(CliqueFronts):
    """Their products are W V (..., B, s, s + b)."""

    rows: Tensor  # W (..., B, s, s + b)
    chol: Tensor
    positive: Tensor

    @classmethod
    def of(cls, K: Tensor, missing: Tensor, size: int) -> FrontsGivenBoundaries:
        """Return them, given covariances of own and boundary (..., B, S, S), and which points are missing (B, S').

        Args:
            K: those of what is missing are of independent values.
            missing: of own and boundary.
            size: s.
        """
        s, width = size, missing.size(-1)
        L_b, fails = torch.linalg.cholesky_ex(K[..., s:width, s:width])
        X = torch.linalg.solve_triangular(L_b, K[..., s:width, :s], upper=False)
        L_o, fails_too = torch.linalg.cholesky_ex(K[..., :s, :s] - X.mT @ X)
        positive = (fails == 0).all() & (fails_too == 0).all() & (L_o.diagonal(dim1=-2, dim2=-1) > 0).all()
        A = torch.linalg.solve_triangular(L_b.mT, X, upper=True).mT
        unit = torch.eye(s, dtype=K.dtype, device=K.device).expand(*A.shape[:-2], s, s)
        W = torch.linalg.solve_triangular(L_o, torch.cat([unit, -A], -1), upper=False)
        return cls(W * (~missing[:, :s]).unsqueeze(-1), L_o, positive)

    @classmethod
    def stack(cls, parts: Sequence[FrontsGivenBoundaries]) -> FrontsGivenBoundaries:
        """See :meth:`CliqueFronts.stack`."""
        rows, chol = (torch.stack([getattr(part, name) for part in parts]) for name in ("rows", "chol"))
        return cls(rows, chol, torch.stack([part.positive for part in parts]).all())

    def precision(self) -> Tensor:
        """Return W'W; not kept: of 100,000 data it is 2 GB, and hardly takes time."""
        return self.rows.mT @ self.rows

    def precision_diagonal(self) -> Tensor:
        """See :meth:`CliqueFronts.precision_diagonal`."""
        return self.rows.square().sum(-2)

    def precision_times(self, x: Tensor) -> Tensor:
        """See :meth:`CliqueFronts.precision_times`."""
        return times(self.rows.mT, times(self.rows, x))

    def whitened(self, x: Tensor) -> Tensor:
        """See :meth:`CliqueFronts.whitened`."""
        return self.rows @ x

    def half_times(self, own: Tensor, boundary: Tensor) -> Tensor:
        """See :meth:`CliqueFronts.half_times`."""
        return times(self.chol, own - times(self.rows[..., own.size(-1) :], boundary))

    def half_transposed_times(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`CliqueFronts.half_transposed_times`."""
        whitened = times(self.chol.mT, own)
        return whitened, -times(self.rows[..., own.size(-1) :].mT, whitened)

    def products(self, inverse: Tensor, sites: Tensor) -> Tensor:
        """See :meth:`CliqueFronts.products`."""
        return self.rows @ inverse

    def joint_products(self, inverse: Tensor, sites: Tensor) -> Tensor:
        """See :meth:`CliqueFronts.joint_products`."""
        return self.rows @ _of_each_latent(inverse)

    def plus(self, products: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """See :meth:`CliqueFronts.plus`."""
        return products + (self.rows @ left) @ right.mT

    def share(self, products: Tensor) -> Tensor:
        """See :meth:`CliqueFronts.share`."""
        return (self.rows * products).sum(-2)

    def half_derivative(self, products: Tensor, covariance: Tensor) -> Tensor:
        """Return Y = (W V W' - I) W / 2 + [0  (W V)_b K_bb^-1] (..., B, s, s + b)."""
        W, (s, width) = self.rows, self.rows.shape[-2:]
        unit = torch.eye(s, dtype=W.dtype, device=W.device)
        Y = 0.5 * (products @ W.mT - unit) @ W
        if width > s:
            chol = torch.linalg.cholesky(covariance[..., s:width, s:width])
            Y[..., s:] += torch.cholesky_solve(products[..., s:].mT, chol).mT
        return Y

    def derivative(self, half: Tensor) -> Tensor:
        """Return W'Y; that in K_bb belongs to covariances of the parent."""
        return self.rows.mT @ half


class ProductsAlone(NamedTuple):
    """Of fronts alone: P V P - P (..., B, s, s), and the diagonal of V P (..., B, s)."""

    moved: Tensor
    share: Tensor


@dataclass(frozen=True)
class FrontsAlone(CliqueFronts):
    """Fronts without boundary and children."""

    inverse: Tensor  # P (..., B, s, s)
    chol: Tensor
    positive: Tensor

    @classmethod
    def of(cls, K: Tensor, missing: Tensor) -> FrontsAlone:
        """Return them, given covariances (..., B, S, S), and which points are missing (B, s)."""
        s = missing.size(-1)
        L, fails = torch.linalg.cholesky_ex(K[..., :s, :s])
        positive = (fails == 0).all() & (L.diagonal(dim1=-2, dim2=-1) > 0).all()
        return cls(torch.cholesky_inverse(L) - torch.diag_embed(missing.to(L)), L, positive)

    @classmethod
    def stack(cls, parts: Sequence[FrontsAlone]) -> FrontsAlone:
        """See :meth:`CliqueFronts.stack`."""
        inverse, chol = (torch.stack([getattr(part, name) for part in parts]) for name in ("inverse", "chol"))
        return cls(inverse, chol, torch.stack([part.positive for part in parts]).all())

    def precision(self) -> Tensor:
        """Return P."""
        return self.inverse

    def precision_diagonal(self) -> Tensor:
        """See :meth:`CliqueFronts.precision_diagonal`."""
        return self.inverse.diagonal(dim1=-2, dim2=-1)

    def precision_times(self, x: Tensor) -> Tensor:
        """Return K^-1 x, by the Cholesky factor."""
        solved = torch.cholesky_solve(x.unsqueeze(-1), self.chol.expand(*x.shape, -1))
        return solved.squeeze(-1)

    def whitened(self, x: Tensor) -> Tensor:
        """See :meth:`CliqueFronts.whitened`."""
        return torch.linalg.solve_triangular(self.chol, x, upper=False)

    def half_times(self, own: Tensor, boundary: Tensor) -> Tensor:
        """See :meth:`CliqueFronts.half_times`."""
        return times(self.chol, own)

    def half_transposed_times(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`CliqueFronts.half_transposed_times`."""
        return times(self.chol.mT, own), own[..., :0]

    def products(self, inverse: Tensor, sites: Tensor) -> ProductsAlone:
        """See :meth:`CliqueFronts.products`."""
        moved = sites.unsqueeze(-1) * inverse * sites.unsqueeze(-2) - torch.diag_embed(sites)
        return ProductsAlone(moved, (self.inverse * inverse).sum(-1))

    def joint_products(self, inverse: Tensor, sites: Tensor) -> ProductsAlone:
        """See :meth:`CliqueFronts.joint_products`."""
        moved = torch.einsum("...ide,...iejf,...jfd->...dij", sites, inverse, sites).movedim(-3, -4)
        own = sites.diagonal(dim1=-2, dim2=-1).movedim(-1, -3)  # T of each latent
        return ProductsAlone(moved - torch.diag_embed(own), (self.inverse * _of_each_latent(inverse)).sum(-1))

    def plus(self, products: ProductsAlone, left: Tensor, right: Tensor) -> ProductsAlone:
        """See :meth:`CliqueFronts.plus`."""
        by_left = self.inverse @ left
        moved = products.moved + by_left @ (self.inverse @ right).mT
        return ProductsAlone(moved, products.share + (by_left * right).sum(-1))

    def share(self, products: ProductsAlone) -> Tensor:
        """See :meth:`CliqueFronts.share`."""
        return products.share

    def half_derivative(self, products: ProductsAlone, covariance: Tensor) -> Tensor:
        """Return the derivative itself."""
        return 0.5 * products.moved

    def derivative(self, half: Tensor) -> Tensor:
        """See :meth:`CliqueFronts.derivative`."""
        return half


def _of_each_latent(inverse: Tensor) -> Tensor:
    """Return the blocks (..., D, B, k, k) of each latent among (..., B, k, D, k, D)."""
    return inverse.diagonal(dim1=-3, dim2=-1).movedim(-1, -4)
