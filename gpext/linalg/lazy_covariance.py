"""A covariance of which the variances are known, and the other entries computed where they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from linear_operator import to_linear_operator
from linear_operator.operators import LinearOperator
from torch import Tensor


class LazyCovariance(LinearOperator):
    """A covariance (..., S, S).

    Args:
        variance: its diagonal (..., S).
        dense: returns the matrix (..., S, S).
        blocks: the covariances of the D latents of each datum (..., D, D, N), where S = D N, latent by latent.
    """

    def __init__(self, variance: Tensor, *, dense: Callable[[], Tensor], blocks: Tensor | None = None) -> None:
        super().__init__(variance, dense=dense, blocks=blocks)
        self._variance, self._make, self.blocks = variance, dense, blocks

    def _size(self) -> torch.Size:
        return torch.Size((*self._variance.shape, self._variance.size(-1)))

    def _transpose_nonbatch(self) -> LazyCovariance:
        return self

    def _diagonal(self) -> Tensor:
        return self._variance

    def to_dense(self) -> Tensor:
        """Return the matrix (..., S, S)."""
        return self._make().to(self._variance.dtype)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.to_dense() @ rhs

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return to_linear_operator(self.to_dense())._getitem(row_index, col_index, *batch_indices)

    def _expand_batch(self, batch_shape: torch.Size) -> LinearOperator:
        return to_linear_operator(self.to_dense()).expand(*batch_shape, *self.matrix_shape)
