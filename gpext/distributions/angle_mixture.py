r"""The density of an angle given a Gaussian eta in the plane, at many angles at once.

p(y) = int exp(eta' T(y)) / (2 pi I0(|eta|)) N(eta | m, V) d eta,      T(y) = (cos y, sin y)

by the trapezoidal rule along the axes of V, at the same nodes for all angles. The integrand is analytic: its next
singularities, the zeros of I0, are 2.4 off the real plane, so that a step h has an error of about e^{-15 / h} where
eta is near 0; at kappa >> 1 it is a Gaussian of width sqrt(kappa) in eta, and a step in proportion will do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_REACH = 7.0  # of the nodes, in standard deviations
_STEP = 0.75  # in eta and in units of sqrt(kappa), and in standard deviations of the Gaussian
_MOST = 256  # nodes on either side of an axis
_TOGETHER = 8  # data that share their number of nodes
_CHUNK = 2**21  # numbers in one evaluation


def mixture_density(mean: Tensor, covariance: Tensor, angle: Tensor) -> Tensor:
    """Return p(angle) (M, ..., N), without gradients.

    To 1e-9; to 1e-4 where standard deviations of eta above 27, for which there are too few nodes, meet a small kappa.

    Args:
        mean: m (..., 2, N), float64.
        covariance: V (..., 2, 2, N), positive semidefinite.
        angle: (M, ..., N).
    """
    mean = mean.mT.reshape(-1, 2)
    variance, axes = torch.linalg.eigh(covariance.movedim(-1, -3).reshape(-1, 2, 2))
    scaled = axes * variance.clamp_min(0).sqrt().unsqueeze(-2)  # rounding may have made a zero negative
    halves = _num_nodes(mean, scaled)  # (B, 2)
    flat = angle.reshape(len(angle), -1)
    density = torch.empty_like(flat)
    for some in halves.prod(-1).argsort().split(_TOGETHER):  # of nearly the same number
        density[:, some] = _trapezoid(mean[some], scaled[some], halves[some].amax(0).tolist(), flat[:, some])
    return density.view(angle.shape)


def _num_nodes(mean: Tensor, scaled: Tensor) -> Tensor:
    """Return how many nodes on either side of each axis (B, 2) are wanted."""
    deviation = scaled.norm(dim=-2)
    nearest = (mean.norm(dim=-1) - _REACH * deviation.amax(-1)).clamp_min(1)  # the smallest kappa, if that is large
    wanted = _REACH * (deviation / nearest.sqrt().unsqueeze(-1)).clamp_min(1) / _STEP
    return wanted.ceil().clamp_max(_MOST).long()


def _trapezoid(mean: Tensor, scaled: Tensor, halves: list[int], angle: Tensor) -> Tensor:
    """Return p(angle) (M, G) for m (G, 2) and a root of V (G, 2, 2)."""
    lines = [torch.linspace(-_REACH, _REACH, 2 * half + 1, dtype=mean.dtype, device=mean.device) for half in halves]
    z = torch.cartesian_prod(*lines)
    squared = z.square().sum(-1)
    z, squared = z[squared <= _REACH**2], squared[squared <= _REACH**2]
    log_weight = -0.5 * squared - (-0.5 * squared).logsumexp(0)
    eta = mean + torch.einsum("gde,qe->qgd", scaled, z)  # (Q, G, 2)
    kappa = eta.norm(dim=-1)
    height = log_weight.unsqueeze(-1) - kappa - torch.special.i0e(kappa).log() - math.log(2 * math.pi)
    east, north = eta.unbind(-1)
    size = max(_CHUNK // height.numel(), 1)
    parts = [
        torch.exp(part.cos().unsqueeze(1) * east + part.sin().unsqueeze(1) * north + height).sum(1)
        for part in angle.split(size)
    ]
    return torch.cat(parts)
