r"""Condition on sites of negative precision what is conditioned on the others (:mod:`gpext.posteriors.dense`).

With the index set n of the negative ones, T_nn = -Q_n^2, and V1 the covariance given the positive ones:

    B2 = I - Q_n V1_nn Q_n = L2 L2',      W2 = L2^-1 Q_n V1_n:,     V  = V1 + W2' W2

B2 failing means that V is not positive definite.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gpext.linalg.products import times
from gpext.linalg.triangles import factor_whole, solve_lower, solve_whole, take_columns
from gpext.posteriors.positive_factor import PositiveFactor


@dataclass(frozen=True)
class NegativeSites:
    """The correction for the k precisions of each posterior that are not positive; in a batch, the largest k of all.

    Where others have more, the smallest positive precisions fill up; their Q is zero.
    """

    index: Tensor  # n (..., k)
    root: Tensor  # Q_n (..., k)
    whitened_prior: Tensor  # L1^-1 P K_:n, a row a datum that L1 has (..., *, k)
    covariance: Tensor  # V1_:n (..., N, k)
    chol: Tensor  # L2 (..., k, k)

    @cached_property
    def whitened(self) -> Tensor:
        """W2 (..., k, N)."""
        return solve_lower(self.chol, self.root.unsqueeze(-1) * self.covariance.mT)

    @property
    def variance(self) -> Tensor:
        """The diagonal of V1_nn (..., k)."""
        return take_columns(self.covariance.mT, self.index).diagonal(dim1=-2, dim2=-1)

    def respond(self, x: Tensor) -> Tensor:
        """Return Q_n B2^-1 Q_n (V1 x)_n, at n (..., N)."""
        there = times(self.covariance.mT, x)
        solved = solve_whole(self.chol, (self.root * there).unsqueeze(-1)).squeeze(-1)
        return torch.zeros_like(x).expand(*solved.shape[:-1], x.size(-1)).scatter(-1, self.index, self.root * solved)

    def reduce(self, factor: PositiveFactor) -> Tensor:
        """Return L2^-1 Q_n S_n: (..., k, N), S_:n = I_:n - P B1^-1 P K_:n."""
        back = factor.spread(self.whitened_prior)
        ones = torch.ones_like(self.index, dtype=back.dtype).unsqueeze(-2)
        columns = (-back).scatter_add(-2, self.index.unsqueeze(-2).expand_as(back[..., :1, :]), ones)
        return solve_lower(self.chol, self.root.unsqueeze(-1) * columns.mT)

    def condition(self, cross: Tensor, reduced: Tensor) -> Tensor:
        """Return L2^-1 Q_n times the covariance under V1 of f_n and new values (..., k, S).

        Args:
            cross: prior covariance of the training and the new values (..., N, S).
            reduced: L1^-1 P cross.
        """
        rows = take_columns(cross.mT, self.index).mT
        return solve_lower(self.chol, self.root.unsqueeze(-1) * (rows - self.whitened_prior.mT @ reduced))


def condition_on_negative(
    covariance: Tensor, precision: Tensor, factor: PositiveFactor, count: int
) -> tuple[NegativeSites, Tensor]:
    """Return what the `count` lowest precisions add to V1, and whether V is positive definite.

    Args:
        covariance: K (..., N, N).
        precision: of all sites (..., N).
        factor: L1.
        count: k, at least as many as are negative in any of the batch.
    """
    lowest, index = (-precision).topk(count, -1)
    negative = lowest.clamp_min(0).sqrt()
    index = index.expand(*factor.chol.shape[:-2], count)
    columns = take_columns(covariance, index)
    whitened = factor.whiten(columns)
    inner = take_columns(columns.mT, index) - whitened.mT @ whitened  # V1_nn, as where P = 0
    remaining = factor.given(whitened)
    remaining = remaining.scatter(-2, index.unsqueeze(-1).expand(inner.shape), inner)
    chol, ok = factor_whole(inner, negative, sign=-1)
    return NegativeSites(index, negative, whitened, remaining, chol), ok
