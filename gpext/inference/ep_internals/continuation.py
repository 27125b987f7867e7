"""Follow a solution of EP while its problem changes step by step into the one that was asked for.

The path parameter runs from 0, where the problem is easy, to 1. Every solution starts the next; a step that fails is
halved, one that succeeds is lengthened. (Where solutions are hard to follow, the line through the last two of them
misleads; it was tried.) A branch may end before 1: where a cavity stops being a distribution, or where
it turns back.
"""

from __future__ import annotations

from collections.abc import Callable

from gpext.inference.ep_internals.moment_matching import At, Match
from gpext.sites import GaussianSites

_WEAKENINGS = 12

Solve = Callable[[At, Match], Match | None]
"""Finds the solution near a match, or None."""


def follow(
    at: Callable[[float], At], found: Match, solve: Solve, *, step: float, shortest: float
) -> tuple[float, Match]:
    """Return how far along the path the solution could be followed, and the last one.

    Args:
        at: returns the function that evaluates sites at t in [0, 1].
        found: the solution at t = 0.
        solve: finds the solution near a match, or returns None.
        step: the first step in t.
        shortest: the branch has ended where a step this short fails.
    """
    t = 0.0
    while t < 1 and step >= shortest:
        step = min(step, 1 - t)
        evaluate = at(t + step)
        candidate = solve(evaluate, proper_near(evaluate, found.sites))
        if candidate is None:
            step = step / 2
        else:
            t, found, step = (1.0 if step == 1 - t else t + step), candidate, 1.5 * step
    return t, found


def proper_near(at: At, sites: GaussianSites) -> Match:
    """Return the match at some sites, their negative precisions weakened as far as it takes to be proper."""
    for _ in range(_WEAKENINGS):
        found = at(sites)
        if bool(found.size.isfinite().all()):
            break
        negative = sites.precision < 0
        sites = sites.choose(GaussianSites(sites.shift, 0.7 * sites.precision), negative)
    return found
