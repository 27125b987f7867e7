"""Distinct rows with weights: equal rows are one row of a larger weight, in an order that is theirs alone.

A likelihood is a product over data, so that w equal rows (x, y) are one row whose density is raised to the power w. Put
together and sorted, data in another order, repeated data and data with whole weights are one and the same problem.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpext.likelihoods import Weighted


class Rows(NamedTuple):
    """Distinct rows of a table, numbers and codes (n, d), their targets (n,) or (n, k), and weights (n,)."""

    raw: np.ndarray
    targets: np.ndarray
    weights: np.ndarray

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Targets and weights, float64."""
        return torch.from_numpy(np.ascontiguousarray(self.targets, float)), torch.from_numpy(self.weights)

    def some(self, size: int, seed: int) -> Rows:
        """Return random ones, up to `size`."""
        index = np.random.default_rng(seed).permutation(len(self.raw))[:size]
        return Rows(self.raw[index], self.targets[index], self.weights[index])


def read_weights(sample_weight: Any, raw: np.ndarray) -> np.ndarray:
    """Return the weights (n,) of the rows of a table, one each if None.

    Raises:
        ValueError: weights that are negative, not finite, all zero or not one for each row.
    """
    if sample_weight is None:
        return np.ones(len(raw))
    weights = np.asarray(sample_weight, float)
    if weights.ndim == 0:
        weights = np.full(len(raw), weights)
    if weights.shape != (len(raw),):
        raise ValueError(f"sample_weight must be one number for each of {len(raw)} rows; got shape {weights.shape}.")
    wrong = ~np.isfinite(weights) | (weights < 0)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"sample_weight must be finite and not negative; got {weights[row]} in row {row}.")
    if not weights.any():
        raise ValueError("Sample weights must contain at least one non-zero number.")
    return weights


def distinct_rows(
    raw: np.ndarray, targets: np.ndarray, sample_weight: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct rows of positive weight: their table (m, d), targets and summed weights (m,), and places.

    The place of each given row (n,) is that of its distinct row, -1 if it has no weight.

    Args:
        raw: (n, d).
        targets: (n,) or (n, k), numbers.
        sample_weight: see :func:`read_weights`.

    Raises:
        ValueError: as :func:`read_weights`.
    """
    weights = read_weights(sample_weight, raw)
    used = weights > 0
    raw, targets, weights = raw[used], targets[used], weights[used]
    rows = np.concatenate([raw, targets.reshape(len(raw), -1)], 1)
    _, first, group = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    places = np.full(len(used), -1)
    places[used] = group.reshape(-1)
    return raw[first], targets[first], np.bincount(group.reshape(-1), weights), places


def unweighted(likelihood: Any) -> Any:
    """Return the likelihood of one observation, which a weighted one holds inside."""
    return likelihood.likelihood if isinstance(likelihood, Weighted) else likelihood
