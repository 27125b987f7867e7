r"""EP site by site, as it was first written down [Minka 2001; R&W Alg. 3.5, at any power].

Datum i with marginal N(m_i, v_i) steps by delta towards the site that would match, and the posterior moves by rank one:

    dtau = (delta / eta) (1 / v^ - 1 / v_i),   dnu = (delta / eta) (m^ / v^ - m_i / v_i)
    V <- V - dtau / (1 + dtau v_i) V_:i V_:i',   m <- m + (dnu - dtau m_i) / (1 + dtau v_i) V_:i

so that the next datum sees it. A step that would leave V or any cavity improper is halved until it does not, or left
out. After every sweep V is made anew from one factorisation. It needs fewer sweeps than one that moves all sites at
once, each of N tilted integrals one at a time and N updates of N^2: it is here for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpext.inference.ep_internals.moment_matching import At, Match
from gpext.likelihoods.tilted_moments import Tilt
from gpext.sites import GaussianSites

_MOST_HALVINGS = 12
_PROGRESS = 0.7  # of the residual, which counts as such


@torch.no_grad()
def sweep_one_by_one(
    at: At,
    current: Match,
    tilts: Sequence[Tilt],
    *,
    damping: float,
    max_sweeps: int,
    patience: int,
    tolerance: float,
) -> tuple[Match, list[Tensor]]:
    """Return the match with the smallest residuals that were seen, and log Z after each sweep.

    Ends when they are below `tolerance`, after `max_sweeps`, `patience` sweeps without progress, or where a sweep has
    led to what is improper after all.

    Args:
        at: looks at sites.
        current: where to begin, one posterior; proper.
        tilts: of each datum alone, on cavities (1,).
        damping: delta in (0, 1].
        max_sweeps: most sweeps.
        patience: sweeps without progress until it gives up.
        tolerance: of the largest residual.
    """
    trace: list[Tensor] = []
    best, least = current, torch.inf
    mark, waited = torch.inf, 0
    while True:
        size = float(current.size)
        if size < least:
            best, least = current, size
        waited += 1
        if size < _PROGRESS * mark:
            mark, waited = size, 0
        if size < tolerance or size == torch.inf or waited > patience or len(trace) >= max_sweeps:
            return best, trace
        current = at(_visit_all(current, tilts, damping))
        trace.append(current.value)


def _visit_all(match: Match, tilts: Sequence[Tilt], damping: float) -> GaussianSites:
    """Return the sites after every datum has had its turn."""
    eta, covariance, mean = match.power, match.posterior.covariance.clone(), match.mean.clone()
    shift, precision = match.sites.shift.clone(), match.sites.precision.clone()
    variance = covariance.diagonal()  # a view: it follows the updates
    for i, tilt in enumerate(tilts):
        v, m = variance[i : i + 1].clone(), mean[i : i + 1].clone()
        cavity_variance = v / (1 - eta * precision[i] * v)
        if not bool((cavity_variance > 0) & cavity_variance.isfinite()):
            continue  # rounding has left this datum no cavity; the next factorisation may
        found = tilt(m - eta * cavity_variance * (shift[i] - precision[i] * m), cavity_variance)
        d = damping / eta * (1 / found.variance - 1 / v)
        dn = damping / eta * (found.mean / found.variance - m / v)
        column, moved = covariance[:, i].clone(), precision.clone()
        for _ in range(_MOST_HALVINGS):
            weight = d / (1 + d * v)
            moved[i] = precision[i] + d.squeeze()
            if bool(1 + d * v > 0) and _is_proper(variance - weight * column.square(), moved, eta):
                precision = moved
                shift[i] += dn.squeeze()
                covariance.addr_(column, column, alpha=-weight.item())
                mean += (dn - d * m) / (1 + d * v) * column
                break
            d, dn = d / 2, dn / 2
    return GaussianSites(shift, precision)


def _is_proper(variance: Tensor, precision: Tensor, power: float) -> bool:
    """Whether marginals and cavities all have positive variances; not with nan."""
    return bool(((variance > 0) & (power * precision * variance < 1)).all())
