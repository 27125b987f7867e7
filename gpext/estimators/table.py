"""Tables as inputs of a kernel: numbers standardised, categories as codes, the same at training and at prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.preprocessing import PowerTransformer
from sklearn.utils.validation import check_array, validate_data

SKEWED = 1.0  # the skewness of a column from which a transform is tried


@dataclass(frozen=True)
class Columns:
    """The columns of a kernel, and how they follow from those of a table: numeric ones first, then categorical ones.

    Attributes:
        numeric: indices of the numeric columns.
        categorical: indices of the categorical columns.
        skewed: indices of skewed columns among the numeric ones, which `power` makes less so.
        power: Yeo and Johnson's transform of these columns, or None.
        center: weighted means of the numeric columns, transformed.
        scale: their weighted standard deviations, 1 for a constant column.
        names: of the numeric and the categorical columns, in the order of the kernel.
    """

    numeric: np.ndarray
    categorical: np.ndarray
    skewed: np.ndarray
    power: PowerTransformer | None
    center: np.ndarray
    scale: np.ndarray
    names: tuple[str, ...]

    def transform(self, raw: np.ndarray) -> np.ndarray:
        """Return the inputs of the kernel (n, d) for a table of numbers and codes."""
        numbers = _transformed(raw[:, self.numeric], self.skewed, self.power)
        return np.concatenate([(numbers - self.center) / self.scale, raw[:, self.categorical]], 1)


def read_table(estimator: BaseEstimator, X: Any, *, reset: bool) -> np.ndarray:
    """Return a table as float64 (n, d), categories as codes; with `reset` note the names and categories it has.

    Columns of a DataFrame (pandas or Polars) that are neither numbers nor logical values are categorical.

    Args:
        estimator: whose `n_features_in_`, `feature_names_in_` and `categories_` are noted or compared.
        X: an array or a DataFrame.
        reset: at training.

    Raises:
        TypeError, ValueError: scikit-learn's for a table that is sparse, complex, empty, of another number of columns
            or of other names; missing and infinite values of a DataFrame are named by their column.
    """
    columns = _frame_columns(X)
    if columns is None:
        if not reset and estimator.categories_:
            raise TypeError(
                f"this {type(estimator).__name__} was trained on a DataFrame with categorical columns "
                f"({', '.join(map(str, estimator.categories_))}); predict for a DataFrame with the same columns."
            )
        if reset:
            estimator.categories_ = {}
        return validate_data(estimator, X, dtype=np.float64, reset=reset)
    validate_data(estimator, X, skip_check_array=True, reset=reset)
    if reset:
        estimator.categories_ = {name: None for name, values in columns.items() if values.dtype.kind not in "fiub"}
    read = []
    for name, values in columns.items():
        _refuse_missing(name, values)
        if name not in estimator.categories_:
            read.append(_numbers(name, values))
            continue
        if reset:
            estimator.categories_[name] = np.unique(values.astype(str))
        known, text = estimator.categories_[name], values.astype(str)
        place = np.searchsorted(known, text).clip(max=len(known) - 1)
        read.append(np.where(known[place] == text, place, len(known)).astype(float))
    table = np.stack(read, 1) if read else np.zeros((len(X), 0))
    return check_array(table, estimator=estimator, input_name="X")


def fit_columns(estimator: BaseEstimator, raw: np.ndarray, weights: np.ndarray, *, power: bool) -> Columns:
    """Return the columns of a training table, standardised with weights (n,), skewed ones transformed with `power`."""
    names = getattr(estimator, "feature_names_in_", np.array([f"x{j}" for j in range(raw.shape[1])]))
    is_category = np.isin(names, list(estimator.categories_))
    numeric, categorical = np.flatnonzero(~is_category), np.flatnonzero(is_category)
    numbers = raw[:, numeric]
    center, scale, constant = _moments(numbers, weights)
    cubes = np.average(((numbers - center) / scale) ** 3, axis=0, weights=weights)
    skewed = np.flatnonzero(~constant & (np.abs(cubes) > SKEWED))
    transformer = None
    if power and len(skewed):
        transformer = PowerTransformer(standardize=False).fit(numbers[:, skewed])
        center, scale, _ = _moments(_transformed(numbers, skewed, transformer), weights)
    kept = tuple(str(name) for name in names[np.concatenate([numeric, categorical])])
    return Columns(numeric, categorical, skewed, transformer, center, scale, kept)


def _moments(numbers: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weighted means and deviations (d,), and which columns are constant but for rounding: they have scale 1."""
    center = np.average(numbers, axis=0, weights=weights)
    scale = np.sqrt(np.average((numbers - center) ** 2, axis=0, weights=weights))
    constant = np.ptp(numbers, axis=0) <= 10 * np.finfo(float).eps * np.abs(center)  # a sum's rounding grows with rows
    return center, np.where(constant, 1.0, scale), constant


def _transformed(numbers: np.ndarray, skewed: np.ndarray, power: PowerTransformer | None) -> np.ndarray:
    if power is None:
        return numbers
    numbers = numbers.copy()
    numbers[:, skewed] = power.transform(numbers[:, skewed])
    return numbers


def _frame_columns(X: Any) -> dict[Any, np.ndarray] | None:
    """Return the columns of a DataFrame by name as arrays, or None for anything else."""
    if not (hasattr(X, "columns") and hasattr(X, "dtypes") and hasattr(X, "__getitem__")):
        return None
    names = list(X.columns)
    if len(set(names)) < len(names):
        raise ValueError("the columns of a DataFrame must have different names.")
    return {name: np.asarray(X[name]) for name in names}


def _refuse_missing(name: Any, values: np.ndarray) -> None:
    """Raise ValueError if a column has a missing or infinite value."""
    if values.dtype.kind == "f":
        missing = ~np.isfinite(values)
    elif values.dtype.kind == "O":
        missing = np.array([value is None or value != value or str(value) == "<NA>" for value in values], bool)
    else:
        return
    if missing.any():
        row = int(np.flatnonzero(missing)[0])
        raise ValueError(
            f"Input X contains NaN, infinity or a missing value: column {name!r}, first in row {row} "
            f"({missing.sum()} in all). Impute them, with sklearn.impute.SimpleImputer say, or drop the rows."
        )


def _numbers(name: Any, values: np.ndarray) -> np.ndarray:
    """Return a numeric column as float64."""
    if values.dtype.kind not in "fiub":
        raise TypeError(f"column {name!r} was numeric at training and has {values.dtype} now; convert it to numbers.")
    return values.astype(float)
