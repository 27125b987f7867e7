"""The softmax likelihood of weighted labels: counts by class that need not be whole."""

from __future__ import annotations

from torch import Tensor

from gpext.likelihoods import MultinomialLogitLikelihood


class WeightedClasses(MultinomialLogitLikelihood):
    """Weights by class (..., N, K), of which each row has one: a label of weight w is p(y | f)^w."""

    def __init__(self, num_classes: int, *, tolerance: float = 1e-11) -> None:
        super().__init__(num_classes, total_count=None, tolerance=tolerance)

    def check_support(self, targets: Tensor) -> None:
        """Accept any numbers: the estimator has checked them."""
