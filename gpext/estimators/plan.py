"""A plan for data of a given size, and its reasons: full data, inducing points, or minibatches of them.

The costs are those of training. With D latents and N data, an evaluation of the evidence on the full data takes
(D + 1) N^3 / 3 operations a Newton step, the bound with M inducing points 2 D N M^2, its derivatives twice as many.
With many latents the hyperparameters, of which there are no more than with one, are therefore learned on a sample and
with fewer inducing points, and most operations go to q(u).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpext.checks import whole_number_or_none

_FULL = 1.6e10  # D N^3 up to which the full data train in about a minute
_MANY = 100_000  # rows beyond which the full batch is left for minibatches
BATCH = 1000
_FIRST, _MOST = 64, 512  # inducing points
_STEP = 2e10  # D N M^2 up to which the inducing points may grow, a few seconds a step
_MANY_LATENTS = 3  # from which on hyperparameters are learned on a sample
_SAMPLE = 4000  # rows of it
_LAST = 3e11  # D N M^2 of a step in q(u) alone: half a minute
_MOST_LAST = 1024  # inducing points of it


@dataclass(frozen=True)
class Plan:
    """The way in which a model is trained.

    Attributes:
        inducing: the number of inducing points to begin with; None for the full data.
        grows: whether more are added while the bound gains from them.
        most: the largest number of them, in the end.
        batch_size: of minibatches; None for the full batch.
        sample: the number of rows on which hyperparameters are learned before q(u) is that of all; None for all.
        reasons: a sentence for each choice.
    """

    inducing: int | None
    grows: bool
    most: int
    batch_size: int | None
    sample: int | None = None
    reasons: tuple[str, ...] = ()


def choose_plan(num_rows: int, num_latents: int, inducing_points: Any, batch_size: Any) -> Plan:
    """Return the plan for data of a size, where the user's options are "auto"; they are kept where not.

    Args:
        num_rows: N, distinct ones.
        num_latents: D.
        inducing_points: "auto", None for the full data, a number, or the points (M, d).
        batch_size: "auto", None for all data in each step, or a number.

    Raises:
        TypeError, ValueError: options of another kind, or minibatches without inducing points.
    """
    reasons = []
    if isinstance(batch_size, str) and batch_size == "auto":
        size = BATCH if num_rows > _MANY else None
    else:
        size = whole_number_or_none("batch_size", batch_size, 1)
    grows, most, sample = False, _MOST, None
    inducing: int | None
    if isinstance(inducing_points, str) and inducing_points == "auto":
        if size is not None:
            inducing = most = min(_MOST // 2, num_rows)
            reasons.append("inducing points, which minibatches need")
        elif num_latents * num_rows**3 <= _FULL:
            inducing = None
            reasons.append(f"full data: {num_rows} distinct rows and {num_latents} latent function(s) are few enough")
        else:
            if num_latents < _MANY_LATENTS:
                inducing, grows = min(_FIRST, num_rows), True
                most = max(_FIRST, min(_MOST, int((_STEP / (num_latents * num_rows)) ** 0.5)))
            else:
                inducing, sample = min(_MOST // 2, num_rows), min(_SAMPLE, num_rows)
                most = max(inducing, min(_MOST_LAST, num_rows, int((_LAST / (num_latents * num_rows)) ** 0.5)))
            reasons.append(
                f"inducing points: the cube of {num_rows} distinct rows, {num_latents} time(s) a step, is above "
                f"{_FULL:.1g} operations"
            )
            if sample is not None:
                reasons.append(
                    f"hyperparameters from {sample} rows with {inducing} inducing points, q(u) from all with {most}"
                )
    elif isinstance(inducing_points, str):
        raise ValueError(f"inducing_points must be 'auto', None, a number or an array; got {inducing_points!r}.")
    elif inducing_points is None or np.ndim(inducing_points) == 0:
        inducing = whole_number_or_none("inducing_points", inducing_points, 1)
        if inducing is not None:
            inducing = most = min(inducing, num_rows)
        elif size is not None:
            raise ValueError("minibatches need inducing points: give their number, or leave batch_size at None.")
    else:
        inducing = most = len(inducing_points)
    if size is not None:
        size = min(size, num_rows)
        reasons.append(f"minibatches of {size} rows")
    return Plan(inducing, grows, most, size, sample, tuple(reasons))
