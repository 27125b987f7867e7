r"""Data that depend on linear functions of the latent values, h = A f with a sparse A (N, P), not on one value each.

    p(h) = N(A mu, A K A'),     cov(f_*, h) = K_{*X} A'

The site of datum i is then one on h_i = a_i' f, and no rule of inference depends on A. A row of two entries compares
two latent values; one of many adds up the cells of a map or the days of a month.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpext.checks import check_finite, check_tensor, show_index, whole_number
from gpext.distributions import LatentNormal

__all__ = ["Design", "averages", "pairs", "rows_of", "sums"]


class Design(torch.nn.Module):
    """A sparse matrix A (N, P); called with a distribution of f at P inputs, it returns that of h = A f.

    Its buffers move with the model that it belongs to and, like data, are not part of a state dict.

    Args:
        rows: of the entries that are not zero (E,), whole numbers.
        columns: likewise (E,).
        weights: the entries (E,).
        shape: (N, P).

    Raises:
        TypeError: rows or columns that are not whole numbers.
        ValueError: an index out of range, weights that are not finite, or a row without entries.

    Example:
        >>> import torch
        >>> design = pairs(torch.tensor([[0, 2], [1, 0]]), 3)
        >>> design.times(torch.tensor([1.0, 5.0, 7.0]))
        tensor([-6.,  4.])
    """

    rows: Tensor
    columns: Tensor
    weights: Tensor
    sizes: Tensor  # the number of entries of each row (N,)
    starts: Tensor  # the place of the first of them (N,)

    def __init__(self, rows: Tensor, columns: Tensor, weights: Tensor, shape: tuple[int, int]) -> None:
        super().__init__()
        for name, values in (("rows", rows), ("columns", columns), ("weights", weights)):
            check_tensor(name, values)
        if not (rows.shape == columns.shape == weights.shape and rows.dim() == 1):
            raise ValueError(
                "rows, columns and weights must be equally long vectors; got shapes "
                f"{tuple(rows.shape)}, {tuple(columns.shape)} and {tuple(weights.shape)}."
            )
        num_rows, num_columns = (whole_number(name, n, 1) for name, n in zip(("N", "P"), shape, strict=True))
        rows, columns = _index("rows", rows, num_rows), _index("columns", columns, num_columns)
        check_finite("weights", weights)
        entries = torch.sparse_coo_tensor(
            torch.stack([rows, columns]), weights, (num_rows, num_columns), check_invariants=False
        ).coalesce()
        if not weights.is_floating_point():
            entries = entries.to(torch.get_default_dtype())
        index, weights = entries.indices(), entries.values()
        sizes = torch.bincount(index[0], minlength=num_rows)
        empty = (torch.bincount(index[0], weights != 0, num_rows) == 0).nonzero()
        if len(empty):
            raise ValueError(
                f"row {int(empty[0])} of the design has no entry other than 0, so that its datum depends on no latent "
                "value. Leave that datum out."
            )
        self.shape = torch.Size((num_rows, num_columns))
        held = {
            "rows": index[0],
            "columns": index[1],
            "weights": weights,
            "sizes": sizes,
            "starts": sizes.cumsum(0) - sizes,
        }
        for name, values in held.items():
            self.register_buffer(name, values, persistent=False)

    @property
    def num_data(self) -> int:
        """N, the number of rows."""
        return self.shape[0]

    def times(self, vectors: Tensor) -> Tensor:
        """Return A v (..., N) for vectors (..., P)."""
        return self.times_matrix(vectors.unsqueeze(-1)).squeeze(-1)

    def times_matrix(self, matrix: Tensor) -> Tensor:
        """Return A M (..., N, S) for matrices (..., P, S), differentiable in M."""
        if matrix.size(-2) != self.shape[1]:
            raise ValueError(
                f"the design has {self.shape[1]} columns, one for each latent value; got {matrix.size(-2)} of these."
            )
        columns = matrix.movedim(-2, 0)
        found = torch.sparse.mm(self._matrix(matrix), columns.reshape(len(columns), -1))
        return found.view(self.shape[0], *columns.shape[1:]).movedim(0, -2)

    def transposed_times(self, vectors: Tensor) -> Tensor:
        """Return A' v (..., P) for vectors (..., N)."""
        if vectors.size(-1) != self.shape[0]:
            raise ValueError(f"the design has {self.shape[0]} rows, one per datum; got {vectors.size(-1)} of these.")
        rows = vectors.movedim(-1, 0)
        found = torch.sparse.mm(self._matrix(vectors).mT, rows.reshape(len(rows), -1))
        return found.view(self.shape[1], *rows.shape[1:]).movedim(0, -1)

    def congruence(self, covariance: Tensor) -> Tensor:
        """Return A K A' (..., N, N) for symmetric K (..., P, P)."""
        return self.times_matrix(self.times_matrix(covariance).mT)

    def row_variances(self, covariance: Tensor) -> Tensor:
        """Return the diagonal of A K A' (..., N) for symmetric K (..., P, P)."""
        index, weights = self.padded()
        weights = weights.to(covariance)
        total = torch.zeros_like(covariance[..., :1, 0]).expand(*covariance.shape[:-2], self.shape[0])
        for e in range(index.size(1)):  # one entry of each row at a time: N E numbers at once, not N E^2
            row = covariance[..., index[:, e, None], index] * weights
            total = total + weights[:, e] * row.sum(-1)
        return total

    def gram(self, precision: Tensor) -> Tensor:
        """Return A' diag(t) A (..., P, P) for vectors t (..., N)."""
        index, weights = self.padded()
        size = self.shape[1]
        pairs_of = (weights.unsqueeze(-1) * weights.unsqueeze(-2)).to(precision)  # (N, E, E)
        place = (index.unsqueeze(-1) * size + index.unsqueeze(-2)).flatten()
        values = (precision[..., None, None] * pairs_of).flatten(-3)
        found = values.new_zeros(*precision.shape[:-1], size * size).index_add(-1, place, values)
        return found.unflatten(-1, (size, size))

    def squared_norms(self) -> Tensor:
        """Return |a_i|^2 of the rows (N,)."""
        return torch.zeros_like(self.weights[:1]).expand(self.num_data).index_add(0, self.rows, self.weights.square())

    def dense(self) -> Tensor:
        """Return A (N, P)."""
        return self._matrix(self.weights).to_dense()

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return the columns and the values of each row's entries (N, E), zero where a row has fewer than E."""
        place = torch.arange(len(self.rows), device=self.rows.device) - self.starts[self.rows]
        columns, weights = (t.new_zeros(self.shape[0], int(self.sizes.max())) for t in (self.columns, self.weights))
        columns[self.rows, place], weights[self.rows, place] = self.columns, self.weights
        return columns, weights

    def take(self, index: Tensor | slice) -> Design:
        """Return the design of the data at `index`, with the same latent values."""
        wanted = torch.arange(self.shape[0], device=self.rows.device)[index]
        sizes = self.sizes[wanted]
        rows = torch.arange(len(wanted), device=wanted.device).repeat_interleave(sizes)
        shift = self.starts[wanted] - (sizes.cumsum(0) - sizes)
        entries = torch.arange(len(rows), device=rows.device) + shift[rows]
        return Design(rows, self.columns[entries], self.weights[entries], (len(wanted), self.shape[1]))

    def occupied(self) -> tuple[Tensor, Design]:
        """Return the columns that have entries (U,), and the design of these latent values alone (N, U)."""
        columns, place = self.columns.unique(return_inverse=True)
        return columns, Design(self.rows, place, self.weights, (self.shape[0], len(columns)))

    def _matrix(self, like: Tensor) -> Tensor:
        index = torch.stack([self.rows, self.columns])
        return torch.sparse_coo_tensor(
            index, self.weights.to(like), self.shape, is_coalesced=True, check_invariants=False
        )

    def forward(self, function_dist: MultivariateNormal) -> MultivariateNormal:
        """Return N(A mu, A K A') for N(mu, K) of f (..., P), or of each of D latents; lazily if N > P."""
        covariance: LinearOperator = DesignLinearOperator(function_dist.lazy_covariance_matrix, design=self)
        if self.shape[0] <= self.shape[1]:
            covariance = to_linear_operator(covariance.to_dense())
        return LatentNormal(self.times(function_dist.mean), covariance)

    def extra_repr(self) -> str:
        """Return the shape and the number of entries."""
        return f"{tuple(self.shape)}, {len(self.rows)} entries"


class DesignLinearOperator(LinearOperator):
    """The covariance A K A' (..., N, N) of h = A f.

    Args:
        covariance: K (..., P, P), symmetric.
        design: A (N, P).
    """

    def __init__(self, covariance: LinearOperator | Tensor, *, design: Design) -> None:
        covariance = to_linear_operator(covariance)
        super().__init__(covariance, design=design)
        self.covariance, self.design = covariance, design

    def _size(self) -> torch.Size:
        n = self.design.num_data
        return torch.Size((*self.covariance.batch_shape, n, n))

    def _transpose_nonbatch(self) -> DesignLinearOperator:
        return self

    def _matmul(self, rhs: Tensor) -> Tensor:
        columns = rhs if rhs.dim() > 1 else rhs.unsqueeze(-1)
        inner = self.covariance.matmul(self.design.transposed_times(columns.mT).mT)
        found = self.design.times_matrix(inner)
        return found if rhs.dim() > 1 else found.squeeze(-1)

    def _diagonal(self) -> Tensor:
        return self.design.row_variances(self.covariance.to_dense())

    def to_dense(self) -> Tensor:
        """Return A K A' (..., N, N)."""
        return self.design.congruence(self.covariance.to_dense())


def pairs(index: Tensor, num_inputs: int) -> Design:
    """Return the design of comparisons: datum i depends on f_a - f_b for a row (a, b) of the index (N, 2).

    With a :class:`gpext.likelihoods.PairwiseLogitLikelihood` or `PairwiseProbitLikelihood` a target of 1 then means
    that a was preferred to b [Bradley & Terry 1952, Chu & Ghahramani 2005].

    Args:
        index: of the inputs compared (N, 2).
        num_inputs: P.

    Raises:
        TypeError, ValueError: as :class:`Design`, or an input compared with itself.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> f = MultivariateNormal(torch.tensor([1.0, 3.0, 5.0]), torch.eye(3))
        >>> pairs(torch.tensor([[0, 2], [1, 0]]), num_inputs=3)(f).mean
        tensor([-4.,  2.])
    """
    check_tensor("index", index)
    if index.dim() != 2 or index.size(-1) != 2:
        raise ValueError(f"expected pairs (N, 2) of indices; got shape {tuple(index.shape)}.")
    index = _index("pairs", index, num_inputs)
    same = (index[:, 0] == index[:, 1]).nonzero()
    if len(same):
        row = int(same[0])
        raise ValueError(f"a pair must be of two inputs; row {row} compares {int(index[row, 0])} with itself.")
    rows = torch.arange(len(index), device=index.device).repeat_interleave(2)
    weights = torch.tensor([1.0, -1.0], dtype=torch.float64, device=index.device).repeat(len(index))
    return Design(rows, index.reshape(-1), weights, (len(index), num_inputs))


def sums(groups: Tensor, weights: Tensor | None = None) -> Design:
    """Return the design of totals: datum g depends on the sum of w_p f_p over the inputs p of group g.

    Args:
        groups: of each input (P,), whole numbers from 0 to G - 1; every one of these has to occur.
        weights: w_p (P,), such as areas or days; ones by default.

    Raises:
        TypeError, ValueError: as :class:`Design`; a group that does not occur is a row without entries.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> f = MultivariateNormal(torch.tensor([1.0, 3.0, 5.0]), torch.eye(3))
        >>> sums(torch.tensor([0, 0, 1]))(f).mean
        tensor([4., 5.])
    """
    check_tensor("groups", groups)
    if groups.dim() != 1 or len(groups) == 0:
        raise ValueError(f"expected the group of each input, a vector (P,); got shape {tuple(groups.shape)}.")
    weights = torch.ones(len(groups), dtype=torch.float64, device=groups.device) if weights is None else weights
    columns = torch.arange(len(groups), device=groups.device)
    return Design(groups, columns, weights, (int(groups.max()) + 1, len(groups)))


def averages(groups: Tensor, weights: Tensor | None = None) -> Design:
    """Return the design of weighted means over groups: :func:`sums`, each row divided by its sum of weights.

    Raises:
        TypeError, ValueError: as :func:`sums`, or weights that are not positive.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> f = MultivariateNormal(torch.tensor([1.0, 3.0, 5.0]), torch.eye(3))
        >>> averages(torch.tensor([0, 0, 1]))(f).mean
        tensor([2., 5.])
    """
    total = sums(groups, weights)
    if not bool((total.weights > 0).all()):
        raise ValueError(f"weights of an average must be positive; got a smallest of {float(total.weights.min()):g}.")
    sizes = torch.zeros_like(total.weights[:1]).expand(total.num_data).clone()
    sizes = sizes.index_add_(0, total.rows, total.weights)
    return Design(total.rows, total.columns, total.weights / sizes[total.rows], (total.num_data, total.shape[1]))


def _index(name: str, values: Tensor, size: int) -> Tensor:
    """Return indices as int64.

    Raises:
        TypeError: they are not whole numbers.
        ValueError: one is out of range.
    """
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{name} must be whole numbers, indices; got {values.dtype}.")
    values = values.long()
    outside = ((values < 0) | (values >= size)).nonzero()
    if len(outside):
        place = tuple(outside[0].tolist())
        raise ValueError(f"{name} must be from 0 to {size - 1}; got {int(values[place])} at index {show_index(place)}.")
    return values


def rows_of(matrix: Any) -> Design:
    """Return the design of a matrix (N, P), dense or sparse.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> f = MultivariateNormal(torch.tensor([1.0, 3.0, 5.0]), torch.eye(3))
        >>> rows_of(torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 2.0]]))(f).mean
        tensor([ 2., 10.])
    """
    check_tensor("matrix", matrix)
    if matrix.dim() != 2:
        raise ValueError(f"expected a matrix (N, P); got shape {tuple(matrix.shape)}.")
    entries = matrix.to_sparse_coo().coalesce()
    rows, columns = entries.indices()
    return Design(rows, columns, entries.values(), (matrix.size(0), matrix.size(1)))
