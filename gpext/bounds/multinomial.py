"""Bounds made of an upper bound on E[log sum_k exp(f_k)], for the multinomial and categorical logit likelihoods."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from gpext.bounds.bound import Bound, LocalBound, MultinomialTerms
from gpext.bounds.contracts import HasMultinomialTerms


class MultinomialBound(Bound):
    """A bound made of an upper bound on E[log sum_k exp(f_k)], f_k ~ N(m_k, v_k) independently.

    Example:
        >>> from gpext.bounds import LogSumExp
        >>> isinstance(LogSumExp(), MultinomialBound)
        True
    """

    @abstractmethod
    def expected_log_sum_exp(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return an upper bound on E[log sum_k exp(f_k)] (..., N); mean and variance are (..., K, N)."""

    def bind(self, likelihood: Any, targets: Tensor) -> LocalBound:
        """Return the bound as a function of the marginals (..., K, N), as :meth:`Bound.bind`."""
        if not isinstance(likelihood, HasMultinomialTerms):
            raise TypeError(
                f"{type(self).__name__} bounds log sum_k exp(f_k) and serves the multinomial and categorical logit "
                f"likelihoods; for {type(likelihood).__qualname__} use gpext.bounds.Quadrature()."
            )
        terms = likelihood.multinomial_terms(targets)
        return lambda mean, variance: terms.log_prob(mean, self.expected_log_sum_exp(mean, variance))

    def __call__(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the lower bound on E[log p(y | f)] of the multinomial logit likelihood, (..., N).

        Args:
            targets: class labels 0..K-1 (..., N), or counts (..., N, K) with as many dimensions as `mean`; counts
                bring the multinomial coefficient.
            mean: (..., K, N).
            variance: (..., K, N).

        Raises:
            ValueError: means of no classes, labels outside 0..K-1, or counts that are not nonnegative integers.
        """
        mean, variance = torch.broadcast_tensors(mean, variance)
        if mean.dim() < 2:
            raise ValueError(f"expected means and variances (..., K, N) of K classes; got {tuple(mean.shape)}.")
        return _terms(targets, mean).log_prob(mean, self.expected_log_sum_exp(mean, variance))


def _terms(targets: Tensor, mean: Tensor) -> MultinomialTerms:
    num_classes = mean.size(-2)
    if targets.dim() < mean.dim():
        if bool(((targets != targets.round()) | (targets < 0) | (targets >= num_classes)).any()):
            raise ValueError(f"labels must be integers in 0..{num_classes - 1}; got {_span(targets)}.")
        return MultinomialTerms.of_counts(torch.nn.functional.one_hot(targets.long(), num_classes).mT.to(mean))
    if targets.size(-1) != num_classes:
        raise ValueError(f"counts must be (..., N, K = {num_classes}); got shape {tuple(targets.shape)}.")
    if bool(((targets != targets.round()) | (targets < 0)).any()):
        raise ValueError(f"counts must be nonnegative integers; got {_span(targets)}.")
    return MultinomialTerms.of_counts(targets.mT.to(mean))


def _span(targets: Tensor) -> str:
    return f"values from {targets.min().item():g} to {targets.max().item():g}"
