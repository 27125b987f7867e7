r"""Newton's method for the posterior mode that keeps one factorisation: inexact steps by conjugate gradients.

    (K^-1 + U) move = g - K^-1 (f - mu),        U = -d^2 log p / df df' at the current f

solved by conjugate gradients, preconditioned by V0 = (K^-1 + U0)^-1 of an earlier f. Every vector is kept beside its
product with K^-1, which for z = V0 r is r - U0 z, so that K^-1 itself is never applied. A product with V0 of D latents
costs O(D N^2) where a factorisation costs O(D N^3), and by nearest neighbours a fifth to a seventeenth of one; close to
the mode U is close to U0, and a few do. Where it takes more than a few factorisations cost, another one is better. V0
is positive definite, and U need not be: a step ends before a direction along which psi is convex [Nocedal & Wright Alg.
7.1].
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.inference.drivers.ascent import ROUNDING, height, rise
from gpext.inference.expansion import Sites, expand
from gpext.inference.problem import Problem
from gpext.posteriors import JointPosterior, NeighbourPosterior, Posterior, RoughPosterior, precision_blocks
from gpext.sites import GaussianSites

Preconditioner = Posterior | JointPosterior | RoughPosterior

NEAR = 1.0  # posterior standard deviations from rest, within which a Newton step of the means surely leads nearer
_MOST_STEPS, _MOST_PRODUCTS = 12, 12  # of Newton, and of each of its steps
_MOST_BY_NEIGHBOURS = 24  # of all steps: a sparse factor costs as much as 5 to 17 products
_FORCING = 0.1  # of the residual that a step may leave; less close to the mode, where steps converge superlinearly
_ENOUGH = 0.1  # of the tolerance, that a step may leave
_SHARP = 1e8  # U k_ii above which r - U0 z has few digits
_LOSES_DIGITS = 1e6  # how much larger than (f - mu)' K^-1 (f - mu) its terms may be


@torch.no_grad()
def refine_mode(
    problem: Problem, posterior: Preconditioner, f: Tensor, weights: Tensor, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return f and K^-1 (f - mu) nearer to the mode, and the length of the last step (...) in the units of `posterior`.

    It ends where steps are shorter than the tolerance, by rounding no longer halve, cannot raise log p(y, f), or have
    taken so many products that another factorisation is cheaper; never below the log p(y, f) it began with.

    Args:
        problem: prior, likelihood and targets.
        posterior: the prior conditioned on the sites of an f nearby.
        f: latent values (..., N), or (..., D, N).
        weights: K^-1 (f - mu).
        tolerance: in posterior standard deviations.
    """
    last = torch.full_like(problem.inner(f, f), torch.inf)
    if _is_sharp(problem, posterior):
        return f, weights, last
    left = _MOST_BY_NEIGHBOURS if isinstance(posterior, NeighbourPosterior) else _MOST_STEPS * _MOST_PRODUCTS
    for _ in range(_MOST_STEPS):
        at = expand(problem.likelihood, problem.targets, f)
        psi, size = height(problem, at, f, weights)
        if not (at.is_finite and bool(psi.isfinite().all())):
            break
        residual = at.gradient - weights
        first = posterior.solve(residual)
        length = problem.inner(residual, first[0]).clamp_min(0).sqrt()
        ended = (length < tolerance) | (length < ROUNDING) & (length > 0.5 * last)
        last = length
        if bool(ended.all()):
            break
        enough = (torch.minimum(torch.full_like(length, _FORCING), length) * length).clamp_min(_ENOUGH * tolerance)
        move, turn, used = newton_step(problem, posterior, at.sites, residual, first, enough, _MOST_PRODUCTS)
        left -= 1 + used
        slope = problem.inner(residual, move)
        if not bool((slope > 0).any()):
            break
        higher = rise(problem, (f, weights), (move, turn), psi, size, slope, length, torch.ones_like(psi))
        if higher is None or _cancels(problem, *higher):
            break
        f, weights = higher
        if left <= 0:
            break
    return f, weights, last


@torch.no_grad()
def rough_newton_step(
    problem: Problem, posterior: Posterior, sites: GaussianSites, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a move p, the first of a Newton step's by conjugate gradients, and K^-1 p.

    It is along V0 residual, as long as leaves least of the residual; zero where sites are too sharp for products with
    K^-1, or T so negative that there is no such length.

    Args:
        problem: for inner products.
        posterior: the prior conditioned on sites nearby.
        sites: of precisions T.
        residual: (..., N).
    """
    step, turn = posterior.solve(residual)
    curvature = problem.inner(step, turn + sites.precision * step)
    serves = (curvature > 0) & (not _is_sharp(problem, posterior))
    rate = problem.per_value(torch.where(serves, problem.inner(residual, step) / curvature, 0.0))
    return rate * step, rate * turn


def _is_sharp(problem: Problem, posterior: Preconditioner) -> bool:
    """Return whether products with K^-1 have few digits, for any site."""
    sites = posterior.sites
    if isinstance(sites, GaussianSites):
        own = sites.precision
    else:
        own = precision_blocks(sites).diagonal(dim1=-3, dim2=-2).mT
    return bool((own.abs() * problem.prior.variance.detach() > _SHARP).any())


def _cancels(problem: Problem, f: Tensor, weights: Tensor) -> bool:
    """Return whether (f - mu)' K^-1 (f - mu) is lost in its terms.

    A singular K leaves the part of K^-1 (f - mu) in its null space open, which grows where U is far from U0.
    """
    apart = f - problem.mean
    energy = problem.inner(apart, weights)
    return bool((problem.inner(apart.abs(), weights.abs()) > _LOSES_DIGITS * (1 + energy.abs())).any())


def newton_step(
    problem: Problem,
    posterior: Preconditioner,
    sites: Sites,
    residual: Tensor,
    first: tuple[Tensor, Tensor],
    enough: Tensor,
    most: int,
) -> tuple[Tensor, Tensor, int]:
    """Return an approximate (K^-1 + U)^-1 residual, its product with K^-1, and the number of products with V0 it took.

    It ends before a direction along which psi is convex; where that is the first, it is the step.

    Args:
        problem: for inner products.
        posterior: the preconditioner.
        sites: U.
        residual: like f.
        first: V0 residual, and its product with K^-1.
        enough: sqrt(residual' V0 residual) (...) that may be left of it.
        most: products with V0 after the first.
    """
    step, turn = torch.zeros_like(residual), torch.zeros_like(residual)
    size = problem.inner(residual, first[0]).clamp_min(0)
    p, Kp = first  # Kp is K^-1 p, as Kz below is K^-1 z
    used = 0
    while used < most:
        image = Kp + sites.times(p)
        curvature = problem.inner(p, image)
        going = (curvature > 0) & (size > enough.square())
        if not bool(going.any()):
            break
        rate = problem.per_value(torch.where(going, size / curvature, 0.0))
        step, turn, residual = step + rate * p, turn + rate * Kp, residual - rate * image
        z, Kz = posterior.solve(residual)
        used += 1
        last, size = size, problem.inner(residual, z).clamp_min(0)
        turned = problem.per_value(torch.where(going, size / last, 0.0))
        p, Kp = z + turned * p, Kz + turned * Kp
    moved = problem.per_value(problem.inner(step, step) > 0)
    return torch.where(moved, step, first[0]), torch.where(moved, turn, first[1]), used
