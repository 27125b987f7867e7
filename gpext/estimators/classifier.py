"""Classification of two or more classes, a scikit-learn estimator."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d
from torch import Tensor
from torch.nn.functional import one_hot

from gpext.estimators.base import GPEstimator
from gpext.estimators.counts_of_classes import WeightedClasses
from gpext.estimators.failures import all_or_nothing
from gpext.estimators.table import read_table
from gpext.estimators.task import Rules
from gpext.inference import EP, KL, Laplace
from gpext.likelihoods import BernoulliLogitLikelihood, MultinomialLogitLikelihood

_SITES = 1e-3  # tolerance of KL's sites of several classes; probabilities err by less than it
_TOLERANCE = 1e-7  # of expected log densities: sites and inducing points leave far larger errors


class ClassEstimator(ClassifierMixin, GPEstimator):
    """The common part of classifiers: labels in, probabilities out."""

    _link = "logit"
    _stored = (*GPEstimator._stored, "classes_")

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> ClassEstimator:
        """Train on a table and labels.

        Args:
            X: (n, d), an array or a DataFrame of pandas or Polars, whose other than numeric columns are categories.
            y: labels (n,), of at least two classes.
            sample_weight: weights (n,) of the rows, not negative; one each if None.

        Returns:
            The estimator itself.

        Raises:
            TypeError, ValueError: bad data or options.
        """
        raw = read_table(self, X, reset=True)
        labels = _labels(y)
        if len(labels) != len(raw):
            raise ValueError(f"X and y must be equally long; got {len(raw)} rows and {len(labels)} labels.")
        known, numbers = np.unique(labels, return_inverse=True)
        rows = self._distinct_rows(raw, numbers, sample_weight)
        self.classes_ = self._ordered(known[np.unique(rows.targets)])
        if len(self.classes_) < 2:
            raise ValueError(
                f"{type(self).__name__} needs labels of at least two classes; got 1 class, {self.classes_[0]!r}."
            )
        self._train(rows._replace(targets=self._codes(known[rows.targets])), self._candidates())
        return self

    def _candidates(self) -> dict[str, Callable[[], Any]]:
        return {self._link: self._likelihood}

    def _ordered(self, classes: np.ndarray) -> np.ndarray:
        return classes

    def _codes(self, labels: np.ndarray) -> np.ndarray:
        """Return the numbers (n,) of labels, -1 for one that is not among the classes."""
        order = np.argsort(self.classes_, kind="stable")
        place = np.searchsorted(self.classes_, labels, sorter=order).clip(max=len(order) - 1)
        codes = order[place]
        return np.where(self.classes_[codes] == labels, codes, -1)

    @abstractmethod
    def _likelihood(self) -> Any:
        """Return the likelihood of labels 0, ..., K - 1."""

    def _calibration(self) -> Iterator[str]:
        log_loo = self.model_.result.log_loo
        yield f"the observed class has a mean probability of {float(log_loo.exp().mean()):.3f}"
        rare = 100 * float((log_loo < np.log(0.05)).double().mean())
        yield f"its probability is below 0.05 for {rare:.1f} % of the data"

    def _probabilities(self, q: MultivariateNormal) -> Tensor:
        """Return p(y = k) (n, K) under q."""
        return self.likelihood_(q).probs

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the predictive probabilities (n, K) of the classes in `classes_`, the latent function integrated out.

        Raises:
            NotFittedError, TypeError, ValueError: before `fit`, or another table than at training.
        """
        return self._by_rows(lambda x: self._probabilities(self._latent(x)), self._inputs(X))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return the logarithms of :meth:`predict_proba`."""
        return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each row (n,)."""
        most = self.predict_proba(X).argmax(1)
        return self.classes_[most]

    def log_density(self, X: Any, y: Any) -> np.ndarray:
        """Return the log predictive probability of each label (n,); minus infinity for a class not seen at training."""
        probabilities, codes = self.predict_proba(X), self._codes(_labels(y))
        chosen = probabilities[np.arange(len(codes)), codes]
        with np.errstate(divide="ignore"):
            return np.where(codes >= 0, np.log(chosen), -np.inf)


class GPClassifier(ClassEstimator):
    """A Gaussian process classifier: Bernoulli with logit link for two classes, softmax for more.

    A row of the predictive probabilities is E[softmax(f)] under the posterior of the latent functions, of which there
    is one for two classes and one for each of more. Inputs are standardised inside.

    Args:
        kernel: a gpytorch kernel over the standardised columns, numeric ones before categorical ones. None: Matern-5/2
            with a lengthscale for each numeric column, times a :class:`gpext.kernels.CategoricalKernel`.
        inference: a rule of :mod:`gpext.inference` for the full data; "auto" trains by Laplace's and predicts by
            EP, of more than two classes by KL.
        inducing_points: "auto": none while the full data are few enough, then 64 or more, and of more than two classes
            up to 1024, with hyperparameters from 4000 random rows; None for the full data; a number; or points (M, d)
            in the units of X.
        neighbours: of each row, for the nearest-neighbour prior of :class:`gpext.models.LatentGP`, of what inducing
            points leave, if there are any. "auto", with `inducing_points` at "auto": 20, without inducing points, of
            two classes and up to three columns, beyond 2500 distinct rows and up to 100,000; None for none; or a
            number, of several classes with inference by KL alone if there are inducing points.
        batch_size: "auto": minibatches beyond 100,000 distinct rows; None for all data in each step; or a number.
        skewed_columns: numeric columns of a skewness above 1: "keep"; "yeo_johnson", transformed before they are
            standardised; "auto", the better of the two by leave-one-out predictions of a few hundred rows.
        priors: whether kernels get the priors of :mod:`gpext.priors` where they have none.
        max_steps: of each training; None for the default of :func:`gpext.fit`.
        tolerance: of the objective a datum, as in :func:`gpext.fit`; three tenths of it with inducing points, and
            more of it beyond six classes, all of it from twenty on.
        warm_start: whether another `fit` starts from the hyperparameters of the last.
        random_state: of inducing points, subsets and minibatches; None is one fixed seed.
        verbose: 1 shows progress.

    Attributes:
        classes_: labels (K,).
        model_, likelihood_: the gpytorch modules, in eval mode, of the kernel with a lengthscale for each column. Data
            of the model are the distinct rows of the table, sorted.
        report_: what was chosen and why; print it.
        fit_result_: of the training, a :class:`gpext.FitResult`.
        n_features_in_, feature_names_in_: of the table.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> GPClassifier().fit(X, y).predict_proba(X[:2]).argmax(1)
        array([0, 0])
    """

    _most_mixed = 300

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the predictive probabilities (n, K) of the classes in `classes_`, the latent function integrated out.

        Raises:
            NotFittedError, TypeError, ValueError: before `fit`, or another table than at training.
        """
        inputs = self._inputs(X)
        found = [self._by_rows(lambda x, m=m: self._probabilities(m(x)), inputs) for m in (self.model_, *self._others)]
        return np.average(found, 0, self._weights)

    def _likelihood(self) -> Any:
        if len(self.classes_) == 2:
            return BernoulliLogitLikelihood()
        return MultinomialLogitLikelihood(len(self.classes_), tolerance=_TOLERANCE)

    def _default_rules(self, likelihood: Any, targets: Tensor) -> Rules:
        return Rules(Laplace(), EP() if len(self.classes_) == 2 else KL(tolerance=_SITES))

    def _weighted(
        self, likelihood: Any, targets: Tensor, weights: Tensor, *, sparse: bool = False
    ) -> tuple[Any, Tensor]:
        if len(self.classes_) == 2:
            return super()._weighted(likelihood, targets, weights, sparse=sparse)
        if bool((weights == 1).all()):
            return likelihood, targets
        by_class = one_hot(targets.long(), len(self.classes_)).to(weights) * weights.unsqueeze(-1)
        return WeightedClasses(len(self.classes_), tolerance=_TOLERANCE), by_class

    def _probabilities(self, q: MultivariateNormal) -> Tensor:
        if len(self.classes_) > 2:
            return self._likelihood()(q).probs  # of one label, also where the training data have weights
        second = self.likelihood_(q).probs
        return torch.stack([1 - second, second], -1)


def _labels(y: Any) -> np.ndarray:
    """Return labels (n,).

    Raises:
        ValueError: missing labels, or numbers that are no classes.
    """
    if y is None:
        raise ValueError("requires y to be passed, but the target y is None.")
    labels = column_or_1d(y, warn=True)
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        row = int(np.flatnonzero(~np.isfinite(labels))[0])
        raise ValueError(f"Input y contains NaN or infinity, first in row {row}; drop the rows without a label.")
    check_classification_targets(labels)
    return labels
