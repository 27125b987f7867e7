r"""The exact posterior of a likelihood that is Gaussian in f, which every rule approximates: one step, no iteration.

    log p(y_i | f) = log p(y_i | m_i) + g_i (f - m_i) - tau_i (f - m_i)^2 / 2
    log p(y) = log p(y | m) - (m - mu)' K^-1 (m - mu) / 2 - log|I + K T| / 2,      m the posterior mean

Whether it is so the likelihood's own derivatives say, not its class.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.bounds import conditional_log_prob
from gpext.inference.expansion import expand
from gpext.inference.problem import Problem
from gpext.inference.result import InferenceResult, Status
from gpext.likelihoods.curvature import log_prob_derivatives
from gpext.sites import GaussianSites

_PLACES = (0.1, -0.1)  # next to the prior mean, in widths of the prior or the likelihood, the smaller
_SAME = 1e-10  # relative error of a second derivative, and of a slope, that counts as none


def exact_result(problem: Problem, name: str) -> InferenceResult | None:
    """Return the exact posterior and evidence if log p(y | f) of one latent is a parabola for every datum, else None.

    None, too, if rounding leaves no posterior. Before anything is factorised, the parabola is verified near the prior
    mean; before anything is returned, at the posterior mean.

    Args:
        problem: prior, likelihood and targets.
        name: of the rule.
    """
    if problem.num_latents is not None:
        return None
    with torch.no_grad():
        mu = problem.mean.detach()
        _, slope, bend = log_prob_derivatives(problem.likelihood, problem.targets, mu)
        if not bool((bend < 0).all()):
            return None
        width = torch.minimum(problem.prior.variance.detach(), -1 / bend).sqrt()
        if not all(_continues(problem, mu, slope, bend, mu + place * width) for place in _PLACES):
            return None
        posterior = problem.condition(GaussianSites(slope - bend * mu, -bend))
        mean = posterior.mean
        if not (bool(posterior.positive_definite.all()) and _continues(problem, mu, slope, bend, mean)):
            return None
    at = expand(problem.likelihood, problem.targets, mean)
    accurate, energy = problem.on_range(posterior, mean)
    with torch.no_grad():
        log_prob = conditional_log_prob(problem.likelihood, problem.targets, accurate)
    value = log_prob.sum(-1) - energy - 0.5 * posterior.log_det
    evidence = problem.attach(value, (at.log_prob + at.spread(posterior)).sum(-1), posterior)
    return problem.result(
        f"{name}, exact as the likelihood is Gaussian", posterior, evidence, Status.CONVERGED, [value]
    )


def _continues(problem: Problem, at: Tensor, slope: Tensor, bend: Tensor, f: Tensor) -> bool:
    """Return whether the derivatives of log p(y | f) at f are those of the parabola that it is at another place."""
    _, there, curved = log_prob_derivatives(problem.likelihood, problem.targets, f)
    turned = bend * (f - at)
    is_straight = (there - slope - turned).abs() <= _SAME * (slope.abs() + turned.abs())
    return bool((is_straight & ((curved - bend).abs() <= _SAME * bend.abs())).all())
