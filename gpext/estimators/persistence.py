"""Trained estimators in one file of plain values and tensors, which reading does not run code of.

It holds the options, what was learned about the table, the report, and the model as :mod:`gpext.saving` stores it: with
the training data for a model of all data, without them where there are inducing points. Options that are objects
(a kernel, a rule, a likelihood) are not stored: they are given again to `load`.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.preprocessing import PowerTransformer
from torch import Tensor
from torch.nn import ModuleList

from gpext import saving
from gpext.estimators.models import DenseGP, SparseGP
from gpext.estimators.report import Report
from gpext.estimators.table import Columns
from gpext.inference import KL
from gpext.models import LatentGP
from gpext.priors import register_priors
from gpext.training import FitResult, FitStatus

if TYPE_CHECKING:
    from gpext.estimators.base import GPEstimator

_PLAIN = (str, int, float, bool, type(None))


def content_of(estimator: GPEstimator) -> dict[str, Any]:
    """Return what is stored of a trained estimator."""
    options = {name: value for name, value in estimator.get_params(deep=False).items() if isinstance(value, _PLAIN)}
    model, likelihood = estimator.model_, estimator.likelihood_
    dense, strategy = isinstance(model, LatentGP), model.variational_strategy
    points = strategy.sparse_inputs if dense else strategy.inducing_points
    neighbours = strategy.neighbours if dense else None
    fitted = {name: getattr(estimator, name) for name in estimator._stored if hasattr(estimator, name)}
    return {
        "estimator": type(estimator).__name__,
        "options": options,
        "given": sorted(set(estimator.get_params(deep=False)) - set(options)),
        "fitted": {name: _packed(value) for name, value in fitted.items()},
        "columns": {name: _packed(getattr(estimator._columns, name)) for name in _told(Columns)},
        "report": {name: getattr(estimator.report_, name) for name in _told(Report) if name != "fit_result"},
        "fit_result": {
            **{name: getattr(estimator.fit_result_, name) for name in _told(FitResult)},
            "status": estimator.fit_result_.status.name,
            "state_dict": {},
        },
        "weighted": estimator._is_weighted,
        "rule": type(model.inference).__name__ if dense else None,
        "size": 0 if points is None else len(points),  # inducing points
        "neighbours": neighbours.number if neighbours is not None else None,
        "filled": neighbours.fill_in if neighbours is not None else None,
        "prediction_neighbours": neighbours.to_predict if neighbours is not None else None,
        "model": saving.content_of(ModuleList([model, likelihood])),
    }


def restored(path: Path, content: dict[str, Any], estimator: GPEstimator) -> GPEstimator:
    """Return an estimator, made with the options of the file, trained as the file says.

    Raises:
        ValueError: the file is of another kind of estimator, or of another model.
    """
    columns = {name: _unpacked(value) for name, value in content["columns"].items()}
    for name, value in content["fitted"].items():
        setattr(estimator, name, _unpacked(value))
    estimator._columns = Columns(**columns)
    estimator._is_weighted = content["weighted"]
    likelihood = estimator._candidates()[estimator.likelihood_name_]().double()
    weight = torch.full((1,), 2.0 if content["weighted"] else 1.0, dtype=torch.float64)
    data = content["model"]["data"].get("0")
    likelihood, _ = estimator._weighted(likelihood, torch.zeros(1, dtype=torch.float64), weight, sparse=data is None)
    kernel = estimator._own_kernel(torch.zeros(1, dtype=torch.float64), estimator._columns)
    points = torch.zeros(content["size"], len(estimator._columns.names), dtype=torch.float64)
    model: DenseGP | SparseGP
    if data is not None:
        targets: Tensor = data["targets"]
        rules = estimator._rules(likelihood, targets)
        known = (rules.last, rules.train, KL(), rules.begin)
        rule = next((each for each in known if type(each).__name__ == content["rule"]), rules.last)
        neighbours = content.get("neighbours")  # without any, older files have the number of rows as their size
        beside = points if neighbours is not None and len(points) else None
        filled = bool(content.get("filled"))  # not in older files
        nearest: dict[str, Any] = {"fill_in": filled, "prediction_neighbours": content.get("prediction_neighbours")}
        model = DenseGP(data["inputs"][0], targets, likelihood, rule, kernel, neighbours, beside, **nearest)
    else:
        model = SparseGP(points, likelihood, kernel)
    parts = ModuleList([model.double(), likelihood])
    if estimator.priors:
        register_priors(parts, num_inputs=len(estimator._columns.names))
    saving.restore(path, content["model"], parts)
    estimator.model_, estimator.likelihood_ = model.eval(), likelihood.eval()
    estimator._recall_average()
    told = content["fit_result"]
    estimator.fit_result_ = FitResult(**{**told, "status": FitStatus[told["status"]]})
    estimator.report_ = Report(**content["report"], fit_result=estimator.fit_result_)
    return estimator


def _told(kind: type) -> list[str]:
    """Return the names of the fields of a dataclass."""
    return [each.name for each in fields(kind)]


def _packed(value: Any) -> Any:
    """Return a value as one that can be stored: arrays as lists with their dtype."""
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": "object" if value.dtype == object else value.dtype.str}
    if isinstance(value, PowerTransformer):
        return {"lambdas": value.lambdas_.tolist()}
    if isinstance(value, dict):
        return {"dict": [[str(key), _packed(item)] for key, item in value.items()]}
    return value


def _unpacked(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return np.array(value["array"], dtype=value["dtype"])
    if "lambdas" in value:
        power = PowerTransformer(standardize=False)
        power.lambdas_, power.n_features_in_ = np.array(value["lambdas"]), len(value["lambdas"])
        return power
    return {key: _unpacked(item) for key, item in value["dict"]}
