r"""The one-datum problem: the best Gaussian N(m, v) for one factor and a Gaussian cavity, for all data at once.

    max over m, v:  F_i(m, v) - KL(N(m, v) || cavity),     cavity prop. to exp(b f - r f^2 / 2),  r > 0

is the coordinate step of KMM12 Algorithm 1 in m and v together. Its solution is a site (nu, tau) with

    v = 1 / (r + tau),   m = v (b + nu),   tau = -2 dF_i/dv,   nu = dF_i/dm + tau m

Natural-gradient steps need no second derivative, but have to be short where the best site depends steeply on the
marginal: for a Poisson count of zero under a prior of variance 1e6, tau = exp(m + v / 2) and a step of a thousandth is
already too long. There Newton's step in (m, v) takes their place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.inference.drivers.fixed_point import Terms
from gpext.inference.local_terms import LocalTerms
from gpext.sites import GaussianSites

_STEEP = 0.2  # length of natural-gradient steps below which Newton's take their place, for good
_STEP = 1e-5  # of finite differences, in standard deviations and parts of the variance
_FINE = 1e-3  # most of it, in units of the distance in which a first derivative changes
_LONGEST = 0.5  # Newton step that narrows, as a part of the variance


def solve_scalar(
    terms: Terms,
    cavity_shift: Tensor,
    cavity_precision: Tensor,
    sites: GaussianSites,
    *,
    max_steps: int,
    tolerance: float,
) -> GaussianSites:
    """Return the best site of every datum for its own cavity, by damped natural-gradient or Newton steps.

    Every datum has its own step length: doubled (up to one) after a step that raises its objective, halved after one
    that does not and is taken back. A datum whose natural-gradient steps have become short takes Newton steps instead.

    Args:
        terms: F_i and its derivatives at given marginals.
        cavity_shift: b (..., N).
        cavity_precision: r (..., N), positive.
        sites: where to start, with r + tau > 0.
        max_steps: maximum number of steps: evaluations of the terms, six of them for Newton's.
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
    rate = pace = torch.ones_like(value)
    has_one_latent = value.shape == b.shape
    is_steep = torch.zeros_like(rate, dtype=torch.bool)
    for _ in range(max_steps):
        if bool((residual < tolerance).all()):
            break
        candidate = sites.lerp(best, rate)
        is_steep = is_steep | (rate < _STEEP) if has_one_latent else is_steep
        by_newton = is_steep
        if bool(is_steep.any()):
            ahead, exists = _newton(terms, b, r, sites, pace, is_steep & ~(residual < tolerance))
            by_newton = is_steep & exists
            candidate = candidate.choose(ahead, by_newton)
        new_value, new_best, new_residual = visit(candidate)
        better = (new_value >= value - 1e-13 * value.abs()) & new_value.isfinite()
        value = torch.where(better, new_value, value)
        sites, best = sites.choose(candidate, better), best.choose(new_best, better)
        residual = torch.where(better, new_residual, residual)
        length = torch.where(by_newton, pace, rate)
        length = torch.where(better, (2 * length).clamp(max=1), length / 2)
        rate, pace = torch.where(by_newton, rate, length), torch.where(by_newton, length, pace)
    return sites


@dataclass(frozen=True)
class Slopes:
    """Derivatives of F_i in m and v, of N data."""

    local: LocalTerms  # here, and a step to either side in m and in v (5, N)
    f_m: Tensor
    f_v: Tensor
    f_mm: Tensor
    f_mv: Tensor
    f_vv: Tensor

    @property
    def derivatives(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The five of them."""
        return self.f_m, self.f_v, self.f_mm, self.f_mv, self.f_vv


def slopes(terms: Terms, m: Tensor, v: Tensor, wanted: Tensor | None = None) -> Slopes:
    """Return the derivatives at N(m, v), the second by central differences of the first.

    The determinant of the second is what remains of products that all but cancel where F is a function of m + v / 2, as
    a count of zero makes it: differences to one side would not do, nor steps that are long beside the distance in which
    the first derivatives change, 1 in m and 2 in v there, however wide the marginal.

    Args:
        terms: F_i and its derivatives at given marginals.
        m: means (N,).
        v: variances (N,).
        wanted: data that need such short steps if there are any; all by default.
    """
    in_m, in_v = _STEP * v.sqrt(), _STEP * v
    found = _differences(terms, m, v, in_m, in_v)
    # A datum whose likelihood is flat has no derivatives at all: any step will do.
    short_m, short_v = (
        _FINE * (d / dd).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        for d, dd in ((found.f_m, found.f_mm), (found.f_v, found.f_vv))
    )
    coarse = (in_m > short_m) | (in_v > short_v)
    coarse = coarse if wanted is None else coarse & wanted
    if not bool(coarse.any()):
        return found
    in_m = torch.where(coarse, torch.minimum(in_m, torch.maximum(short_m, _FINE * in_m)), in_m)
    in_v = torch.where(coarse, torch.minimum(in_v, torch.maximum(short_v, _FINE * in_v)), in_v)
    return _differences(terms, m, v, in_m, in_v)


def _differences(terms: Terms, m: Tensor, v: Tensor, in_m: Tensor, in_v: Tensor) -> Slopes:
    """Return the derivatives by differences over twice these steps."""
    local = terms(torch.stack([m, m + in_m, m - in_m, m, m]), torch.stack([v, v, v, v + in_v, v - in_v]))
    (f_m, right, left, wide, narrow), tau = local.mean_gradient, local.precision
    return Slopes(
        local,
        f_m,
        -0.5 * tau[0],
        (right - left) / (2 * in_m),
        (wide - narrow) / (2 * in_v),
        -0.25 * (tau[3] - tau[4]) / in_v,
    )


def _newton(
    terms: Terms, b: Tensor, r: Tensor, sites: GaussianSites, pace: Tensor, wanted: Tensor
) -> tuple[GaussianSites, Tensor]:
    """Return the sites a part of Newton's way for (m, v), and where the objective is concave, so that there is one.

    With J the objective, J_m = F_m + b - r m and J_v = F_v + 1 / (2 v) - r / 2.
    """
    v = 1 / (r + sites.precision)
    m = v * (b + sites.shift)
    at = slopes(terms, m, v, wanted)
    g_m, g_v = at.f_m + b - r * m, at.f_v + 0.5 / v - 0.5 * r
    h_mm, h_mv, h_vv = at.f_mm - r, at.f_mv, at.f_vv - 0.5 / v.square()
    det = h_mm * h_vv - h_mv.square()
    step_m, step_v = (h_mv * g_v - h_vv * g_m) / det, (h_mv * g_m - h_mm * g_v) / det
    length = pace * torch.where(step_v < 0, (-_LONGEST * v / step_v).clamp(max=1), 1.0)
    m, v = m + length * step_m, v + length * step_v
    exists = (h_mm < 0) & (det > 0) & m.isfinite() & v.isfinite()
    return GaussianSites(m / v - b, 1 / v - r), exists


def _sum_like(values: Tensor, term: Tensor) -> Tensor:
    return term.sum(-2, keepdim=True) if values.shape != term.shape else term


def _all_like(values: Tensor, flag: Tensor) -> Tensor:
    return flag.all(-2, keepdim=True) if values.shape != flag.shape else flag
