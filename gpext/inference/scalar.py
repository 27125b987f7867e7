r"""The one-datum problem: the best Gaussian N(m, v) for one factor and a Gaussian cavity, for all data at once.

    max over m, v:  F_i(m, v) - KL(N(m, v) || cavity),     cavity prop. to exp(b f - r f^2 / 2),  r > 0

is the coordinate step of KMM12 Algorithm 1 in m and v together. Its solution is a site (nu, tau) with

    v = 1 / (r + tau),   m = v (b + nu),   tau = -2 dF_i/dv,   nu = dF_i/dm + tau m
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.inference.fixed_point import Terms
from gpext.sites import GaussianSites


def solve_scalar(
    terms: Terms,
    cavity_shift: Tensor,
    cavity_precision: Tensor,
    sites: GaussianSites,
    *,
    max_steps: int,
    tolerance: float,
) -> GaussianSites:
    """Return the best site of every datum for its own cavity, by damped natural-gradient steps.

    Every datum has its own step length: doubled (up to one) after a step that raises its objective, halved after one
    that does not and is taken back.

    Args:
        terms: F_i and its derivatives at given marginals.
        cavity_shift: b (..., N).
        cavity_precision: r (..., N), positive.
        sites: where to start, with r + tau > 0.
        max_steps: evaluations of the terms.
        tolerance: relative accuracy of the marginals.
    """
    b, r = cavity_shift, cavity_precision

    def visit(sites: GaussianSites) -> tuple[Tensor, GaussianSites, Tensor]:
        v = 1 / (r + sites.precision)
        m = v * (b + sites.shift)
        proper = (v > 0) & v.isfinite() & m.isfinite()
        m, v = torch.where(proper, m, 0), torch.where(proper, v, 1)
        local = terms(m, v)
        values = local.values.detach()
        if values.dim() < m.dim():  # several latents share a datum: they move together
            values = values.unsqueeze(-2)
        objective = values + _sum_like(values, 0.5 * v.log() - 0.5 * r * (v + m.square()) + b * m)
        objective = torch.where(_all_like(values, proper) & objective.isfinite(), objective, -torch.inf)
        return objective, local.best_sites(m), local.residual(sites, m, v)

    value, best, residual = visit(sites)
    rate = torch.ones_like(value)
    for _ in range(max_steps):
        if bool((residual < tolerance).all()):
            break
        candidate = sites.lerp(best, rate)
        new_value, new_best, new_residual = visit(candidate)
        better = (new_value >= value - 1e-13 * value.abs()) & new_value.isfinite()
        value = torch.where(better, new_value, value)
        sites, best = sites.choose(candidate, better), best.choose(new_best, better)
        residual = torch.where(better, new_residual, residual)
        rate = torch.where(better, (2 * rate).clamp(max=1), rate / 2)
    return sites


def _sum_like(values: Tensor, term: Tensor) -> Tensor:
    return term.sum(-2, keepdim=True) if values.shape != term.shape else term


def _all_like(values: Tensor, flag: Tensor) -> Tensor:
    return flag.all(-2, keepdim=True) if values.shape != flag.shape else flag
