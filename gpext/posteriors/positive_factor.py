r"""The Cholesky factor of B = I + P K P, P diagonal: of the data alone whose P is not zero, where they are few.

    L L' = B_pp,    p the data whose P is positive;    elsewhere B is the identity

In what is made from L a row is as small as its P off the diagonal of L, so that small ones lose nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.linalg.triangles import factor_whole, inverse_diagonal, solve_lower, solve_whole, take_columns

_FEW = 0.95  # of the data of one posterior: with more it costs as much to take them out as it saves
_LEAST = 0.5  # a pivot; of a positive semidefinite K they are at least one, but for rounding


@dataclass(frozen=True)
class PositiveFactor:
    """L, and which data it is of."""

    root: Tensor  # P (..., N)
    index: Tensor | None  # p, ascending (n,); None for all
    chol: Tensor  # L (..., n, n)

    @classmethod
    def of(cls, covariance: Tensor, root: Tensor) -> tuple[PositiveFactor, Tensor]:
        """Return the factor for K (..., N, N) and P (..., N), and whether the factorisation succeeded (...)."""
        index = None
        if covariance.dim() == 2 and root.dim() == 1:
            index = root.nonzero().squeeze(-1)
            index = index if len(index) < _FEW * len(root) else None
        if index is None:
            chol, ok = factor_whole(covariance, root, sign=1)
        else:
            chol, ok = factor_whole(covariance.index_select(0, index).index_select(1, index), root[index], sign=1)
        pivots = chol.diagonal(dim1=-2, dim2=-1).square()
        return cls(root, index, chol), ok & (pivots > _LEAST).all(-1)

    @property
    def log_det(self) -> Tensor:
        """log|B| (...)."""
        return 2 * self.chol.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @property
    def whole(self) -> Tensor:
        """The factor of all of B (..., N, N)."""
        if self.index is None:
            return self.chol
        return self._within(self.chol, torch.eye(len(self.root), dtype=self.chol.dtype, device=self.chol.device))

    @property
    def inverse_diagonal(self) -> Tensor:
        """The diagonal of B^-1 (..., N)."""
        inner = inverse_diagonal(self.chol)
        return inner if self.index is None else torch.ones_like(self.root).index_put((self.index,), inner)

    def inverse_diagonal_at(self, index: Tensor) -> Tensor:
        """The same for some data with positive P (..., k), from their columns of L^-1."""
        at = index if self.index is None else torch.searchsorted(self.index, index.contiguous())
        unit = torch.eye(self.chol.size(-1), dtype=self.chol.dtype, device=self.chol.device)
        return solve_lower(self.chol, take_columns(unit, at)).square().sum(-2)

    @property
    def response(self) -> Tensor:
        """P B^-1 P (..., N, N)."""
        inner = torch.cholesky_inverse(self.chol).mT  # symmetric, and row-major like K
        inner = inner * self._column if inner.requires_grad else inner.mul_(self._column)  # backward needs the inverse
        inner = inner.mul_(self._column.mT)
        return inner if self.index is None else self._within(inner, inner.new_zeros(len(self.root), len(self.root)))

    def whiten(self, columns: Tensor) -> Tensor:
        """Return L^-1 P columns (..., n, S), for (..., N, S)."""
        return solve_lower(self.chol, self._column * self._some(columns))

    def spread(self, whitened: Tensor) -> Tensor:
        """Return P L^-T whitened (..., N, S), for (..., n, S)."""
        return self._all(self._column * self._solve_upper(whitened))

    def solve(self, vector: Tensor) -> Tensor:
        """Return P B^-1 vector (..., N)."""
        solved = solve_whole(self.chol, self._some(vector.unsqueeze(-1)))
        return self._all(self._column * solved).squeeze(-1)

    def given(self, reduced: Tensor) -> Tensor:
        """Return the covariance of the values and others given sites, P^-1 L^-T reduced; zero where P is (..., N, S).

        The prior's less (L^-1 P K)' reduced is the same, and has no digits of a variance far below the prior's.

        Args:
            reduced: what :meth:`whiten` makes of the prior covariance of the values and the others (..., n, S).
        """
        return self._all(self._solve_upper(reduced) / torch.where(self._column > 0, self._column, torch.inf))

    @property
    def _column(self) -> Tensor:
        """P of the data that L has (..., n, 1)."""
        return self._some(self.root.unsqueeze(-1))

    def _solve_upper(self, right: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.chol.mT, right, upper=True)

    def _some(self, rows: Tensor) -> Tensor:
        return rows if self.index is None else rows.index_select(-2, self.index)

    def _all(self, rows: Tensor) -> Tensor:
        if self.index is None:
            return rows
        zeros = rows.new_zeros(*rows.shape[:-2], self.root.size(-1), rows.size(-1))
        return zeros.index_copy(-2, self.index, rows)

    def _within(self, inner: Tensor, outer: Tensor) -> Tensor:
        assert self.index is not None
        return outer.index_put((self.index.unsqueeze(-1), self.index), inner)
