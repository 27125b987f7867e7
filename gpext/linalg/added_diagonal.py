"""A covariance K + D that linear_operator keeps as a sum, taken apart."""

from __future__ import annotations

from linear_operator.operators import AddedDiagLinearOperator, DiagLinearOperator, LinearOperator


def split_diagonal(covariance: LinearOperator) -> tuple[LinearOperator, DiagLinearOperator] | None:
    """Return K and the diagonal D, of whichever order; None if the covariance is not kept as such a sum."""
    if not isinstance(covariance, AddedDiagLinearOperator):
        return None
    first, second = covariance.linear_ops
    if isinstance(second, DiagLinearOperator):
        return first, second
    assert isinstance(first, DiagLinearOperator)  # as AddedDiagLinearOperator itself demands
    return second, first
