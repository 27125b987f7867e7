r"""Gibbs sampling in the augmented model: both conditionals are exact [GWO20 Sec. 3.4].

    w_i ~ pi(. | c_i = |h_i(f_i)|)                                   one independent draw a datum
    f   ~ N(m, V),  V = (K^-1 + T)^-1,  m = mu + V (nu - tau mu)      at the sites tau = 2 w gamma, nu = g + tau f0

The Gaussian is drawn by Matheron's rule from a draw f0 of the prior, so that no factor of V is needed:

    f = f0 + V (nu - tau f0 + sqrt(tau) eps),    f0 ~ N(mu, K),  eps ~ N(0, I)

One Cholesky of size N a draw, or a sparse one, or the solve of one system by products. Over-relaxed, a step of the
chain goes past the mean of f given w instead of to a draw of its own; the chain then alternates about its mean, and
averages over it are more accurate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpext.augmentations import Augmentation
from gpext.posteriors import DensePosterior, MatrixFreePosterior, NeighbourPosterior
from gpext.sites import GaussianSites


def draw_sites(
    augmentation: Augmentation, latent: Tensor, *, generator: torch.Generator | None = None
) -> GaussianSites:
    """Return the sites at w ~ p(w | f, y), one independent draw for each latent value.

    Args:
        augmentation: of the targets.
        latent: f (..., N), any batch the targets broadcast with.
        generator: for the random numbers.
    """
    mixing = augmentation.radial.mixing(augmentation.squared_distance(latent))
    return GaussianSites(*torch.broadcast_tensors(*augmentation.site(mixing.sample(generator=generator))))


def draw_latent(
    posterior: DensePosterior | NeighbourPosterior | MatrixFreePosterior,
    prior_draw: Tensor,
    *,
    current: Tensor | None = None,
    overrelaxation: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return a draw of f given the sites that a posterior is conditioned on (..., N).

    Args:
        posterior: the prior conditioned on sites that are not negative.
        prior_draw: f0 (..., N), an independent draw of the prior.
        current: f (..., N), needed for over-relaxation.
        overrelaxation: rho in [0, 1): the draw has correlation -rho with `current`, and the same distribution if that
            has it [Adler 1981]. With 0 it is independent.
        generator: for the random numbers.
    """
    sites, mu = posterior.sites, posterior.prior_mean
    noise = torch.randn(prior_draw.shape, dtype=mu.dtype, device=mu.device, generator=generator)
    pull = sites.shift - sites.precision * prior_draw + sites.precision.sqrt() * noise
    if current is None or overrelaxation == 0:
        return prior_draw + posterior.covariance_times(pull)
    # m - rho (f - m) + share (f' - m) with f' the independent draw; both m and f' are V times a vector, added up first
    share = math.sqrt(1 - overrelaxation**2)
    rest = 1 + overrelaxation - share
    pull = share * pull + rest * (sites.shift - sites.precision * mu)
    return share * prior_draw + rest * mu - overrelaxation * current + posterior.covariance_times(pull)
