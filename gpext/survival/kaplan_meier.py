r"""The Kaplan-Meier estimate of a survival function, without a model.

At the distinct times t_k of events, with d_k events among n_k subjects at risk [Kaplan & Meier 1958; Greenwood 1926]:

    S(t) = prod_{t_k <= t} (1 - d_k / n_k),     var log S(t) = sum_{t_k <= t} d_k / (n_k (n_k - d_k))

Confidence limits are those of log(-log S), which stay within (0, 1) [Kalbfleisch & Prentice 1980].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.survival.bands import probabilities
from gpext.survival.times import check_survival


@dataclass(frozen=True)
class SurvivalEstimate:
    """A step function that is constant from each time to before the next one.

    Attributes:
        times: 0, the times of events, and the longest time if it is none (T,).
        survival: from that time on (T,).
        lower: confidence limit (T,); nan where S is 0.
        upper: likewise.
        num_at_risk: just before that time; at 0, from then on (T,).
        level: of confidence, pointwise.

    Example:
        >>> import torch
        >>> from gpext.survival import kaplan_meier
        >>> kaplan_meier(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])).survival
        tensor([1.0000, 0.5000, 0.0000])
    """

    times: Tensor
    survival: Tensor
    lower: Tensor
    upper: Tensor
    num_at_risk: Tensor
    level: float


def kaplan_meier(time: Tensor, event: Tensor, *, entry: Tensor | None = None, level: float = 0.9) -> SurvivalEstimate:
    """Return the Kaplan-Meier estimate of the survival function of a population.

    With times of entry it is conditional on survival to the earliest of them.

    Args:
        time: until the event, or until censoring (N,).
        event: 1, or 0 where censored (N,).
        entry: the time since when a subject was under observation (N,), 0 by default.
        level: of the confidence limits.

    Raises:
        TypeError, ValueError: as :func:`gpext.survival.split`, or a level outside (0, 1).

    Example:
        >>> import torch
        >>> kaplan_meier(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 0, 1])).survival
        tensor([1.0000, 0.6667, 0.0000])
    """
    time, event, entry = check_survival(time, event, entry)
    q = probabilities(level)[-1]
    times = torch.cat([time.new_zeros(1), time[event], time.max().unsqueeze(0)]).unique()
    ordered, entries, events = (each.double().sort().values for each in (time, entry, time[event]))
    points = times.double()
    at_risk = torch.searchsorted(entries, points) - torch.searchsorted(ordered, points)  # entry < t <= time
    at_risk[0] = (entry == 0).sum()
    died = torch.searchsorted(events, points, right=True) - torch.searchsorted(events, points)
    n, d = at_risk.double(), died.double()
    survival = (1 - torch.where(d > 0, d / n, 0.0)).cumprod(0)
    variance = torch.where(d > 0, d / (n * (n - d)), 0.0).cumsum(0)  # of log S; infinite where S is 0
    z = torch.special.ndtri(torch.tensor(q, dtype=torch.float64)).to(survival.device)
    log_survival = survival.log()
    half = z * variance.sqrt() / log_survival.abs()  # of log(-log S)
    limits = [torch.where(survival < 1, torch.exp(log_survival * torch.exp(sign * half)), 1.0) for sign in (1, -1)]
    lower, upper = (torch.where(survival > 0, each, torch.nan).to(time) for each in limits)
    return SurvivalEstimate(times, survival.to(time), lower, upper, at_risk, level)
