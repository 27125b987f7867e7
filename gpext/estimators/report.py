"""The report of an estimator: its choices and their reasons, the end of training, relevant inputs, calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gpext.estimators.plan import Plan
from gpext.estimators.task import Trained
from gpext.kernels.columns import stationary_kernels
from gpext.models import LatentGP
from gpext.training import FitResult

if TYPE_CHECKING:
    from gpext.estimators.base import GPEstimator


@dataclass(frozen=True)
class Report:
    """The report of a `fit`; `print(report)` shows it.

    Attributes:
        choices: a sentence for each choice that was made for the user.
        fit_result: of the last training.
        seconds: all of `fit`.
        relevance: the inverse lengthscale of each input in units of its standard deviation, the largest first; of a
            categorical column the inverse lengthscale.
        leave_one_out: the mean log predictive density of a training datum given all others, by the likelihoods that
            were tried; empty with inducing points.
        calibration: sentences on the leave-one-out predictions.

    Example:
        >>> from gpext.datasets import load_coal
        >>> from gpext.estimators import GPCountRegressor
        >>> coal = load_coal()
        >>> report = GPCountRegressor("poisson", random_state=0).fit(coal.data, coal.target).report_
        >>> report.seconds > 0, report.fit_result.status.name
        (True, 'CONVERGED')
    """

    choices: tuple[str, ...]
    fit_result: FitResult
    seconds: float
    relevance: dict[str, float]
    leave_one_out: dict[str, float]
    calibration: tuple[str, ...]

    def __str__(self) -> str:
        lines = ["choices", *(f"  {each}" for each in self.choices), "training", f"  {self.fit_result.message}"]
        lines.append(f"  {self.seconds:.1f} s in all")
        if self.relevance:
            shown = list(self.relevance.items())[:10]
            lines += ["most relevant inputs (1 / lengthscale)", *(f"  {name}: {value:.3g}" for name, value in shown)]
        if self.leave_one_out or self.calibration:
            lines.append("leave-one-out predictions of the training data")
            lines += [f"  mean log density with {name}: {value:.4f}" for name, value in self.leave_one_out.items()]
            lines += [f"  {each}" for each in self.calibration]
        return "\n".join(lines)


@torch.no_grad()
def report_of(
    estimator: GPEstimator,
    found: dict[str, Trained],
    chosen: str,
    plan: Plan,
    num_rows: int,
    total: float,
    seconds: float,
    reasons: Sequence[str],
) -> Report:
    """Return the report of a fit.

    Args:
        estimator: that has been trained.
        found: the trained models by likelihood.
        chosen: the one of them that was kept.
        plan: how they were trained.
        num_rows: distinct rows.
        total: sum of their weights.
        seconds: of the fit.
        reasons: of choices made before training.
    """
    trained = found[chosen]
    choices = [*filter(None, reasons), *plan.reasons, *trained.reasons]
    if num_rows != total:
        choices.insert(0, f"{num_rows} distinct rows of total weight {total:g}")
    dense = isinstance(trained.model, LatentGP)
    if dense:
        choices.append(f"inference by {trained.model.inference}")
    else:
        choices.append("inference by natural gradients of the variational bound")
    if len(found) > 1:
        choices.append(f"noise {chosen!r}, of {', '.join(map(repr, found))}, by its leave-one-out log density")
    for name, each in found.items():
        if each.num_unknown:
            choices.append(
                f"left-out predictions of {each.num_unknown} row(s) under {name!r} are unknown, and count as the least "
                "predictable of the others"
            )
    loo = {name: each.score for name, each in found.items()} if dense else {}
    calibration = tuple(estimator._calibration()) if dense else ()
    return Report(tuple(choices), trained.result, seconds, _relevance(estimator, trained), loo, calibration)


def _relevance(estimator: Any, trained: Trained) -> dict[str, float]:
    """Return the inverse lengthscales of the inputs, of the kernels that have one for each, the largest first."""
    names = estimator._columns.names
    found: dict[str, float] = {}
    for _, kernel, columns in stationary_kernels(trained.model, len(names)):
        lengthscale = kernel.lengthscale.reshape(-1, kernel.lengthscale.size(-1))
        if lengthscale.size(-1) != len(columns):
            continue
        inverse = lengthscale.reciprocal().amax(0)
        for column, value in zip(columns.tolist(), inverse.tolist(), strict=True):
            found[names[column]] = max(found.get(names[column], 0.0), value)
    return dict(sorted(found.items(), key=lambda item: -item[1]))
