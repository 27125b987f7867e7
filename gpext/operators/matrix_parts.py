"""Parts of a kernel matrix K (n, n) that is not stored, from which preconditioners are built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from linear_operator.operators import LinearOperator, SumLinearOperator
from torch import Tensor


@runtime_checkable
class MatrixParts(Protocol):
    """The parts of K that preconditioners are built from; `entries` and `block` are used only if there are points."""

    @property
    def points(self) -> Tensor | None:
        """Inputs (n, d) on whose distances K depends, in units of its lengthscales; None if they are not known."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of K."""

    def diagonal(self) -> Tensor:
        """Return the diagonal of K (n,)."""

    def columns(self, index: Tensor) -> Tensor:
        """Return columns (n, B) of K, without derivatives."""

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the entries of K in these rows and columns, each (B,)."""

    def block(self, rows: slice, columns: slice, scale: Tensor) -> Tensor:
        """Return scale_i K_ij scale_j (scale (n,)) in float32."""


def parts_of(K: LinearOperator) -> MatrixParts:
    """Return the parts of K, from K itself, from the terms of a sum, or from linear_operator's indexing."""
    if isinstance(K, MatrixParts):
        return K
    if isinstance(K, SumLinearOperator):
        return _Sum(K, tuple(parts_of(term) for term in K.linear_ops))
    return _Indexed(K)


@dataclass(frozen=True)
class _Indexed:
    """The parts of any operator, by indexing."""

    operator: LinearOperator

    @property
    def points(self) -> Tensor | None:
        return None

    @property
    def dtype(self) -> torch.dtype | None:
        return self.operator.dtype

    def diagonal(self) -> Tensor:
        return self.operator.diagonal()

    def columns(self, index: Tensor) -> Tensor:
        return self.operator[:, index].to_dense()

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.operator[rows, columns]

    def block(self, rows: slice, columns: slice, scale: Tensor) -> Tensor:
        return (scale[rows, None] * self.operator[rows, columns].to_dense() * scale[columns]).float()


@dataclass(frozen=True)
class _Sum:
    """The parts of a sum, term by term."""

    operator: LinearOperator
    terms: tuple[MatrixParts, ...]

    @property
    def points(self) -> Tensor | None:
        each = [term.points for term in self.terms]
        known = [points for points in each if points is not None]
        return torch.cat(known, -1) if len(known) == len(each) else None

    @property
    def dtype(self) -> torch.dtype | None:
        return self.operator.dtype

    def diagonal(self) -> Tensor:
        return self.operator.diagonal()

    def columns(self, index: Tensor) -> Tensor:
        return torch.stack([term.columns(index) for term in self.terms]).sum(0)

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        return torch.stack([term.entries(rows, columns) for term in self.terms]).sum(0)

    def block(self, rows: slice, columns: slice, scale: Tensor) -> Tensor:
        return torch.stack([term.block(rows, columns, scale) for term in self.terms]).sum(0)
