"""The D correlated Gaussian latents of each datum, as predictive distributions have them."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_latents(
    mean: Tensor, covariance: Tensor, sample_shape: torch.Size, generator: torch.Generator | None
) -> Tensor:
    """Return draws (*sample_shape, ..., D, N) of the latents of each datum, given (..., D, N) and (..., D, D, N)."""
    value, vectors = torch.linalg.eigh(covariance.movedim(-1, -3))
    shape = sample_shape + mean.mT.shape
    noise = torch.randn(shape, generator=generator, dtype=mean.dtype, device=mean.device)
    noise = value.clamp_min(0).sqrt() * noise  # rounding may have made a zero negative
    return (mean.mT + (vectors @ noise.unsqueeze(-1)).squeeze(-1)).mT


def in_every(shape: torch.Size, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean (..., D, N) and covariance (..., D, D, N), repeated for values of a shape (..., N)."""
    latents = mean.size(-2)
    *batch, size = torch.broadcast_shapes(shape, mean.select(-2, 0).shape)
    return mean.expand(*batch, latents, size), covariance.expand(*batch, latents, latents, size)
