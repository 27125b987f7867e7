r"""Harrell's concordance index: the share of comparable pairs in which the subject at higher risk has its event first.

A pair is comparable if one of the two has an event while the other is still under observation [Harrell et al. 1982]:

    d_i = 1  and  (t_i < t_j,  or  t_i = t_j and d_j = 0)

It counts 1 if r_i > r_j, 1/2 if the risks are equal, else 0. Two events at the same time are not comparable.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gpext.checks import check_finite, check_tensor
from gpext.survival.times import check_survival

_PAIRS = 2**22  # at once


@dataclass(frozen=True)
class Concordance:
    """Pairs of subjects, counted.

    Attributes:
        index: (concordant + tied / 2) / (concordant + discordant + tied); 1/2 for risks without information.
        num_concordant: comparable pairs in which the subject with the earlier event has the higher risk.
        num_discordant: those in which it has the lower one.
        num_tied: those of equal risks.

    Example:
        >>> import torch
        >>> from gpext.survival import concordance_index
        >>> times, died, risk = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3), torch.tensor([3.0, 2.0, 1.0])
        >>> concordance_index(times, died, risk).index
        1.0
    """

    index: float
    num_concordant: int
    num_discordant: int
    num_tied: int


def concordance_index(time: Tensor, event: Tensor, risk: Tensor) -> Concordance:
    """Return Harrell's concordance index of risks with the times of events, in O(N^2) time and O(N) memory.

    Args:
        time: until the event, or until censoring (N,).
        event: 1, or 0 where censored (N,).
        risk: any score that is higher where an event is expected earlier (N,), such as a mean cumulative hazard at a
            fixed time, or minus a median survival time.

    Raises:
        TypeError: something else than tensors.
        ValueError: bad times or events, as :func:`gpext.survival.split`; risks that are not finite or not as many; or
            no comparable pair.

    Example:
        >>> import torch
        >>> time, event = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 0, 1])
        >>> concordance_index(time, event, torch.tensor([2.0, 3.0, 1.0]))  # the pairs (0, 1) and (0, 2)
        Concordance(index=0.5, num_concordant=1, num_discordant=1, num_tied=0)
    """
    time, event, _ = check_survival(time, event)
    check_tensor("risk", risk)
    check_finite("risk", risk)
    if risk.shape != time.shape:
        raise ValueError(f"expected a risk of each of {len(time)} subjects; got shape {tuple(risk.shape)}.")
    first = event.nonzero().squeeze(-1)
    concordant = discordant = pairs = 0
    for rows in first.split(max(_PAIRS // len(time), 1)):
        t, r = time[rows, None], risk[rows, None]
        comparable = (t < time) | ((t == time) & ~event)
        concordant += int((comparable & (r > risk)).sum())
        discordant += int((comparable & (r < risk)).sum())
        pairs += int(comparable.sum())
    if pairs == 0:
        raise ValueError("no pair is comparable: none has an event while another subject is still under observation.")
    tied = pairs - concordant - discordant
    return Concordance((concordant + 0.5 * tied) / pairs, concordant, discordant, tied)
