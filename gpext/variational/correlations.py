"""Correlations of the values of a prior, for neighbours that distances do not tell."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpext.linalg.neighbours import Strength


@torch.no_grad()
def correlations(forward: Callable[[Tensor], MultivariateNormal], x: Tensor, root: Tensor) -> Strength:
    r"""Return :math:`|\rho_{ij}|` of what inducing inputs leave of a prior, the mean over its latents.

    Args:
        forward: returns the prior at inputs.
        x: inputs (P, d).
        root: Phi there (P, M), float64, of the part Phi Phi' that is left out.
    """
    variance = forward(x).variance.double() - root.square().sum(-1)
    scale = variance.clamp_min(0).rsqrt()  # inf where nothing is left: such values are correlated with none

    @torch.no_grad()
    def strength(rows: Tensor, columns: Tensor) -> Tensor:
        joint = forward(torch.cat([x[rows], x[columns]])).lazy_covariance_matrix
        K = joint[..., : len(rows), len(rows) :].to_dense().double()
        K = K - root[..., rows, :] @ root[..., columns, :].mT
        found = K.abs() * scale[..., rows].unsqueeze(-1) * scale[..., columns].unsqueeze(-2)
        found = torch.where(found.isfinite(), found, 0.0)
        return found.flatten(0, -3).mean(0) if found.dim() > 2 else found

    return strength
