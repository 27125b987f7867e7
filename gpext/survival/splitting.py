r"""Survival times as Poisson data: the hazard is constant in each of J intervals (b_j, b_{j+1}].

A subject at risk from e to t, with an event at t (d = 1) or censored there (d = 0), has the likelihood

    h(t)^d exp(-int_e^t h(s) ds) = prod_j h_j^{d_j} e^{-E_j h_j}

with E_j the time that it spent at risk in interval j and d_j whether the event was there: up to factors E_j^{d_j}
without parameters, the likelihood of independent Poisson counts d_j with means E_j h_j [Holford 1980; Laird & Olivier
1981]. With f = log h a Gaussian process of time and covariates these are data of `Offset(PoissonLikelihood())`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.checks import check_finite, check_tensor, whole_number
from gpext.survival.times import check_breaks, check_survival


@dataclass(frozen=True)
class SplitTable:
    """A row for each interval in which a subject was at risk; rows of a subject are consecutive.

    Attributes:
        inputs: of the log hazard (R, 1 + d): the coordinate of the interval, and the covariates.
        counts: 1 where the event was in the interval, else 0 (R,).
        exposure: time at risk in the interval (R,), positive, in the unit of the times.
        subject: index into the data (R,).
        interval: from 0 to J - 1 (R,).
        breaks: the ends of the intervals (J + 1,).
        coordinates: of the intervals, as inputs have them (J,).

    Example:
        >>> import torch
        >>> from gpext.survival import split
        >>> table = split(torch.tensor([2.0]), torch.tensor([1.0]), breaks=torch.tensor([0.0, 1.0, 3.0]))
        >>> table.counts, table.exposure
        (tensor([0., 1.]), tensor([1., 1.]))
    """

    inputs: Tensor
    counts: Tensor
    exposure: Tensor
    subject: Tensor
    interval: Tensor
    breaks: Tensor
    coordinates: Tensor

    def inputs_at(self, covariates: Tensor | None = None) -> Tensor:
        """Return the inputs (S, J, 1 + d) of new subjects, in all intervals.

        Args:
            covariates: (S, d), or (S,) for d = 1; None for the one subject of a table without covariates.

        Raises:
            TypeError: something else than a tensor.
            ValueError: not as many columns as the table's covariates, or values that are not finite.
        """
        columns = self.inputs.size(-1) - 1
        x = self.inputs.new_zeros(1, 0) if covariates is None else _columns(covariates, None).to(self.inputs)
        if x.size(-1) != columns:
            raise ValueError(f"expected covariates (S, {columns}), as the table has them; got {tuple(x.shape)}.")
        return _beside(self.coordinates.expand(len(x), -1), x.unsqueeze(1).expand(-1, len(self.coordinates), -1))


def event_breaks(time: Tensor, event: Tensor, num_intervals: int) -> Tensor:
    """Return breaks (J + 1,) from 0 to the longest time, with about as many events in each of J intervals.

    Breaks inside are times of events. Where many events have the same time there may be fewer intervals.

    Args:
        time: until the event, or until censoring (N,).
        event: 1, or 0 where censored (N,).
        num_intervals: J.

    Raises:
        TypeError, ValueError: as :func:`split`, or no event at all.

    Example:
        >>> import torch
        >>> event_breaks(torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0]), torch.tensor([1, 1, 1, 1, 0]), 2)
        tensor([0., 2., 9.])
    """
    time, event, _ = check_survival(time, event)
    count = whole_number("num_intervals", num_intervals, 1)
    times = time[event].sort().values
    if not len(times):
        raise ValueError("expected at least one event; all times are censored, and nothing bounds the hazard below.")
    last = (torch.arange(1, count, device=time.device) * len(times)).div(count, rounding_mode="floor") - 1
    inside = times[last[last >= 0]]
    inside = inside[inside < time.max()]
    return torch.cat([time.new_zeros(1), inside.unique(), time.max().unsqueeze(0)])


def split(
    time: Tensor,
    event: Tensor,
    breaks: Tensor,
    *,
    covariates: Tensor | None = None,
    entry: Tensor | None = None,
    coordinates: Tensor | None = None,
) -> SplitTable:
    """Return the table of subjects and intervals in which each was at risk, with its exposures and counts.

    Intervals are closed on the right: an event at a break belongs to the interval that ends there. A covariate that
    changes with time is several data of one subject, each from the `entry` at which it took its value, all but the
    last censored where it changed.

    Args:
        time: until the event, or until censoring (N,), positive.
        event: 1, or 0 where censored (N,).
        breaks: of the intervals (J + 1,); see :func:`event_breaks`. The last is not below the longest time.
        covariates: (N, d), or (N,) for d = 1.
        entry: the time since when a subject was under observation (N,), so that an event before would not be in the
            data (left truncation); 0 by default.
        coordinates: of the intervals in the inputs (J,), increasing; their midpoints by default. With times of very
            different sizes the logarithms of the midpoints are a better measure of distance for a stationary kernel.

    Raises:
        TypeError: something else than tensors.
        ValueError: times that are not positive; events other than 0 and 1; an entry that is not before the time, or is
            before the first break; breaks that do not increase, or end before the longest time; numbers that are not
            finite; lengths that differ.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import Offset, PoissonLikelihood
        >>> time, event, age = torch.tensor([0.5, 3.0]), torch.tensor([1, 0]), torch.tensor([61.0, 40.0])
        >>> table = split(time, event, torch.tensor([0.0, 1.0, 4.0]), covariates=age)
        >>> table.inputs
        tensor([[ 0.5000, 61.0000],
                [ 0.5000, 40.0000],
                [ 2.5000, 40.0000]])
        >>> table.counts, table.exposure
        (tensor([1., 0., 0.]), tensor([0.5000, 1.0000, 2.0000]))
        >>> likelihood = Offset(PoissonLikelihood(), table.exposure.log())  # of a LatentGP at table.inputs
    """
    time, event, entry = check_survival(time, event, entry)
    check_breaks(breaks)
    breaks = breaks.to(time)
    first, last = float(breaks[0]), float(breaks[-1])
    if float(time.max()) > last:
        raise ValueError(f"breaks must reach the longest time, {float(time.max()):g}; the last one is {last:g}.")
    if float(entry.min()) < first:
        raise ValueError(
            f"breaks must begin at or before the first time at risk, {float(entry.min()):g}; the first one is "
            f"{first:g}. Begin them at 0, or say since when subjects are at risk by `entry`."
        )
    lower, upper = breaks[:-1], breaks[1:]
    if coordinates is None:
        coordinates = 0.5 * (lower + upper)
    else:
        check_tensor("coordinates", coordinates)
        check_finite("coordinates", coordinates)
        if coordinates.shape != lower.shape or bool((coordinates.diff() <= 0).any()):
            raise ValueError(
                f"coordinates must be {len(lower)} increasing numbers, one of each interval; got "
                f"{coordinates.tolist()}."
            )
    x = time.new_zeros(len(time), 0) if covariates is None else _columns(covariates, len(time))
    x = x if x.is_floating_point() else x.to(time.dtype)
    at_risk = torch.minimum(time.unsqueeze(-1), upper) - torch.maximum(entry.unsqueeze(-1), lower)  # (N, J)
    subject, interval = (at_risk > 0).nonzero(as_tuple=True)
    ends_here = (time[subject] > lower[interval]) & (time[subject] <= upper[interval])
    return SplitTable(
        inputs=_beside(coordinates.to(time)[interval], x[subject]),
        counts=(ends_here & event[subject]).to(time.dtype),
        exposure=at_risk[subject, interval],
        subject=subject,
        interval=interval,
        breaks=breaks,
        coordinates=coordinates.to(time),
    )


def _columns(covariates: Tensor, number: int | None) -> Tensor:
    """Return covariates as (N, d)."""
    check_tensor("covariates", covariates)
    check_finite("covariates", covariates)
    x = covariates.unsqueeze(-1) if covariates.dim() == 1 else covariates
    if x.dim() != 2 or (number is not None and len(x) != number):
        rows = "S" if number is None else number
        raise ValueError(f"expected covariates ({rows}, d); got shape {tuple(covariates.shape)}.")
    return x


def _beside(coordinates: Tensor, x: Tensor) -> Tensor:
    """Return inputs (..., 1 + d) of coordinates (...) and covariates (..., d)."""
    dtype = torch.promote_types(coordinates.dtype, x.dtype)
    return torch.cat([coordinates.unsqueeze(-1).to(dtype), x.to(dtype)], -1)
