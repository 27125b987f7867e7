r"""The second-order finish of EP: Levenberg-Marquardt on the moment residuals, in all sites at once [MATH.md Sec. 5].

In units of the marginals, s_i = sqrt(v_i), with sites moved by dtau = q / v and dnu = p / s + m dtau,

    dm / s = R p,   dv / v = -(R o R) q,     R_ij = V_ij / (s_i s_j)

and the moments of a tilted distribution move with its cavity by its own third and fourth moments: with
u = (m - m^)/s, w = v^/v, g = m3/s^3, k = m4/v^2 (central moments of p^), x = dm/s, z = dv/v,

    dm^/s = w B - g D / 2,   dv^/v = g B - (k - w^2) D / 2,
    B = x - u z - eta (p + u q),   D = -z - eta q

so that the Jacobian of (log v^/v, (m^ - m)/s) in (p, q) is in closed form.
"""

from __future__ import annotations

import torch
from linear_operator import to_dense
from torch import Tensor

from gpext.inference.ep_internals.moment_matching import At, Match
from gpext.linalg.products import times
from gpext.sites import GaussianSites

_START = 1e-3  # the damping, in units of the residuals' own: they are per standard deviation
_LARGEST = 1e8
_SMALLEST = 1e-12


@torch.no_grad()
def levenberg_marquardt(
    at: At, current: Match, *, max_steps: int, patience: int, tolerance: float
) -> tuple[Match, list[Tensor]]:
    """Return the match after as many steps as bring its residuals below `tolerance`, and log Z after each.

    Every posterior of a batch has its own damping. Ends as well where no step lowers the sum of squares any more, or
    `patience` of them together do not halve it.

    Args:
        at: evaluates sites.
        current: where to begin; proper.
        max_steps: maximum number of steps, each one evaluation.
        patience: steps in which the sum of squares has to halve.
        tolerance: of the largest residual.
    """
    damping = torch.full_like(current.value, _START)
    growth = torch.full_like(damping, 2.0)
    trace: list[Tensor] = []
    sums: list[float] = []
    moved = True
    while len(trace) < max_steps:
        moving = ~(current.size < tolerance)
        if not bool(moving.any()) or bool((damping > _LARGEST).any()):
            break
        sums.append(float(stacked_residual(current).square().sum()))
        if len(sums) > patience and sums[-1] > 0.5 * sums[-1 - patience]:
            break
        if moved:
            gram, gradient = normal_equations(current)
        z = _solve(gram, -gradient, damping) * moving.unsqueeze(-1)
        candidate = at(moved_sites(current, z))
        before, after = stacked_residual(current).square().sum(-1), stacked_residual(candidate).square().sum(-1)
        expected = (z * (damping.unsqueeze(-1) * z - gradient)).sum(-1)
        gain = (before - after) / expected.clamp_min(torch.finfo(before.dtype).tiny)
        better = candidate.proper & (after < before)
        # Nielsen's rule: how good the model was decides how far it is trusted
        eased = damping * (1 - (2 * gain.clamp(0, 1) - 1) ** 3).clamp(min=1 / 3)
        damping = torch.where(better, eased.clamp_min(_SMALLEST), torch.where(moving, damping * growth, damping))
        growth = torch.where(better | ~moving, 2.0, 2 * growth)
        moved = bool((better & moving).any())
        if bool((better | ~moving).all()):
            current = candidate
        elif moved:  # in a batch each posterior decides for itself
            current = at(current.sites.choose(candidate.sites, better.unsqueeze(-1)))
        trace.append(current.value)
    return current, trace


def stacked_residual(match: Match) -> Tensor:
    """Return the residuals (..., 2N): of the log variances, then of the means."""
    return torch.cat([match.width_residual, match.shift_residual], -1)


def normal_equations(match: Match) -> tuple[Tensor, Tensor]:
    """Return J'J (..., 2N, 2N) and J' times the residuals (..., 2N), of the Jacobian J in (p, q).

    J = [[X1 R + P1, Q1 - Z1 S], [X2 R + P2, Q2 - Z2 S]] with S = R o R and the rest diagonal, so that three products of
    size N make what four times as large a one would.
    """
    eta, v = match.power, match.variance
    s = v.sqrt()
    R = to_dense(match.posterior.covariance) / (s.unsqueeze(-1) * s.unsqueeze(-2))
    S = R.square()
    u = -match.shift_residual
    w, g, k = match.tilted.variance / v, match.tilted.third / (v * s), match.tilted.fourth / v.square()
    curve = 0.5 * (k - w.square())
    X = torch.stack([g / w, w - 1])  # (2, ..., N): of the log variances, and of the means
    Z = torch.stack([(curve - g * u) / w - 1, 0.5 * g - (w - 0.5) * u])
    P = -eta * torch.stack([g / w, w])
    Q = eta * torch.stack([(curve - g * u) / w, 0.5 * g - w * u])
    residual = torch.stack([match.width_residual, match.shift_residual])

    def inner(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(0)

    def rows(scale: Tensor, matrix: Tensor) -> Tensor:
        return scale.unsqueeze(-1) * matrix

    def symmetric(matrix: Tensor) -> Tensor:
        return matrix + matrix.mT

    upper = R @ rows(inner(X, X), R) + symmetric(rows(inner(X, P), R)) + torch.diag_embed(inner(P, P))
    lower = S @ rows(inner(Z, Z), S) - symmetric(rows(inner(Z, Q), S)) + torch.diag_embed(inner(Q, Q))
    across = rows(inner(X, Q), R).mT - R @ rows(inner(X, Z), S) - rows(inner(P, Z), S)
    across = across + torch.diag_embed(inner(P, Q))
    gram = torch.cat([torch.cat([upper, across], -1), torch.cat([across.mT, lower], -1)], -2)
    by_p = times(R, inner(X, residual)) + inner(P, residual)
    by_q = inner(Q, residual) - times(S, inner(Z, residual))
    return gram, torch.cat([by_p, by_q], -1)


def _solve(gram: Tensor, right: Tensor, damping: Tensor) -> Tensor:
    damped = gram.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping.unsqueeze(-1))
    chol, _ = torch.linalg.cholesky_ex(damped)
    return torch.cholesky_solve(right.unsqueeze(-1), chol).squeeze(-1)


def moved_sites(match: Match, z: Tensor) -> GaussianSites:
    """Return the sites after a step z = (p, q) (..., 2N)."""
    p, q = z.chunk(2, -1)
    precision = q / match.variance
    shift = p / match.variance.sqrt() + match.mean * precision
    return GaussianSites(match.sites.shift + shift, match.sites.precision + precision)
