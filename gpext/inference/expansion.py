r"""log p(y | f) expanded to second order at f, as sites: what Taylor and Laplace condition the prior on.

    U = -d^2 log p / df df',   nu = u + U f,   u = d log p / df

One number a datum and latent for likelihoods of one latent; diagonal plus rank one for those of several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpext.bounds import num_latents
from gpext.bounds.contracts import HasCurvature, HasExpansionPoint
from gpext.callers import warn_caller
from gpext.likelihoods import AugmentedLikelihood, LatentLikelihood
from gpext.likelihoods.curvature import BlockCurvature, log_prob_derivatives
from gpext.posteriors import JointPosterior, Posterior
from gpext.sites import BlockSites, CoupledSites, GaussianSites, JointSites, block_times

Sites = GaussianSites | JointSites

_POINTS = 15  # at which slopes are evaluated
_MOST_SLOPES = 5  # of a log density made of straight pieces


class DenseBlocksWarning(UserWarning):
    """An inference conditions all latents of all data in one dense system; the message names its cost.

    Example:
        >>> import warnings
        >>> warnings.filterwarnings("ignore", category=DenseBlocksWarning)  # the cost is known, and accepted
        >>> warnings.resetwarnings()
        >>> issubclass(DenseBlocksWarning, UserWarning)
        True
    """


@dataclass(frozen=True)
class Expansion:
    """The expansion at f; in the graph of f and of the likelihood's parameters."""

    log_prob: Tensor  # (..., N)
    gradient: Tensor  # u, like f
    sites: Sites
    cautious: Sites  # the same with a precision that is surely positive

    @property
    def is_finite(self) -> bool:
        """Whether every number is."""
        return all(
            bool(t.isfinite().all()) for t in (self.log_prob, self.gradient, self.sites.shift, self.sites.precision)
        )

    def spread(self, posterior: Posterior | JointPosterior) -> Tensor:
        """Return -tr(U_i V_ii) / 2 (..., N), V_ii the posterior covariance of the latents of a datum."""
        local = posterior.blocks if isinstance(posterior, JointPosterior) else posterior.variance
        return self.sites.expected_log(torch.zeros_like(self.gradient), local)


def expand(likelihood: Any, targets: Tensor, f: Tensor) -> Expansion:
    """Return the expansion of log p(y | f) at f (..., N) or (..., D, N); it is in the graph of f if gradients are on.

    Raises:
        TypeError: a likelihood of several latents that does not say its curvature.
    """
    if num_latents(likelihood) is None:
        log_p, g, bend = log_prob_derivatives(likelihood, targets, f)
        sites = GaussianSites(g - bend * f, -bend)
        safe = _positive(likelihood, targets, f.detach(), -bend.detach())
        return Expansion(log_p, g, sites, GaussianSites(g + safe * f, safe))
    if not isinstance(likelihood, HasCurvature):
        raise TypeError(
            f"Laplace and Taylor need the curvature of a likelihood of several latents; "
            f"{type(likelihood).__qualname__} has no method curvature(targets, f). gpext.inference.KL() serves it."
        )
    found = likelihood.curvature(targets, f)
    if isinstance(found, BlockCurvature):
        blocks, expected = found.blocks, found.expected_blocks
        true = BlockSites(found.gradient + block_times(blocks, f), blocks)
        cautious = BlockSites(found.gradient + block_times(expected, f), expected)
        return Expansion(found.log_prob, found.gradient, true, cautious)
    coupled = []
    for precision in (found.precision, found.expected_precision):
        without = CoupledSites(found.gradient, precision, found.coupling, found.direction)
        shift = found.gradient + without.times(f)
        coupled.append(CoupledSites(shift, precision, found.coupling, found.direction))
    return Expansion(found.log_prob, found.gradient, *coupled)


@torch.no_grad()
def _positive(likelihood: Any, targets: Tensor, f: Tensor, curvature: Tensor) -> Tensor:
    """Return the curvatures (..., N) of one latent, those of a lower bound in place of negative ones.

    A likelihood with an augmentation has a quadratic below log p(y | f) that touches it at f: an outlier then moves as
    far as its weight among the others allows [GWO20 Alg. 1 at no variance]. Others have no curvature there.
    """
    if bool((curvature >= 0).all()):
        return curvature
    if not isinstance(likelihood, AugmentedLikelihood):
        return curvature.clamp_min(0)
    terms = likelihood.unchecked_augmentation(targets)
    _, below = terms.site(terms.radial.mean(terms.squared_distance(f)))
    return torch.where(curvature < 0, below, curvature)


def warn_of_dense_blocks(reason: str, f: Tensor, remedy: str) -> None:
    """Warn that all latents f (..., D, N) are conditioned in one dense system, and of its cost."""
    latents, size = f.shape[-2:]
    warn_caller(
        f"{reason}: one dense system of {latents} latents times {size} data, O((n D)^3) = {(latents * size) ** 3:.0e} "
        f"operations a step and {8 * (latents * size) ** 2 / 2**20:.0f} MB a matrix. {remedy}",
        DenseBlocksWarning,
    )


def require_curvature(likelihood: Any, targets: Tensor, f: Tensor) -> None:
    """Raise TypeError if log p(y | f) of one latent turns without bending: its modes are kinks, without curvature.

    Several latents without structure are warned about: f (..., D, N) is any point of them.
    """
    if num_latents(likelihood) is not None:
        if isinstance(expand(likelihood, targets, f.detach()).sites, BlockSites):
            warn_of_dense_blocks(
                f"the Hessian of {type(likelihood).__qualname__} has no structure that is known",
                f,
                "A likelihood whose curvature() returns a diagonal plus rank one costs O(D n^3).",
            )
        return
    data, of_datum = targets.shape, 0
    if isinstance(likelihood, LatentLikelihood):  # others may have parameters of each datum, as fixed noise has
        of_datum = likelihood.target_dims(targets)
        targets = targets.flatten(0, -1 - of_datum)[:1]
        data = likelihood.datum_shape(targets)
    f = torch.linspace(-3.3, 3.1, _POINTS, dtype=torch.float64, device=targets.device)
    f = f.view(-1, *len(data) * (1,)).expand(-1, *data)
    parts = [f] if of_datum else [f, f + targets.double()]
    if isinstance(likelihood, HasExpansionPoint):  # about which it may bend in a narrow place alone
        at = likelihood.expansion_point(targets).double()
        parts.extend(at + scale * f for scale in (1, 1e-2, 1e-4))
    f = torch.cat(parts)
    with torch.no_grad():
        _, *derivatives = log_prob_derivatives(likelihood, targets, f)
    slope, bend = (values.flatten(1)[:, 0] for values in derivatives)
    # About 0 and about the target apart: a target of 1e9 makes slopes at 0 that hide any curvature.
    bends = bend.view(-1, _POINTS).abs().amax(-1) > 1e-8 * slope.view(-1, _POINTS).abs().amax(-1)
    # A kink leaves few different slopes: one alone, or as many as there are points, are of a tail that bends elsewhere.
    levels = 1 + int((slope.sort().values.diff() > 1e-8 * slope.abs().max()).sum())
    if 1 < levels <= _MOST_SLOPES and not bool(bends.any()):
        raise TypeError(
            f"log p(y | f) of {type(likelihood).__qualname__} has no second derivative in f, so Laplace and Taylor do "
            f"not apply; gpext.inference.{'CAVI(), ' * isinstance(likelihood, AugmentedLikelihood)}KL() and EP() do."
        )
