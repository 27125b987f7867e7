r"""Credible regions on the simplex: {y: p_J(y) >= c} with p_J the average of J Dirichlet densities.

The Dirichlets are those of J draws of the latents, c a quantile of p_J over S draws of y of their own. Whatever p_J,
the region then has the probability that is asked for, up to the binomial error of S draws; J decides only how nearly it
is the region of highest density.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 2**20  # densities in one evaluation


@dataclass(frozen=True)
class SimplexRegion:
    """The points of the simplex at which a density reaches a threshold, one region a datum.

    Example:
        >>> import torch
        >>> region = SimplexRegion(torch.full((1, 1, 3), 2.0), torch.tensor([1.0]), probability=0.5, standard_error=0.1)
        >>> region.contains(torch.tensor([[[0.4, 0.3, 0.3]], [[0.98, 0.01, 0.01]]])).mT
        tensor([[ True, False]])
    """

    concentration: Tensor  # of the Dirichlets whose average it is (J, ..., N, D)
    log_threshold: Tensor  # log c (..., N)
    probability: float
    standard_error: float  # of the probability of the region: sqrt(P (1 - P) / S)

    def log_density(self, value: Tensor) -> Tensor:
        """Return log p_J (..., N) at points (..., N, D) inside the simplex, that broadcast with the data.

        Raises:
            ValueError: a point is on the boundary or outside.
        """
        if not bool((value > 0).all()):
            index = tuple((~(value > 0)).nonzero()[0].tolist())
            raise ValueError(f"points must be inside the simplex; got {value[index].item():g} at index {index}.")
        return log_average(self.concentration, value.log())

    def contains(self, value: Tensor) -> Tensor:
        """Whether points (..., N, D) inside the simplex lie in the region (..., N).

        Raises:
            ValueError: as :meth:`log_density`.
        """
        return self.log_density(value) >= self.log_threshold


def draw_log_shares(log_concentration: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return log y for a draw y of each Dirichlet (..., D), finite where y or its parameters underflow.

    A Gamma(a) variable is one of Gamma(a + 1) times u^(1/a), u uniform. Where all 1 / a overflow, what counts is whose
    -log u / a is the least.
    """
    dtype = log_concentration.dtype
    gammas = torch._standard_gamma(log_concentration.exp() + 1, generator)
    u = torch.rand(log_concentration.shape, generator=generator, dtype=dtype, device=log_concentration.device)
    log_rest = (-torch.log1p(-u)).log() - log_concentration  # log(-log u / a)
    most = 0.9 * math.log(torch.finfo(dtype).max)
    log_rest = log_rest - (log_rest.amin(-1, keepdim=True) - most).clamp_min(0)
    logs = gammas.log() - log_rest.clamp_max(most + 1).exp()
    return logs - logs.logsumexp(-1, keepdim=True)


def log_average(concentration: Tensor, log_y: Tensor) -> Tensor:
    """Return the log of the average density (..., N) of Dirichlets (J, ..., N, D), for log y (..., N, D)."""
    constant = (concentration.sum(-1).lgamma() - concentration.lgamma().sum(-1)).movedim(0, -1)  # (..., N, J)

    def of(log_y: Tensor) -> Tensor:
        return (torch.einsum("j...nd,...nd->...nj", concentration - 1, log_y) + constant).logsumexp(-1)

    if log_y.dim() < concentration.dim():
        return of(log_y) - math.log(len(concentration))
    together = torch.broadcast_shapes(log_y.shape[1:-1], concentration.shape[1:-1]).numel() * len(concentration)
    parts = log_y.split(max(_CHUNK // together, 1))
    return torch.cat([of(part) for part in parts]) - math.log(len(concentration))
