r"""Newton's method for the posterior mode that keeps one factorisation: inexact steps by conjugate gradients.

    (K^-1 + U) move = g - K^-1 (f - mu),        U = -d^2 log p / df df' at the current f

solved by conjugate gradients, preconditioned by V0 = (K^-1 + U0)^-1 of an earlier f. Every vector is kept beside its
product with K^-1, which for z = V0 r is r - U0 z, so that K^-1 itself is never applied. A product with V0 costs
O(D N^2) where a factorisation costs O(D N^3); close to the mode U is close to U0, and a few do [Nocedal & Wright 7.1].
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.inference.expansion import Sites, expand
from gpext.inference.problem import Problem
from gpext.posteriors import JointPosterior
from gpext.posteriors.joint import precision_blocks

_MOST_STEPS, _MOST_PRODUCTS = 12, 12  # of Newton, and of each of its steps
_FORCING = 0.1  # of the residual that a step may leave; less close to the mode, where steps converge superlinearly
_LOSES_DIGITS = 1e6  # U k_ii above which K^-1 z has few
_EPS = 64 * torch.finfo(torch.float64).eps  # of psi's terms


@torch.no_grad()
def refine_mode(
    problem: Problem, posterior: JointPosterior, f: Tensor, weights: Tensor, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return f and K^-1 (f - mu) nearer to the mode, and the length of the last step (...) in the units of `posterior`.

    It ends where steps are shorter than the tolerance, no longer halve, or no longer raise log p(y, f), and never below
    the log p(y, f) it began with.

    Args:
        problem: prior, likelihood and targets.
        posterior: the prior conditioned on the sites of an f nearby.
        f: latent values (..., D, N).
        weights: K^-1 (f - mu).
        tolerance: in posterior standard deviations.
    """
    best = f, weights, torch.full_like(problem.inner(f, f), torch.inf)
    own = precision_blocks(posterior.sites).diagonal(dim1=-3, dim2=-2).mT
    if bool((own.abs() * problem.prior.variance.detach() > _LOSES_DIGITS).any()):
        return best  # r - U0 z would lose them
    highest = None
    for _ in range(_MOST_STEPS):
        at = expand(problem.likelihood, problem.targets, f)
        log_p, energy = at.log_prob.sum(-1), 0.5 * problem.inner(f - problem.mean, weights)
        psi = log_p - energy
        rounding = _EPS * (at.log_prob.abs().sum(-1) + energy.abs())
        if not (at.is_finite and bool(psi.isfinite().all())):
            return best
        if highest is not None and bool((psi < highest - rounding).any()):
            return best
        residual = at.gradient - weights
        first = posterior.solve(residual)
        length = problem.inner(residual, first[0]).clamp_min(0).sqrt()
        halved = bool((length < 0.5 * best[2]).any())
        best, highest = (f, weights, length), psi
        if not halved or bool((length < tolerance).all()):
            return best
        move, turn = _newton_step(problem, posterior, at.sites, residual, first, length)
        f, weights = f + move, weights + turn
    return best


def _newton_step(
    problem: Problem,
    posterior: JointPosterior,
    sites: Sites,
    residual: Tensor,
    first: tuple[Tensor, Tensor],
    length: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return an approximate (K^-1 + U)^-1 residual, and its product with K^-1; zero where U makes no posterior.

    Args:
        problem: for inner products.
        posterior: the preconditioner.
        sites: U.
        residual: (..., D, N).
        first: V0 residual, and its product with K^-1.
        length: sqrt(residual' V0 residual) (...).
    """
    enough = torch.minimum(torch.full_like(length, _FORCING), length) * length
    step, turn = torch.zeros_like(residual), torch.zeros_like(residual)
    size = length.square()
    p, Kp = first  # Kp is K^-1 p, as Kz below is K^-1 z
    for _ in range(_MOST_PRODUCTS):
        image = Kp + sites.times(p)
        curvature = problem.inner(p, image)
        going = (curvature > 0) & (size > enough.square())
        if not bool(going.any()):
            break
        rate = problem.per_value(torch.where(going, size / curvature, 0.0))
        step, turn, residual = step + rate * p, turn + rate * Kp, residual - rate * image
        z, Kz = posterior.solve(residual)
        last, size = size, problem.inner(residual, z).clamp_min(0)
        turned = problem.per_value(torch.where(going, size / last, 0.0))
        p, Kp = z + turned * p, Kz + turned * Kp
    return step, turn
