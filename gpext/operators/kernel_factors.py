"""Convert the tensors of a batch of products of kernels to factors, for the batch or for each of its matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpext.operators.tiles import Factor


def split_factors(tensors: Any, profiles: tuple[str, ...], square: bool) -> list[Factor]:
    """Return the factors that the tensors represent."""
    waiting = iter(tensors)
    factors = []
    for profile in profiles:
        x = next(waiting)
        y = None if square else next(waiting)
        factors.append(Factor(profile, x, y, next(waiting) if profile == "rq" else None))
    return factors


def factors_one_by_one(factors: Sequence[Factor], batch: torch.Size) -> list[list[Factor]]:
    """Return the factors of every matrix of a batch."""
    found: list[list[Factor]] = [[] for _ in range(math.prod(batch))]
    for factor in factors:
        x, y = one_by_one(factor.x, batch), None if factor.y is None else one_by_one(factor.y, batch)
        alpha = None if factor.alpha is None else one_by_one(factor.alpha, batch)
        for b, of_one in enumerate(found):
            own = None if alpha is None else alpha[b].squeeze()
            of_one.append(Factor(factor.profile, x[b], None if y is None else y[b], own))
    return found


def one_by_one(t: Tensor, batch: torch.Size) -> Tensor:
    """Return the matrices of a batch as (B, *, *); B is explicit, because -1 is ambiguous for empty matrices."""
    return t.expand(*batch, *t.shape[-2:]).reshape(math.prod(batch), *t.shape[-2:])
