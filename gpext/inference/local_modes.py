r"""The mode of each datum alone with its prior marginal, and the Gaussian sites there: a start that is always finite.

    f_i^ = argmax  log p(y_i | f_i) - (f_i - mu_i)' K_ii^-1 (f_i - mu_i) / 2,     K_ii diagonal for several latents

At a prior mean far from what the targets say log p(y | f) may overflow (counts at a log rate of 1000), or curve by a
factor of e^40 more than at its mode; no step from there means anything. Points on the way from the prior mean to zero,
where links are of the order of one, bracket the mode from far; Newton's method does the rest, O(N D^3) a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.bounds import conditional_log_prob
from gpext.inference.expansion import Expansion, Sites, expand
from gpext.inference.problem import Problem
from gpext.posteriors.joint import precision_blocks
from gpext.sites import GaussianSites

_POINTS = 65  # on the way to zero
_MOST_STEPS, _MOST_HALVINGS = 60, 30
_NEAR = 1e-3  # of a standard deviation of the one-datum posterior: near enough for a start
_LOST = torch.finfo(torch.float64).min  # for an objective that has overflown; -inf has no differences


@torch.no_grad()
def local_modes(problem: Problem) -> Tensor:
    """Return the modes (..., N) or (..., D, N); the prior mean where the density is nowhere finite."""
    mu, variance = problem.mean.detach(), problem.prior.variance.detach().expand(problem.mean.shape)

    def objective(f: Tensor) -> Tensor:  # (..., N)
        penalty = 0.5 * (f - mu).square() / variance
        penalty = penalty if problem.num_latents is None else penalty.sum(-2)
        value = conditional_log_prob(problem.likelihood, problem.targets, f) - penalty
        return torch.where(value.isfinite(), value, _LOST)

    def over_latents(value: Tensor) -> Tensor:  # what belongs to data, like f
        return value if problem.num_latents is None else value.unsqueeze(-2)

    f, best = mu, objective(mu)
    for k in range(1, _POINTS):
        point = mu * (1 - k / (_POINTS - 1))
        value = objective(point)
        f = torch.where(over_latents(value > best), point, f)
        best = torch.maximum(best, value)
    for _ in range(_MOST_STEPS):
        at = expand(problem.likelihood, problem.targets, f)
        slope = at.gradient - (f - mu) / variance
        step = _newton_step(at, slope, variance)
        length = (slope * step) if problem.num_latents is None else (slope * step).sum(-2)
        going = length.isfinite() & (length > _NEAR**2)
        if not bool(going.any()):
            break
        rate = going.to(f)
        for _ in range(_MOST_HALVINGS):
            moved = f + over_latents(rate) * torch.where(over_latents(going), step, 0.0)
            risen = objective(moved) >= best
            if bool(risen.all()):
                break
            rate = torch.where(risen, rate, rate / 2)
        f = torch.where(over_latents(risen), moved, f)
        best = torch.where(risen, objective(f), best)
    return f


@torch.no_grad()
def modal_sites(problem: Problem) -> Sites:
    """Return the sites of the expansion at the modes, their precisions positive."""
    return expand(problem.likelihood, problem.targets, local_modes(problem)).cautious


@torch.no_grad()
def independent_modal_sites(problem: Problem) -> GaussianSites:
    """Return the same for latents that are independent of each other: of the diagonal of the curvature."""
    f = local_modes(problem)
    at = expand(problem.likelihood, problem.targets, f)
    precision = _blocks(at).diagonal(dim1=-2, dim2=-1)
    precision = precision.squeeze(-1) if problem.num_latents is None else precision.mT
    return GaussianSites(at.gradient + precision * f, precision)


def _blocks(at: Expansion) -> Tensor:
    """Return positive semidefinite curvatures of the data (..., N, D, D), D = 1 for one latent."""
    if isinstance(at.cautious, GaussianSites):
        return at.cautious.precision[..., None, None]
    return precision_blocks(at.cautious).movedim(-1, -3)


def _newton_step(at: Expansion, slope: Tensor, variance: Tensor) -> Tensor:
    """Return (K_ii^-1 + U_i)^-1 slope_i, datum by datum, like f; nan where that has overflown."""
    one = isinstance(at.cautious, GaussianSites)
    right = slope.unsqueeze(-1) if one else slope.mT
    prior = (1 / variance).unsqueeze(-1) if one else (1 / variance).mT
    step, _ = torch.linalg.solve_ex(_blocks(at) + torch.diag_embed(prior), right.unsqueeze(-1))
    return step.squeeze(-1).squeeze(-1) if one else step.squeeze(-1).mT
