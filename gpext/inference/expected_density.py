r"""The expected log density of a prediction under itself, E[log p(Y)] for Y ~ p(y) = int p(y | f) N(f | m, V) df.

A log density alone does not tell whether a datum is surprising: a count of 1000 has a log mass of at most -4 or so, one
of 0 nearly none. The log density less this expectation does, whatever the scale or the number of classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpext.bounds import num_latents
from gpext.distributions.drawing import drawn_from
from gpext.distributions.predictive.correlated_latents import draw_latents
from gpext.likelihoods.latent import LatentLikelihood

_NUM_DRAWS = 8  # of Y where it has infinitely many values; each costs what log_loo does


def expected_log_density(
    likelihood: Any,
    log_density: Callable[[Tensor, Tensor, Tensor], Tensor],
    targets: Tensor,
    mean: Tensor,
    variance: Tensor,
) -> Tensor:
    """Return E[log p(Y)] (..., N): a sum over the values of Y where they are finitely many, else a mean over draws.

    The draws are the same each time. nan where p(y | f) cannot be had as a distribution of whole targets: one that is a
    time and whether it was seen has a p(y | f) of times alone. nan for all data, too, where a prediction of one is so
    wide that a draw of f or of Y has no place among numbers: a rate of e^800, a proportion of 1e-400.

    Args:
        likelihood: p(y | f), of one latent or several.
        log_density: maps (targets, mean, variance) to log p(y) (..., N).
        targets: what was observed, for shape and dtype.
        mean: m (..., N), or (..., D, N) of D latents.
        variance: the variances in the shape of the mean, or the covariances (..., D, D, N) of each datum.
    """
    several = num_latents(likelihood) is not None
    unknown = torch.full_like(mean.select(-2, 0) if several else mean, torch.nan)
    try:
        given = likelihood.forward(mean)
    except (NotImplementedError, ValueError):  # torch's distributions refuse a rate of 0 by a ValueError
        return unknown
    if isinstance(likelihood, LatentLikelihood) and likelihood.target_dims(targets) != len(given.event_shape):
        return unknown
    if given.has_enumerate_support and not given.event_shape:
        values = given.enumerate_support(expand=False).flatten().to(targets)
        log_mass = torch.stack([log_density(value.expand_as(unknown), mean, variance) for value in values])
        return torch.where(log_mass > -torch.inf, log_mass.exp() * log_mass, 0.0).sum(0)
    total = torch.zeros_like(unknown)
    generator = torch.Generator(mean.device).manual_seed(0)
    for _ in range(_NUM_DRAWS):
        if variance.dim() > mean.dim():
            f = draw_latents(mean, variance, torch.Size(), generator)
        else:
            f = mean + variance.sqrt() * torch.randn(
                mean.shape, generator=generator, dtype=mean.dtype, device=mean.device
            )
        drawn = _draw(likelihood, f, targets, generator)
        if drawn is None:
            return unknown
        total = total + log_density(drawn, mean, variance)
    return total / _NUM_DRAWS


def _draw(likelihood: Any, f: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor | None:
    """Return Y given f as targets, or None where f or Y cannot be had as numbers in the support."""
    try:
        with drawn_from(generator):
            drawn: Tensor = likelihood.forward(f).sample()
        # Proportions that float64 tells from zero need not be told from it in the dtype of the targets.
        drawn = drawn if targets.is_floating_point() else drawn.to(targets.dtype)
        if isinstance(likelihood, LatentLikelihood):
            likelihood.check(drawn)
    except ValueError:
        return None
    return drawn if bool(drawn.isfinite().all()) else None
