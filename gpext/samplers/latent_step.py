"""The draw of latent values given Gaussian sites, a part of every step of chains over them."""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.inference.gibbs import draw_latent
from gpext.posteriors import DensePrior, NeighbourPrior
from gpext.samplers.chain_ranks import BreakdownError
from gpext.sites import GaussianSites


def draw_given_sites(
    prior: DensePrior | NeighbourPrior,
    sites: GaussianSites,
    shape: torch.Size,
    *,
    current: Tensor | None = None,
    overrelaxation: float = 0.0,
    generator: torch.Generator,
) -> Tensor:
    """Return latent values of a given shape (C, ..., N) drawn from the prior conditioned on the sites of C chains.

    Args:
        prior: of each chain, or one for all.
        sites: (C, ..., N).
        shape: of the draws.
        current: see :func:`gpext.inference.gibbs.draw_latent`, as for `overrelaxation`.
        overrelaxation: rho.
        generator: for the random numbers.

    Raises:
        BreakdownError: a matrix has no factor.
    """
    posterior = prior.condition(sites)
    if not bool(posterior.positive_definite.all()):
        raise BreakdownError("the precision of f given w")
    try:
        before = prior.draw(shape, generator=generator)
    except ValueError as error:
        raise BreakdownError(str(error)) from error
    return draw_latent(posterior, before, current=current, overrelaxation=overrelaxation, generator=generator)


def sites_of(sites: GaussianSites, chain: int) -> GaussianSites:
    """Return the sites (..., N) of one of C chains (C, ..., N)."""
    return GaussianSites(sites.shift[chain], sites.precision[chain])
