"""Regression of counts, with exposures, a scikit-learn estimator."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.utils import Tags
from torch import Tensor
from torch.distributions import Distribution, Normal

from gpext.bounds import num_latents
from gpext.estimators.failures import all_or_nothing
from gpext.estimators.regressor import TargetEstimator, conditional, ends_of
from gpext.estimators.rows import unweighted
from gpext.estimators.table import read_table
from gpext.likelihoods import (
    LatentLikelihood,
    NegativeBinomialLogLikelihood,
    Offset,
    PoissonLikelihood,
    ZeroInflated,
)


class _Poisson(PoissonLikelihood):
    def check_support(self, targets: Tensor) -> None:
        """Accept what the estimator has checked: y! is Gamma(y + 1) where y is not whole."""


class _NegativeBinomial(NegativeBinomialLogLikelihood):
    def check_support(self, targets: Tensor) -> None:
        """Accept what the estimator has checked: y! is Gamma(y + 1) where y is not whole."""


_FAMILIES: dict[str, Callable[[], Any]] = {
    "poisson": _Poisson,
    "negative_binomial": _NegativeBinomial,
    "zero_inflated": lambda: ZeroInflated(_Poisson()),
}


class GPCountRegressor(TargetEstimator):
    """Gaussian process regression of counts y with rates e^f, or mean exposure times e^f.

    Args:
        family: "poisson"; "negative_binomial", over-dispersed; "zero_inflated", Poisson with additional zeros; "auto",
            the better of the first two by leave-one-out log density; or a likelihood of counts, which is copied.
        kernel, inference, inducing_points, batch_size, skewed_columns, priors: as of :class:`GPRegressor`.
        neighbours: as of :class:`GPClassifier`, where p(y | f) has one latent function.
        max_steps, tolerance, warm_start, random_state, verbose: as of :class:`GPRegressor`.

    `fit(X, y, exposure=...)` takes exposures (n,): times, areas, numbers at risk. `predict(X, exposure=...)` is for
    these, and for exposures of one without. Targets that are not whole are taken as counts of a likelihood whose y! is
    Gamma(y + 1), as scikit-learn's PoissonRegressor does.

    Attributes:
        likelihood_name_: the family that was chosen.
        model_, likelihood_, report_, fit_result_, n_features_in_, feature_names_in_: as of :class:`GPRegressor`.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> X = rng.uniform(0, 6, (60, 1))
        >>> exposure = rng.uniform(1, 5, 60)
        >>> y = rng.poisson(exposure * np.exp(np.sin(X[:, 0])))
        >>> GPCountRegressor("poisson").fit(X, y, exposure=exposure).predict(X[:2], exposure=exposure[:2]).shape
        (2,)
    """

    _stored = (*TargetEstimator._stored, "_log_rate", "_whole")

    def __init__(
        self,
        family: Any = "auto",
        *,
        kernel: Any = None,
        inference: Any = "auto",
        inducing_points: Any = "auto",
        neighbours: Any = "auto",
        batch_size: Any = "auto",
        skewed_columns: str = "auto",
        priors: bool = True,
        max_steps: int | None = None,
        tolerance: float = 1e-3,
        warm_start: bool = False,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            kernel=kernel,
            inference=inference,
            inducing_points=inducing_points,
            neighbours=neighbours,
            batch_size=batch_size,
            skewed_columns=skewed_columns,
            priors=priors,
            max_steps=max_steps,
            tolerance=tolerance,
            warm_start=warm_start,
            random_state=random_state,
            verbose=verbose,
        )
        self.family = family

    def __sklearn_tags__(self) -> Tags:
        """Return the tags of scikit-learn: targets are not negative."""
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, exposure: Any = None) -> GPCountRegressor:
        """Train on a table and counts.

        Args:
            X: (n, d), an array or a DataFrame.
            y: counts (n,), not negative.
            sample_weight: weights (n,) of the rows, not negative.
            exposure: positive numbers (n,) that the means are proportional to; 1 if None.

        Returns:
            The estimator itself.

        Raises:
            TypeError, ValueError: bad data or options.
        """
        likelihoods = self._candidates()
        raw = read_table(self, X, reset=True)
        counts, offsets = self._targets(y, len(raw)), np.log(_exposures(exposure, len(raw)))
        rows = self._distinct_rows(raw, np.stack([counts, offsets], 1), sample_weight)
        _, targets, weights = rows
        # f is about zero at the mean rate.
        mean, exposed = np.average(targets[:, 0], weights=weights), np.average(np.exp(targets[:, 1]), weights=weights)
        self._log_rate = math.log(max(mean, 0.5 / weights.sum()) / exposed)
        targets[:, 1] += self._log_rate
        self._whole = bool((targets[:, 0] % 1 == 0).all())
        self._train(rows, likelihoods)
        return self

    def _candidates(self) -> dict[str, Callable[[], Any]]:
        if isinstance(self.family, LatentLikelihood):
            return {type(self.family).__name__: lambda: Offset(copy.deepcopy(self.family))}
        names = ("poisson", "negative_binomial") if self.family == "auto" else (self.family,)
        if any(not isinstance(name, str) or name not in _FAMILIES for name in names):
            raise ValueError(
                f"family must be 'auto', {', '.join(map(repr, _FAMILIES))}, or a likelihood of counts; got "
                f"{self.family!r}."
            )
        return {name: partial(_exposed, name) for name in names}

    def _targets(self, y: Any, size: int) -> np.ndarray:
        targets = super()._targets(y, size)
        if (targets < 0).any():
            row = int(np.flatnonzero(targets < 0)[0])
            raise ValueError(f"y must be counts, not negative; got {targets[row]:g} in row {row}.")
        return targets

    def _calibration(self) -> Iterator[str]:
        return super()._calibration() if self._whole else iter(())

    def _predictive(self, x: Tensor, offset: Tensor) -> Distribution:
        return self.likelihood_(self._latent(x), offset=offset)

    def _places(self, X: Any, offset: Any = None) -> tuple[Tensor, Tensor]:
        inputs = self._inputs(X)
        return inputs, torch.from_numpy(np.log(_exposures(offset, len(inputs))) + self._log_rate)

    def predict(self, X: Any, return_std: bool = False, *, exposure: Any = None) -> Any:
        """Return the predictive means (n,) of counts, and with `return_std` the standard deviations.

        Raises:
            NotFittedError, TypeError, ValueError: before `fit`, another table than at training, or bad exposures.
        """
        return self._moments(*self._places(X, exposure), return_std)

    def predict_quantiles(self, X: Any, q: Any = (0.05, 0.5, 0.95), *, exposure: Any = None) -> np.ndarray:
        """Return the predictive quantiles (n, Q) at probabilities q (Q,), or (n,) of one probability.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict`, or a probability outside (0, 1).
        """
        return self._quantiles(*self._places(X, exposure), q)

    def predict_interval(self, X: Any, coverage: float = 0.9, *, exposure: Any = None) -> np.ndarray:
        """Return central predictive intervals (n, 2), which contain a new count with probability `coverage` at least.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict_quantiles`.
        """
        return self._quantiles(*self._places(X, exposure), ends_of(coverage))

    def predict_rate_interval(self, X: Any, coverage: float = 0.9, *, exposure: Any = None) -> np.ndarray:
        """Return central intervals (n, 2) of the mean count E[y | f], of the rate where there is no exposure.

        They contain it with probability `coverage` under the posterior of f; the scatter of counts about their mean is
        no part of them.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict_quantiles`.
            NotImplementedError: a likelihood of several latent functions.
        """
        if num_latents(self.likelihood_) is not None:
            raise NotImplementedError(
                f"the mean of a {self.likelihood_name_} depends on several latent functions; use sample_y."
            )
        low, high = ends_of(coverage)

        def ends(x: Tensor, offset: Tensor) -> Tensor:
            q = self._latent(x)
            f = Normal(q.mean + offset, q.variance.sqrt())
            return torch.stack(
                [conditional(self.likelihood_, f.icdf(q.mean.new_tensor(end))).mean for end in (low, high)], -1
            )

        inputs, offset = self._places(X, exposure)
        return self._by_rows(ends, inputs, offset)

    def log_density(self, X: Any, y: Any, *, exposure: Any = None) -> np.ndarray:
        """Return the log predictive probability (n,) of counts.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict`, or counts that are negative or not finite.
        """
        inputs, offset = self._places(X, exposure)
        targets = torch.stack([torch.from_numpy(self._targets(y, len(inputs))), offset], -1)
        likelihood = unweighted(self.likelihood_)
        return self._by_rows(lambda x, some: likelihood.log_marginal(some, self._latent(x)), inputs, targets)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = None, *, exposure: Any = None) -> np.ndarray:
        """Return draws (n, n_samples) of new counts: f jointly at all rows, then y given f.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict`.
        """
        return self._draws(*self._places(X, exposure), n_samples, random_state)


def _exposed(name: str) -> Offset:
    """Return the likelihood of a family whose targets are pairs (count, logarithm of the exposure)."""
    return Offset(_FAMILIES[name]())


def _exposures(exposure: Any, size: int) -> np.ndarray:
    """Return exposures (n,).

    Raises:
        ValueError: exposures that are not positive and finite, or not one for each row.
    """
    if exposure is None:
        return np.ones(size)
    values = np.asarray(exposure, float)
    values = np.full(size, values) if values.ndim == 0 else values
    if values.shape != (size,):
        raise ValueError(f"exposure must be one number for each of {size} rows; got shape {values.shape}.")
    wrong = ~np.isfinite(values) | (values <= 0)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"exposure must be positive and finite; got {values[row]:g} in row {row}.")
    return values
