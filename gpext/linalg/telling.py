r"""Of the candidates of each value, those few that together tell most of it: greedy conditional selection.

One after the other, each time the candidate that lowers the value's variance most, given those chosen before. With
residuals r of the value and r_j of the candidates after regression on what is chosen,

    the gain of j is  -log(1 - Cov(r, r_j)^2 / (Var(r) Var(r_j))),    twice what j tells about the value, in nats

The residuals' covariances follow from a partial Cholesky factor, pivoted by the gains [Huan et al. 2023]: k of C
candidates take O(C k^2) operations, and the covariances of all, C^2 entries. The nearest are clumped, and clumped
values tell the same: of a process of the plane twenty that are chosen of forty tell as much as twenty-seven nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor


def most_telling(covariance: Tensor, allowed: Tensor, number: int) -> Tensor:
    """Return the places (P, number) of the candidates that tell most of each value, in the order of their choice.

    Of several latents the gains add up. Where fewer candidates are allowed, places of others follow.

    Args:
        covariance: of P values, the first of each, and their C candidates, of D latents (P, D, 1 + C, 1 + C), float64.
        allowed: which candidates count (P, C).
        number: of candidates to choose, at most C.

    Example:
        >>> import torch
        >>> x = torch.tensor([0.0, 0.9, 1.0, -1.1]).double()  # the nearest two tell nearly the same
        >>> K = torch.exp(-torch.cdist(x.unsqueeze(-1), x.unsqueeze(-1)))
        >>> most_telling(K.view(1, 1, 4, 4), torch.ones(1, 3, dtype=torch.bool), 2)
        tensor([[0, 2]])
    """
    rounding = torch.finfo(covariance.dtype).eps * covariance.size(-1)
    own = covariance.diagonal(dim1=-2, dim2=-1)
    variance, across = own.clone(), covariance[..., 0].clone()  # of all residuals, and with the value's (P, D, 1 + C)
    columns = covariance.new_zeros(*covariance.shape[:-1], number)  # L of the partial factor
    taken, found = torch.zeros_like(allowed), []
    for step in range(number):
        left = variance[..., 1:]
        square = across[..., 1:].square() / (left * variance[..., :1])
        tells = (left > rounding * own[..., 1:]) & (variance[..., :1] > rounding * own[..., :1])
        gain = torch.where(tells, -torch.log1p(-square.clamp(0, 1 - rounding)), 0.0).sum(-2)
        best = gain.masked_fill(~allowed, -1.0).masked_fill(taken, -2.0).argmax(-1, keepdim=True)  # (P, 1)
        found.append(best)
        taken = taken.scatter(-1, best, True)
        at = (best + 1).unsqueeze(1).expand(-1, covariance.size(1), -1)  # (P, D, 1)
        pivot = variance.gather(-1, at)
        whole = at.unsqueeze(-1).expand(-1, -1, covariance.size(-1), -1)
        known = columns.gather(-2, at.unsqueeze(-1).expand(-1, -1, -1, number))
        column = (covariance.gather(-1, whole) - columns @ known.mT).squeeze(-1)
        scale = torch.where(pivot > rounding * own.gather(-1, at), pivot, torch.inf).rsqrt()  # else it tells nothing
        column = column * scale
        columns[..., step] = column
        across = across - column[..., :1] * column
        variance = variance - column.square()
    return torch.cat(found, -1)
