"""Survival times, some of them censored, an estimator with scikit-survival's conventions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from gpytorch.constraints import Interval
from gpytorch.priors import LogNormalPrior
from sklearn.utils import Tags
from sklearn.utils.validation import check_array, column_or_1d
from torch import Tensor

from gpext.estimators.base import GPEstimator
from gpext.estimators.failures import all_or_nothing
from gpext.estimators.rows import Rows, unweighted
from gpext.estimators.table import read_table
from gpext.estimators.task import Settings
from gpext.likelihoods import (
    Censored,
    LogLogisticLikelihood,
    LogNormalLikelihood,
    WeibullLikelihood,
)
from gpext.survival import ParametricHazard, concordance_index

_SOME = 500  # rows that tell the family where there are too many for all
_FAMILIES = {"weibull": WeibullLikelihood, "log_logistic": LogLogisticLikelihood, "log_normal": LogNormalLikelihood}


def _censored(family: Callable[..., Any]) -> Censored:
    """Return the likelihood of censored times of one family."""
    # Few times, all of them exact, may be explained without noise: the shape stays where times vary by 1 % or more.
    constraint = Interval(1e-2, 1e2, initial_value=1.0)
    return Censored(family(shape_prior=LogNormalPrior(0.0, 1.0), shape_constraint=constraint))


class GPSurvival(GPEstimator):
    """Gaussian process regression of survival times: log T = f(x) + noise of a family, right-censored.

    Targets are as in scikit-survival: a structured array (n,) whose first field says whether the event was observed and
    whose second is the time of the event or of censoring. A plain array of times is one without censoring.

    Args:
        family: "weibull", "log_logistic", "log_normal", or "auto", the best of the three by leave-one-out log density,
            with inducing points by that of 500 random rows.
        kernel, inference, inducing_points, batch_size, skewed_columns, priors: as of :class:`GPRegressor`.
        neighbours: as of :class:`GPClassifier`, where p(y | f) has one latent function.
        max_steps, tolerance, warm_start, random_state, verbose: as of :class:`GPRegressor`.

    Attributes:
        likelihood_name_: the family that was chosen.
        unique_times_: the times at training, sorted.
        model_, likelihood_, report_, fit_result_, n_features_in_, feature_names_in_: as of
            :class:`gpext.estimators.GPRegressor`.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> X, end = rng.standard_normal((40, 2)), rng.uniform(0, 3, 40)
        >>> time = np.exp(X[:, 0]) * rng.weibull(2.0, 40)
        >>> y = np.array(list(zip(time <= end, np.minimum(time, end))), dtype=[("event", bool), ("time", float)])
        >>> GPSurvival("weibull").fit(X, y).predict_survival_function(X[:2], times=[0.5, 1.0]).shape
        (2, 2)
    """

    _stored = (*GPEstimator._stored, "unique_times_", "_unit")

    def __init__(
        self,
        family: str = "auto",
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
        """Return the tags of scikit-learn: targets are required, and positive."""
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.positive_only = True
        return tags

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> GPSurvival:
        """Train on a table and times.

        Args:
            X: (n, d), an array or a DataFrame.
            y: events and times (n,), see the class.
            sample_weight: weights (n,) of the rows, not negative.

        Returns:
            The estimator itself.

        Raises:
            TypeError, ValueError: bad data or options.
        """
        likelihoods = self._candidates()
        raw = read_table(self, X, reset=True)
        event, time = read_survival(y, len(raw))
        limits = np.stack([time, np.where(event, time, np.inf)], 1)
        rows = self._distinct_rows(raw, limits, sample_weight)
        times = rows.targets[:, 0]
        self.unique_times_ = np.unique(times)
        # In units of the geometric mean of the times a latent function about zero is of the size of the data.
        self._unit = math.exp(np.average(np.log(times), weights=rows.weights))
        self._train(rows._replace(targets=rows.targets / self._unit), likelihoods)
        return self

    def _candidates(self) -> dict[str, Callable[[], Any]]:
        names = tuple(_FAMILIES) if self.family == "auto" else (self.family,)
        if any(name not in _FAMILIES for name in names):
            raise ValueError(f"family must be 'auto', {', '.join(map(repr, _FAMILIES))}; got {self.family!r}.")
        return {name: partial(_censored, _FAMILIES[name]) for name in names}

    def _choose_sparse(
        self, rows: Rows, likelihoods: dict[str, Callable[[], Any]], settings: Settings
    ) -> tuple[str, str]:
        """Return the family of the best leave-one-out predictions of some rows: none is the most general."""
        some = rows.some(_SOME, settings.seed)
        scores = {
            name: self._train_on_some(some, self._columns, make, settings).score for name, make in likelihoods.items()
        }
        told = ", ".join(f"{score:.4f} with {name}" for name, score in scores.items())
        chosen = max(scores, key=lambda name: scores[name])
        return chosen, f"family {chosen!r} by the leave-one-out log density of {len(some.raw)} random rows: {told}"

    def _hazard(self, X: Any) -> ParametricHazard:
        inputs = self._inputs(X)

        def moments(x: Tensor) -> Tensor:
            q = self._latent(x)
            return torch.stack([q.mean, q.variance], -1)

        found = self._by_rows(moments, inputs)
        return ParametricHazard(unweighted(self.likelihood_), *torch.from_numpy(found).unbind(-1))

    def predict(self, X: Any) -> np.ndarray:
        """Return risk scores (n,), minus the logarithm of the median survival time: the larger, the sooner.

        Raises:
            NotFittedError, TypeError, ValueError: before `fit`, or another table than at training.
        """
        return -np.log(np.asarray(self.predict_quantiles(X, 0.5)))

    def predict_quantiles(self, X: Any, q: Any = (0.25, 0.5, 0.75)) -> np.ndarray:
        """Return the times (n, Q) until which an event has probability q (Q,), or (n,) of one probability.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict`, or a probability outside (0, 1).
        """
        inputs = self._inputs(X)
        return self._unit * self._quantiles_of(lambda x: self.likelihood_(self._latent(x)), q, inputs)

    def predict_survival_function(self, X: Any, times: Any = None) -> np.ndarray:
        """Return the predictive probabilities (n, T) of no event until each time.

        Args:
            X: (n, d).
            times: (T,), not negative; `unique_times_` if None.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict`, or times that are negative or not finite.
        """
        return self._hazard(X).survival(self._times(times)).mean.detach().numpy()

    def predict_cumulative_hazard_function(self, X: Any, times: Any = None) -> np.ndarray:
        """Return the mean cumulative hazards (n, T) at times (T,); see :meth:`predict_survival_function`."""
        return self._hazard(X).cumulative_hazard(self._times(times)).mean.detach().numpy()

    def _times(self, times: Any) -> Tensor:
        """Return times (T,) in the unit of the likelihood, those at training if None."""
        return torch.as_tensor(np.asarray(self.unique_times_ if times is None else times, float) / self._unit)

    def log_density(self, X: Any, y: Any) -> np.ndarray:
        """Return the log predictive density (n,) of each time, or the log probability of living longer if censored.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict`, or bad targets.
        """
        hazard = self._hazard(X)
        event, time = read_survival(y, len(hazard.mean))
        found = hazard.log_density(torch.from_numpy(time / self._unit), torch.from_numpy(event))
        return found.detach().numpy() - event * math.log(self._unit)

    def score(self, X: Any, y: Any) -> float:
        """Return the concordance index of the risk scores: the probability to order two comparable subjects rightly.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict`, or targets of which no two can be compared.
        """
        risk = self.predict(X)
        event, time = read_survival(y, len(risk))
        return float(concordance_index(torch.from_numpy(time), torch.from_numpy(event), torch.from_numpy(risk)).index)


def read_survival(y: Any, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return events (n,), logical values, and times (n,) of targets as in scikit-survival.

    Raises:
        ValueError: targets of another form, missing, or times that are not positive and finite.
    """
    if y is None:
        raise ValueError("requires y to be passed, but the target y is None.")
    names = getattr(getattr(y, "dtype", None), "names", None)
    if names is not None:
        if len(names) != 2 or y[names[0]].dtype.kind != "b":
            raise ValueError(
                "a structured y has two fields, first whether the event was observed (bool), then the time; got "
                f"{names}."
            )
        event, time = np.ascontiguousarray(y[names[0]]), np.ascontiguousarray(y[names[1]], float)
    else:
        time = column_or_1d(check_array(y, ensure_2d=False, dtype=np.float64, input_name="y"), warn=True)
        event = np.ones(len(time), bool)
    if len(time) != size:
        raise ValueError(f"X and y must be equally long; got {size} rows and {len(time)} times.")
    wrong = ~np.isfinite(time) | (time <= 0)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"times in y must be positive and finite; got {time[row]} in row {row}.")
    return event, time
