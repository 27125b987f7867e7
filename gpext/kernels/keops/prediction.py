"""Predictions of an ExactGP with lazy kernels: gpytorch's, with solves that are accurate and share a preconditioner."""

from __future__ import annotations

from typing import Any

from gpytorch import settings
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from gpytorch.utils.memoize import cached
from linear_operator import to_dense
from linear_operator.operators import LinearOperator, MatmulLinearOperator, SumLinearOperator
from torch import Tensor

from gpext.linalg.added_diagonal import split_diagonal
from gpext.operators import KeptOnce, KernelOperator, PreconditionedSum


class LazyPrediction(DefaultPredictionStrategy):
    """gpytorch's prediction strategy, whose solves with K + D are those of :class:`gpext.operators.PreconditionedSum`.

    All else is gpytorch's, and so are predictions of batches, of small models whose K is stored, with missing
    observations, with `fast_pred_var`, and without `detach_test_caches`. The arguments are gpytorch's, too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        covariance = self.lik_train_train_covar.evaluate_kernel()
        self._covariance = None
        both = split_diagonal(covariance)
        if both is not None and not covariance.batch_shape and _is_lazy(both[0]):
            self._covariance = PreconditionedSum(*both, kept=KeptOnce()).detach()

    @cached(name="mean_cache")
    def _mean_cache(self, nan_policy: str) -> Tensor:
        if self._covariance is None or nan_policy != "ignore" or settings.detach_test_caches.off():
            return super()._mean_cache(nan_policy)
        return self._covariance.solve((self.train_labels - self.train_prior_dist.mean).detach())

    def exact_predictive_covar(
        self, test_test_covar: LinearOperator, test_train_covar: LinearOperator
    ) -> LinearOperator:
        """Return the posterior covariance of S new values (..., S, S), given their prior covariances (..., S, N)."""
        gpytorchs = (settings.skip_posterior_variances.on(), settings.fast_pred_var.on())
        if self._covariance is None or any(gpytorchs) or settings.detach_test_caches.off():
            return super().exact_predictive_covar(test_test_covar, test_train_covar)
        rows = to_dense(test_train_covar)
        return test_test_covar + MatmulLinearOperator(rows, -self._covariance.solve(rows.mT))


def _is_lazy(K: LinearOperator) -> bool:
    parts = K.linear_ops if isinstance(K, SumLinearOperator) else [K]
    return any(isinstance(part, KernelOperator) for part in parts)
