"""Classification of ordered classes, a scikit-learn estimator."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpext.estimators.classifier import ClassEstimator
from gpext.likelihoods import OrdinalProbitLikelihood


class GPOrdinalClassifier(ClassEstimator):
    """A Gaussian process classifier of ordered classes: one latent function and learnt cutpoints, probit link.

    Args:
        categories: the classes, lowest first; None for the labels in sorted order. Classes without a datum are allowed
            between others.
        kernel, inference, inducing_points, batch_size, skewed_columns, priors: as of :class:`GPClassifier`.
        neighbours: as of :class:`GPClassifier`, where p(y | f) has one latent function.
        max_steps, tolerance, warm_start, random_state, verbose: as of :class:`GPClassifier`.

    Attributes:
        classes_: labels (K,), lowest first.
        model_, likelihood_, report_, fit_result_, n_features_in_, feature_names_in_: as of :class:`GPClassifier`.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(0, 1, 30)[:, None]
        >>> grades = np.array(["low", "middle", "high"])[np.minimum(X[:, 0] * 3, 2).astype(int)]
        >>> model = GPOrdinalClassifier(categories=["low", "middle", "high"]).fit(X, grades)
        >>> model.predict(X[[0, -1]]).tolist()
        ['low', 'high']
    """

    _link = "probit"

    def __init__(
        self,
        categories: Any = None,
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
        self.categories = categories

    def _ordered(self, classes: np.ndarray) -> np.ndarray:
        if self.categories is None:
            return classes
        categories = np.asarray(self.categories)
        if categories.ndim != 1 or len(np.unique(categories)) < len(categories):
            raise ValueError(f"categories must be the classes in order, each once; got {self.categories!r}.")
        unknown = classes[~np.isin(classes, categories)]
        if len(unknown):
            raise ValueError(f"y has labels that are not among the categories: {unknown[:5].tolist()}.")
        return categories

    def _likelihood(self) -> Any:
        return OrdinalProbitLikelihood(len(self.classes_))
