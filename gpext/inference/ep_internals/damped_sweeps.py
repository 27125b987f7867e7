r"""Damped parallel sweeps of EP, accelerated, with every cavity kept proper [JVV11 Secs. 3.5, 4.1].

x <- x + delta (x* - x) for all sites at once, or what Anderson's mixing makes of the last few such steps where that
brings the marginals closer to rest. Once they are near it, x* is taken at the means after a rough Newton step. On a
likelihood that is not log-concave x* may have negative precisions, with which cavities can become improper: such sites
are held at precision zero until the others have settled, where all is safe, and only then set free. A step that leaves
what is proper is halved until it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpext.inference.drivers.fixed_point import Mixing
from gpext.inference.ep_internals.joint_matching import JointMatch
from gpext.inference.ep_internals.moment_matching import Match
from gpext.inference.problem import Problem
from gpext.sites import GaussianSites

_SETTLED = 0.03  # motion of the marginals, in their own units, below which sites that were held are set free
_MOST_HALVINGS = 12
_PROGRESS = 0.7  # of the motion, which counts as such

M = TypeVar("M", bound=Match | JointMatch)


@torch.no_grad()
def sweep_damped(
    problem: Problem,
    at: Callable[[Any], M],
    current: M,
    *,
    hold: bool,
    damping: float,
    max_sweeps: int,
    patience: int,
    tolerance: float,
) -> tuple[M, list[Tensor]]:
    """Return the match nearest to rest, and log Z after each evaluation.

    Ends when no site would move the marginals by more than `tolerance`, after `max_sweeps` evaluations, or `patience`
    of them without progress.

    Args:
        problem: prior, likelihood and targets.
        at: evaluates sites.
        current: where to begin; proper.
        hold: keep precisions of one latent from being negative; ends as well when the others have settled.
        damping: delta in (0, 1].
        max_sweeps: maximum number of evaluations.
        patience: evaluations without progress until it gives up.
        tolerance: of the motion, in units of the marginals.
    """
    trace: list[Tensor] = []
    mixing = Mixing(problem)
    best, least, reference, reference_at = current, torch.inf, torch.inf, 0
    proposal, motion = _propose(current, hold)
    is_near = False
    while True:
        if motion < _PROGRESS * reference:
            reference, reference_at = motion, len(trace)
        if motion < least:
            best, least = current, motion
        settled = hold and motion < _SETTLED and bool((proposal.precision == 0).any())
        if motion < tolerance or settled or len(trace) - reference_at > patience or len(trace) >= max_sweeps:
            return best, trace
        near = current if isinstance(current, Match) and not hold and (is_near or current.is_near) else None
        if near is not None:
            if not is_near:
                mixing.forget()  # it is of another map
            is_near, proposal = True, near.proposal_ahead(problem)
        target = current.sites.lerp(proposal, damping)
        mixed: Any = mixing.mix(current.sites, current.variance, target)
        if mixed is not None:
            if hold:
                mixed = GaussianSites(mixed.shift, mixed.precision.clamp_min(0))
            candidate = at(mixed)
            trace.append(torch.where(candidate.proper, candidate.value, current.value))
            next_proposal, next_motion = _propose(candidate, hold)
            if next_motion < motion:
                current, proposal, motion = candidate, next_proposal, next_motion
                continue
            mixing.forget()  # it has been misled
        following = _shortened(at, current, target, trace)
        if following is None:
            return best, trace
        current = following
        proposal, motion = _propose(current, hold)


def _propose(match: Any, hold: bool) -> tuple[Any, float]:
    """Return where a full step would go, and how far that is."""
    proposal = match.positive_proposal if hold else match.proposal
    return proposal, float(match.toward(proposal).max())


def _shortened(at: Callable[[Any], M], current: M, target: Any, trace: list[Tensor]) -> M | None:
    """Return the match a step further, the step halved (in a batch, each its own) until it is proper."""
    rate = torch.ones_like(current.value)
    for _ in range(_MOST_HALVINGS):
        candidate = at(current.sites.lerp(target, rate.unsqueeze(-1)))
        trace.append(torch.where(candidate.proper, candidate.value, current.value))
        if bool(candidate.proper.all()):
            return candidate
        rate = torch.where(candidate.proper, rate, rate / 2)
    return None
