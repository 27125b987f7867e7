"""Test log density by one-dimensional quadrature, the same for every method and independent of gpext and gpytorch.

For a latent marginal ``q(f) = N(m, s^2)`` and a conditional density ``p(y | f)``,

    log p(y) = log int N(f | m, s^2) p(y | f) df.

The integral is cut into panels whose edges follow both factors: steps of ``1.5 s`` about ``m``, a geometric ladder
about the place where ``p(y | f)`` may have a kink or a narrow peak, and a line between the two for what is far from
both. Each panel has 10 Gauss-Legendre nodes; the sum is taken in log space, so far outliers do not underflow.
Gauss-Hermite rules cannot serve here: 20 nodes miss a noise scale well below ``s``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NODES, WEIGHTS = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(10))
REACH = 9.0  # standard deviations; exp(-REACH^2 / 2) is 3e-18
LADDER = torch.cat([torch.zeros(1, dtype=torch.float64), 2.0 ** torch.arange(-1, 12, dtype=torch.float64)])


@dataclass(frozen=True)
class Conditional:
    """``p(y | f)`` at given parameters.

    Attributes:
        log_prob: ``(y, f) -> log p(y | f)``, broadcasting.
        centred: Whether the feature of ``p(y | f)`` that needs resolving sits at ``f = y`` (else at ``f = 0``).
        width: Its length scale.
    """

    log_prob: Callable[[Tensor, Tensor], Tensor]
    centred: bool
    width: float


def conditional(likelihood: str, *, noise: float = 1.0, deg_free: float = 4.0) -> Conditional:
    """The conditional density of a named likelihood.

    Args:
        likelihood: ``"laplace"``, ``"student_t"``, ``"matern32"`` or ``"logit"`` (targets 0, 1).
        noise: The squared scale: ``b^2``, ``sigma^2`` and ``rho^2`` of the three regression likelihoods.
        deg_free: Degrees of freedom of the Student-t.
    """
    scale = math.sqrt(noise)
    if likelihood == "laplace":
        return Conditional(lambda y, f: -(y - f).abs() / scale - math.log(2 * scale), True, scale)
    if likelihood == "student_t":
        half = (deg_free + 1) / 2
        constant = math.lgamma(half) - math.lgamma(deg_free / 2) - 0.5 * math.log(deg_free * math.pi * noise)
        return Conditional(
            lambda y, f: constant - half * torch.log1p((y - f).square() / (deg_free * noise)), True, scale
        )
    if likelihood == "matern32":

        def log_matern32(y: Tensor, f: Tensor) -> Tensor:
            r = math.sqrt(3) * (y - f).abs() / scale
            return torch.log1p(r) - r + math.log(math.sqrt(3) / (4 * scale))

        return Conditional(log_matern32, True, scale)
    if likelihood == "logit":
        return Conditional(lambda y, f: F.logsigmoid((2 * y - 1) * f), False, 1.0)
    raise ValueError(f"unknown likelihood {likelihood!r}; expected laplace, student_t, matern32 or logit.")


def log_predictive_density(
    density: Conditional,
    targets: Tensor,  # (N,)
    mean: Tensor,  # (N,)
    variance: Tensor,  # (N,)
    chunk: int = 1024,
) -> Tensor:  # (N,)
    """``log int N(f | mean, variance) p(y | f) df`` for each datum, in float64."""
    targets, mean, variance = targets.double(), mean.double(), variance.double()
    pieces = zip(targets.split(chunk), mean.split(chunk), variance.split(chunk), strict=True)
    return torch.cat([_log_integral(density, y[:, None], m[:, None], v[:, None].sqrt()) for y, m, v in pieces])


def _log_integral(density: Conditional, y: Tensor, m: Tensor, s: Tensor) -> Tensor:
    c = y if density.centred else torch.zeros_like(y)
    steps = torch.arange(-REACH, REACH + 0.1, 1.5, dtype=m.dtype)
    edges = torch.cat(
        [
            m + s * steps,
            c + density.width * LADDER,
            c - density.width * LADDER,
            m + (c - m) * torch.linspace(0, 1, 21, dtype=m.dtype),
        ],
        dim=-1,
    )
    # Outside both factors fall at least as fast as the normal one does at 9 s.
    edges = torch.minimum(torch.maximum(edges, torch.minimum(m, c) - REACH * s), torch.maximum(m, c) + REACH * s)
    edges = edges.sort(dim=-1).values
    half = edges.diff(dim=-1)[..., None] / 2
    f = (edges[:, :-1, None] + half * (NODES + 1)).flatten(1)
    log_normal = -0.5 * ((f - m) / s).square() - torch.log(s) - 0.5 * math.log(2 * math.pi)
    return torch.logsumexp((half * WEIGHTS).flatten(1).log() + log_normal + density.log_prob(y, f), dim=-1)
