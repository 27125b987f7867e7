r"""Maximise a variational bound site by site [KMM12 Alg. 1], at the speed of matrix products.

Datum i with cavity r = 1/v_i - tau_i, b = m_i/v_i - nu_i gets the site that is best for it alone
(:mod:`gpext.inference.drivers.single_site`), and with d = tau_i' - tau_i the posterior moves by rank one:

    V <- V - d / (1 + d V_ii) V_:i V_:i',     m <- m + (nu_i' - nu_i - d m_i) / (1 + d V_ii) V_:i

Every such step raises the bound. KMM12 moves only v_i here and all of m at the end of a sweep; moving both at once
needs fewer sweeps. Omega = K^-1 is never formed: r is the paper's Omega_ii - k~.

For k data at a time only the k x k block of V has to follow; V itself follows after the block by one product of rank k.
With c_i the column V_:i as datum i finds it, w_i = d_i / (1 + d_i c_ii) and p_i what m moves by along it,

    V_:i = c_i + sum_{j<i} w_j c_ij c_j,  or  V_:b = C U,  U_ji = w_j c_ij, unit upper triangular,
    V <- V - C diag(w) C',     m <- m + C p,     log|I + K T| <- log|I + K T| + sum_i log(1 + d_i c_ii)

The best site is a smooth function of the cavity: solved for all data at the cavities they have when a sweep begins,
then followed to first order while their predecessors move, and solved again for a block of which one has moved far.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpext.inference.drivers.fixed_point import Iterate, Patience, Terms
from gpext.inference.drivers.single_site import slopes, solve_scalar
from gpext.inference.problem import Problem
from gpext.linalg.products import times
from gpext.sites import GaussianSites

_PATIENCE = 50  # sweeps
_BLOCK = 128
_PANEL = 2 * _BLOCK  # columns of V whose lower part is updated together
_SOLVED = 1e-3  # residual of a site from which Newton's step is enough
_FAR = 0.05  # relative motion of a cavity beyond which the response to it is found anew

TermsAt = Callable[[slice | Tensor], Terms]
_Responses = list[list[float]]  # r, b, tau, nu, tau_r, tau_b, nu_r, nu_b of each datum, as Python reads them fastest


@torch.no_grad()
def sweep_sequentially(
    problem: Problem,
    terms: Terms,
    terms_at: TermsAt,
    start: Iterate,
    max_sweeps: int,
    tolerance: float,
) -> tuple[GaussianSites, list[Tensor]]:
    """Return the sites after as many sweeps as it takes, and F after each.

    Ends when the residual of every site (see `fixed_point.climb`) is below `tolerance`, after `max_sweeps`, after 50
    sweeps that neither raise F nor shrink the residuals, or at once where a sweep lowers F or rounding leaves no
    posterior: the sites before it are returned then.

    Args:
        problem: one posterior of one latent, not a batch.
        terms: F_i of all data.
        terms_at: F_i of some of the data.
        start: where to begin.
        max_sweeps: maximum number of sweeps.
        tolerance: of the residual.
    """
    state = SequentialState(problem, start)
    size = state.mean.numel()
    blocks = [(part, terms_at(part)) for part in (slice(i, i + _BLOCK) for i in range(0, size, _BLOCK))]
    value, residual = start.value, start.residual
    patience = Patience(_PATIENCE)
    trace: list[Tensor] = []
    while len(trace) < max_sweeps and not bool((residual < tolerance).all()):
        before = state.sites
        if patience.is_lost(value, residual) or not state.sweep(blocks, terms, terms_at):
            return before, trace
        new_value, residual = state.evaluate(terms)
        if not bool(new_value >= value - start.rounding):
            return before, trace
        value = new_value
        trace.append(value)
    return state.sites, trace


class SequentialState:
    """The posterior N(m, V) of one latent as dense moments, and its sites."""

    def __init__(self, problem: Problem, start: Iterate) -> None:
        self.prior_mean = problem.mean.detach()
        self.mean, self.covariance = start.mean.clone(), start.posterior.covariance.clone()
        self.shift, self.precision = start.sites.shift.clone(), start.sites.precision.clone()
        self.log_det = start.posterior.log_det
        self._index = torch.arange(len(self.mean), device=self.mean.device)

    @property
    def sites(self) -> GaussianSites:
        """A copy of the current sites."""
        return GaussianSites(self.shift.clone(), self.precision.clone())

    def sweep(self, blocks: list[tuple[slice, Terms]], terms: Terms, terms_at: TermsAt) -> bool:
        """Give every datum its best site in turn; return False where rounding has left one no cavity."""
        variance = self.covariance.diagonal()
        r, b = 1 / variance - self.precision, self.mean / variance - self.shift
        if not _is_proper(variance, r, b):
            return False
        responses = _respond(terms, terms_at, self._index, r, b, self.sites)
        return all(self.visit_block(part, terms_there, terms_at, responses[part]) for part, terms_there in blocks)

    def visit_block(self, part: slice, terms: Terms, terms_at: TermsAt, responses: _Responses) -> bool:
        """Give every datum of a block its best site in turn; return False where rounding has left it no cavity."""
        block = self.covariance[part, part]
        mean, old = self.mean[part], GaussianSites(self.shift[part], self.precision[part])
        variance = block.diagonal()
        if not _is_proper(variance, 1 / variance - old.precision, mean):
            return False
        turns = _take_turns(block, mean, old, responses)
        if turns.is_far:  # the predecessors have moved these cavities far: once more from where they came to be
            r, b = turns.cavities
            if not _is_proper(1 / (r + old.precision), r, b):
                return False
            turns = _take_turns(block, mean, old, _respond(terms, terms_at, self._index[part], r, b, turns.sites))
        within, weight = turns.columns, turns.weight
        columns = torch.linalg.solve_triangular(
            weight.unsqueeze(-1) * within.mT, self._columns(part), upper=True, left=False, unitriangular=True
        )
        self.log_det = self.log_det - torch.log1p(-weight * within.diagonal()).sum()
        self.mean = self.mean + times(columns, turns.pull)
        change = weight.unsqueeze(-1) * columns.mT
        for start in range(0, len(columns), _PANEL):  # the lower triangle only
            panel = slice(start, start + _PANEL)
            self.covariance[start:, panel].addmm_(columns[start:], change[:, panel], alpha=-1)
        self.shift[part], self.precision[part] = turns.sites.shift, turns.sites.precision
        return True

    def _columns(self, part: slice) -> Tensor:
        """Return V_:b; only the panels on and below the diagonal are kept up to date."""
        panel = part.start // _PANEL * _PANEL
        above = self.covariance[part, :panel].mT
        return torch.cat([above, self.covariance[panel:, part]])

    def evaluate(self, terms: Terms) -> tuple[Tensor, Tensor]:
        """Return F, nan where rounding has left no posterior, and the residuals (N,) here."""
        sites, variance = self.sites, self.covariance.diagonal()
        if not _is_proper(variance, variance, self.mean):
            return self.log_det * torch.nan, variance
        local = terms(self.mean, variance)
        mu, e = self.prior_mean, self.shift - self.precision * self.prior_mean
        normalizer = (
            sites.expected_log(mu, torch.zeros_like(mu)) + 0.5 * e * (self.mean - mu)
        ).sum() - 0.5 * self.log_det
        value = normalizer - sites.expected_log(self.mean, variance).sum() + local.total
        return value, local.residual(sites, self.mean, variance)


def _is_proper(variance: Tensor, cavity_precision: Tensor, shift: Tensor) -> bool:
    finite = cavity_precision.isfinite() & shift.isfinite()
    return bool((finite & (variance > 0) & (cavity_precision > 0)).all())


def _respond(terms: Terms, terms_at: TermsAt, index: Tensor, r: Tensor, b: Tensor, sites: GaussianSites) -> _Responses:
    """Return the best sites at given cavities, and to first order at neighbouring ones.

    The solution obeys f_m + b - r m = 0 and 1/v - r + 2 f_v = 0, and tau = 1/v - r, nu = m/v - b; the second
    derivatives of f are finite differences of its first. Only those far from their solution are solved for, which late
    sweeps leave few of.

    Args:
        terms: F_i of these data.
        terms_at: F_i of some of all data.
        index: which of all data these are.
        r: precisions of the cavities.
        b: shifts of the cavities.
        sites: where to start.
    """
    v = 1 / (r + sites.precision)
    m = v * (b + sites.shift)
    at = slopes(terms, m, v)
    f_m, f_v, f_mm, f_mv, f_vv = at.derivatives
    far = (at.local.residual(sites, m, v)[0] > _SOLVED).nonzero().squeeze(-1)
    if len(far):
        of_those = terms_at(index[far])
        begin = GaussianSites(sites.shift[far], sites.precision[far])
        solved = solve_scalar(of_those, b[far], r[far], begin, max_steps=20, tolerance=_SOLVED)
        v = v.index_copy(0, far, 1 / (r[far] + solved.precision))
        m = m.index_copy(0, far, v[far] * (b[far] + solved.shift))
        there = slopes(of_those, m[far], v[far]).derivatives
        f_m, f_v, f_mm, f_mv, f_vv = (
            whole.index_copy(0, far, part) for whole, part in zip(at.derivatives, there, strict=True)
        )
    # Newton's step for (m, v), and its derivatives in (r, b)
    a11, a12, a21, a22 = f_mm - r, f_mv, 2 * f_mv, 2 * f_vv - 1 / v.square()
    det = a11 * a22 - a12 * a21
    g1, g2 = f_m + b - r * m, 1 / v - r + 2 * f_v
    dm, dv = -(a22 * g1 - a12 * g2) / det, -(a11 * g2 - a21 * g1) / det
    safe = (dv.abs() < 0.1 * v) & (dm.abs() < 0.1 * v.sqrt()) & (a11 < 0) & (det > 0)
    m, v = torch.where(safe, m + dm, m), torch.where(safe, v + dv, v)
    m_r, v_r = (a22 * m - a12) / det, (a11 - a21 * m) / det
    m_b, v_b = -a22 / det, a21 / det
    columns = [
        r,
        b,
        1 / v - r,
        m / v - b,
        torch.where(safe, -v_r / v.square() - 1, 0),  # tau_r
        torch.where(safe, -v_b / v.square(), 0),  # tau_b
        torch.where(safe, m_r / v - m * v_r / v.square(), 0),  # nu_r
        torch.where(safe, m_b / v - m * v_b / v.square() - 1, 0),  # nu_b
    ]
    rows: _Responses = torch.stack(columns, -1).tolist()
    return rows


@dataclass(frozen=True)
class _Turns:
    """The cavities of the data of a block, in the order of their updates, and the sites that were found."""

    sites: GaussianSites
    cavities: tuple[Tensor, Tensor]  # r and b
    columns: Tensor  # c_i of the block, from row i on (k, k)
    weight: Tensor  # w
    pull: Tensor  # p
    is_far: bool  # whether a cavity had moved far from where the response was found


def _take_turns(block: Tensor, mean: Tensor, old: GaussianSites, responses: _Responses) -> _Turns:
    """Give the data of a block their sites in turn."""
    V, m = block.cpu().numpy(), mean.cpu().numpy()
    size = len(m)
    columns = np.zeros((size, size), order="F")
    weight, pull = np.zeros(size), np.zeros(size)
    taus, nus = old.precision.tolist(), old.shift.tolist()
    seen = []
    is_far = False
    for i, (r0, b0, tau, nu, tau_r, tau_b, nu_r, nu_b) in enumerate(responses):
        row = columns[i, :i]
        column = V[i:, i] - columns[i:, :i] @ (weight[:i] * row)
        v, mean_i = float(column[0]), float(m[i] + row @ pull[:i])
        inverse = 1 / v if v > 0 else math.nan
        r, b = inverse - taus[i], mean_i * inverse - nus[i]
        dr, db = r - r0, b - b0
        is_far = is_far or abs(dr) > _FAR * r0 or db * db * v > _FAR**2
        tau, nu = tau + tau_r * dr + tau_b * db, nu + nu_r * dr + nu_b * db
        if not r + tau > 0:  # too far for the first order, or nothing left of v
            tau, nu, is_far = taus[i], nus[i], True
        d, dn = tau - taus[i], nu - nus[i]
        columns[i:, i] = column
        weight[i] = d / (1 + d * v)
        pull[i] = (dn - d * mean_i) / (1 + d * v)
        seen.append((tau, nu, r, b))
    new_tau, new_nu, r, b = torch.tensor(seen, dtype=block.dtype, device=block.device).unbind(-1)
    of_block, w, p = (torch.from_numpy(array).to(block) for array in (columns, weight, pull))
    return _Turns(GaussianSites(new_nu, new_tau), (r, b), of_block, w, p, is_far)
