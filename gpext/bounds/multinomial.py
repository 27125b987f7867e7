"""Bounds made of an upper bound on E[log sum_k exp(f_k)], for the multinomial and categorical logit likelihoods."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from gpext.bounds.bound import Bound, LocalBound, MultinomialTerms


class MultinomialBound(Bound):
    """A bound made of an upper bound on E[log sum_k exp(f_k)], f_k ~ N(m_k, v_k) independently."""

    @abstractmethod
    def expected_log_sum_exp(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return an upper bound on E[log sum_k exp(f_k)] (..., N); mean and variance are (..., K, N)."""

    def bind(self, likelihood: Any, targets: Tensor) -> LocalBound:
        """Return the bound as a function of the marginals (..., K, N), as :meth:`Bound.bind`."""
        if not hasattr(likelihood, "multinomial_terms"):
            raise TypeError(
                f"{type(self).__name__} bounds log sum_k exp(f_k) and serves the multinomial and categorical logit "
                f"likelihoods; for {type(likelihood).__qualname__} use gpext.bounds.Quadrature()."
            )
        terms: MultinomialTerms = likelihood.multinomial_terms(targets)
        return lambda mean, variance: self._lower_bound(terms, mean, variance)

    def __call__(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the lower bound on E[log p(y | f)] of the multinomial logit likelihood, (..., N).

        Args:
            targets: class labels 0..K-1 (..., N), or counts (..., N, K) with as many dimensions as `mean`; counts
                bring the multinomial coefficient.
            mean: (..., K, N).
            variance: (..., K, N).

        Raises:
            ValueError: labels outside 0..K-1, or counts that are not nonnegative integers.
        """
        mean, variance = torch.broadcast_tensors(mean, variance)
        return self._lower_bound(_terms(targets, mean), mean, variance)

    def _lower_bound(self, terms: MultinomialTerms, mean: Tensor, variance: Tensor) -> Tensor:
        expected = self.expected_log_sum_exp(mean, variance)
        return terms.constant + (terms.counts * mean).sum(-2) - terms.total * expected


def _terms(targets: Tensor, mean: Tensor) -> MultinomialTerms:
    num_classes = mean.size(-2)
    if targets.dim() < mean.dim():
        if bool(((targets != targets.round()) | (targets < 0) | (targets >= num_classes)).any()):
            raise ValueError(f"labels must be integers in 0..{num_classes - 1}; got {_span(targets)}.")
        counts = torch.nn.functional.one_hot(targets.long(), num_classes).mT.to(mean)
        return MultinomialTerms(torch.zeros_like(counts[..., 0, :]), counts, torch.ones_like(counts[..., 0, :]))
    if targets.size(-1) != num_classes:
        raise ValueError(f"counts must be (..., N, K = {num_classes}); got shape {tuple(targets.shape)}.")
    if bool(((targets != targets.round()) | (targets < 0)).any()):
        raise ValueError(f"counts must be nonnegative integers; got {_span(targets)}.")
    counts = targets.mT.to(mean)
    total = counts.sum(-2)
    return MultinomialTerms(torch.lgamma(total + 1) - torch.lgamma(counts + 1).sum(-2), counts, total)


def _span(targets: Tensor) -> str:
    return f"values from {targets.min().item():g} to {targets.max().item():g}"
