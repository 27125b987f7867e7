"""A plan for data of a given size, and its reasons: full data, neighbours, inducing points, or minibatches of them.

The costs are those of training. With D latents and N data, an evaluation of the evidence on the full data takes
(D + 1) N^3 / 3 operations a Newton step, the bound with M inducing points 2 D N M^2, its derivatives twice as many.
With many latents the hyperparameters, of which there are no more than with one, are therefore learned on a sample and
with fewer inducing points, and most operations go to q(u). Neighbours of what a few inducing inputs leave take more
time than these alone, and follow functions that these cannot.
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
_FEW_COLUMNS = 3  # up to which neighbours need no inducing inputs, and are as many as _NEAR
_NEAR, _LEFT = 20, 10  # neighbours of a datum: of few columns, and of what inducing inputs leave of more
_RESIDUAL = 200  # inducing inputs beside neighbours


@dataclass(frozen=True)
class Plan:
    """The way in which a model is trained.

    Attributes:
        inducing: the number of inducing points to begin with; None for the full data.
        neighbours: of each datum in a model of all data, whose prior is that of neighbours, with inducing points of
            what these leave; None for another model.
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
    neighbours: int | None = None

    @property
    def is_sparse(self) -> bool:
        """Whether the model has inducing points in place of its data."""
        return self.inducing is not None and self.neighbours is None


def choose_plan(
    num_rows: int,
    num_latents: int,
    inducing_points: Any,
    batch_size: Any,
    neighbours: Any = "auto",
    *,
    num_columns: int = 1,
    most_rough: int = 0,
) -> Plan:
    """Return the plan for data of a size, where the user's options are "auto"; they are kept where not.

    Args:
        num_rows: N, distinct ones.
        num_latents: D.
        inducing_points: "auto", None for the full data, a number, or the points (M, d).
        batch_size: "auto", None for all data in each step, or a number.
        neighbours: "auto", None for none, or a number.
        num_columns: d.
        most_rough: rows of more than three columns up to which there are neighbours; functions of these columns may be
            too rough for inducing points alone.

    Raises:
        TypeError, ValueError: options of another kind, or minibatches without inducing points or with neighbours.
    """
    is_auto = isinstance(inducing_points, str) and inducing_points == "auto"
    may_have_neighbours = isinstance(neighbours, str) and neighbours == "auto"
    kind = "a whole number, None or 'auto'"
    near = None if may_have_neighbours else whole_number_or_none("neighbours", neighbours, 1, kind=kind)
    if isinstance(batch_size, str) and batch_size == "auto":
        size = BATCH if num_rows > _MANY and near is None else None
    else:
        size = whole_number_or_none("batch_size", batch_size, 1)
    is_large = num_latents * num_rows**3 > _FULL
    too_large = f"the cube of {num_rows} distinct rows, {num_latents} time(s) a step, is above {_FULL:.1g} operations"
    few = num_columns <= _FEW_COLUMNS
    serves = few or num_rows <= most_rough
    if may_have_neighbours and is_auto and size is None and is_large and num_latents == 1 and serves:
        near = _NEAR if few else _LEFT
    if near is not None:
        if size is not None:
            raise ValueError("neighbours take all data in each step: leave batch_size at 'auto' or None.")
        left = None if few or num_latents > 1 else _RESIDUAL
        inducing = left if is_auto else _number_of(inducing_points)
        if inducing is not None:
            inducing = min(inducing, num_rows)
        of_what = "" if inducing is None else f" of what {inducing} inducing points leave"
        why = f": {too_large}" if is_large else ""
        return Plan(inducing, False, inducing or 0, None, None, (f"{near} neighbours of each row{of_what}{why}",), near)
    reasons = []
    grows, most, sample = False, _MOST, None
    if is_auto:
        if size is not None:
            inducing = most = min(_MOST // 2, num_rows)
            reasons.append("inducing points, which minibatches need")
        elif not is_large:
            inducing = None
            reasons.append(f"full data: {num_rows} distinct rows and {num_latents} latent function(s) are few enough")
        else:
            if num_latents < _MANY_LATENTS:
                inducing, grows = min(_FIRST, num_rows), True
                most = max(_FIRST, min(_MOST, int((_STEP / (num_latents * num_rows)) ** 0.5)))
            else:
                inducing, sample = min(_MOST // 2, num_rows), min(_SAMPLE, num_rows)
                most = max(inducing, min(_MOST_LAST, num_rows, int((_LAST / (num_latents * num_rows)) ** 0.5)))
            reasons.append(f"inducing points: {too_large}")
            if sample is not None:
                reasons.append(
                    f"hyperparameters from {sample} rows with {inducing} inducing points, q(u) from all with {most}"
                )
    else:
        inducing = _number_of(inducing_points)
        if inducing is not None:
            inducing = most = inducing if np.ndim(inducing_points) else min(inducing, num_rows)
        elif size is not None:
            raise ValueError("minibatches need inducing points: give their number, or leave batch_size at None.")
    if size is not None:
        size = min(size, num_rows)
        reasons.append(f"minibatches of {size} rows")
    return Plan(inducing, grows, most, size, sample, tuple(reasons))


def _number_of(inducing_points: Any) -> int | None:
    """Return the number of inducing points that an option other than "auto" asks for; None for the full data."""
    if isinstance(inducing_points, str):
        raise ValueError(f"inducing_points must be 'auto', None, a number or an array; got {inducing_points!r}.")
    if inducing_points is None or np.ndim(inducing_points) == 0:
        return whole_number_or_none("inducing_points", inducing_points, 1)
    return len(inducing_points)
