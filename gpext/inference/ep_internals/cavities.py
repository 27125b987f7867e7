r"""The equations of EP in its cavities, and their derivatives.

On a branch of solutions cavities may come to be 10^8 times as wide as their marginals. So the unknowns x are the
cavities, by log r and b of r = 1/v_-, b = m_-/v_-, which are then proper wherever a step leads; tilted moments follow,
then sites, and the marginals N(m, v) of their posterior have to be those moments:

    tau = (1/v^ - r) / eta,  nu = (m^/v^ - b) / eta,    F = (log(v/v^), (m - m^)/s),  s = sqrt(v^)

With r moved by r dp, b by m^ dr + dq/s, and g, k the third and fourth standardised moments of p^,

    dm^/s = dq - g w dp / 2,   dv^/v^ = g dq - (k - 1) w dp / 2,   w = r v^
    v^ dtau = -(dv^/v^ + w dp) / eta,   s (dnu - m^ dtau) = (dm^/s - dq) / eta
    dm = V (dnu - m dtau),   dv = -(V o V) dtau

so that the derivatives of F in (p, q) are in closed form. In them F = 0 is put, which leaves Newton's steps as fast
near a solution; then dnu - m dtau is of p alone, and q is eliminated. With C_ij = V_ij / (s_i s_j), S_ij = V_ij^2 /
(v_i v^_j), a = g / eta and c = k - 3 - g^2 (all but C and S diagonal),

    dF_2 = G p - q,   dF_1 + (S a - g) dF_2 = [c + 2 - S c / eta + (g - S a) C a] w p / 2,   G = (g - C a) w / 2

one product and one LU factorisation of size N instead of one of 2 N. In t, on which power and likelihood depend, the
derivatives are differences of tilted integrals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.inference.problem import Problem
from gpext.likelihoods.tilted_moments import Tilt
from gpext.linalg.products import times
from gpext.posteriors import Posterior, fast_covariance
from gpext.quadrature import TiltedMoments
from gpext.sites import GaussianSites

Path = Callable[[float], tuple[Tilt, float]]
"""t -> the rule of the tilted distributions, and the power."""

_DIFFERENCE = 1e-4  # of t


@dataclass(frozen=True)
class Point:
    """Cavities, the sites that they make, and how far the marginals are from the tilted moments; one posterior."""

    t: float
    power: float
    cavity: GaussianSites  # b and r (N,)
    tilted: TiltedMoments
    posterior: Posterior
    residual: Tensor  # F (2N,), inf where there is no posterior
    value: Tensor  # log Z where F = 0

    @property
    def sites(self) -> GaussianSites:
        """The sites of this iterate."""
        return self.posterior.sites

    @property
    def least_share(self) -> float:
        """The least r v^, the part of a marginal's precision that its cavity has."""
        return float((self.cavity.precision * self.tilted.variance).min())

    @property
    def size(self) -> float:
        """The largest residual."""
        return float(self.residual.abs().max())

    def moved(self, origin: GaussianSites, step: Tensor) -> GaussianSites:
        """Return cavities that are a step (p, q) from some others, in the units of this point."""
        p, q = step.chunk(2, -1)
        precision = origin.precision * p.exp()
        shift = origin.shift + q / self.tilted.variance.sqrt() + self.tilted.mean * (precision - origin.precision)
        return GaussianSites(shift, precision)


def evaluate(problem: Problem, path: Path, t: float, cavity: GaussianSites) -> Point:
    """Return the point at some cavities: one tilted integral a datum, one factorisation, the variances."""
    tilt, power = path(t)
    sound = (cavity.shift / cavity.precision).isfinite() & (1 / cavity.precision).isfinite() & (cavity.precision > 0)
    # Substitute safe values where a step too long has made the cavity infinite, and mask the results.
    cavity = GaussianSites(torch.where(sound, cavity.shift, 0.0), torch.where(sound, cavity.precision, 1.0))
    tilted, sites = _sites(tilt, power, cavity)
    posterior = problem.condition(sites)
    m, v = posterior.mean, posterior.variance
    residual = torch.cat([(v / tilted.variance).log(), (m - tilted.mean) / tilted.variance.sqrt()])
    proper = posterior.positive_definite & residual.isfinite().all() & sound.all()
    after = GaussianSites(tilted.mean / tilted.variance, 1 / tilted.variance)
    local = tilted.log_normalizer + _log_partition(cavity) - _log_partition(after)
    value = torch.where(proper, posterior.log_normalizer + local.sum(-1) / power, -torch.inf)
    residual = torch.where(proper, residual, torch.inf)
    return Point(t, power, cavity, tilted, posterior, residual, value)


def seen_from(origin: Point, point: Point, normal: Tensor) -> Tensor:
    """Return what takes vectors in the units of `point` to their products with `normal` in those of `origin`."""
    p, q = normal[:-1].chunk(2, -1)
    s, r = origin.tilted.variance.sqrt(), point.cavity.precision
    turn = (point.tilted.mean - origin.tilted.mean) * r
    return torch.cat([p + s * turn * q, s / point.tilted.variance.sqrt() * q, normal[-1:]])


def _sites(tilt: Tilt, power: float, cavity: GaussianSites) -> tuple[TiltedMoments, GaussianSites]:
    """Return the tilted moments of some cavities, and the sites that make marginals of them."""
    tilted = tilt(cavity.shift / cavity.precision, 1 / cavity.precision)
    shift = (tilted.mean / tilted.variance - cavity.shift) / power
    return tilted, GaussianSites(shift, (1 / tilted.variance - cavity.precision) / power)


def _log_partition(natural: GaussianSites) -> Tensor:
    return 0.5 * natural.shift.square() / natural.precision - 0.5 * natural.precision.log()


@dataclass(frozen=True)
class Derivatives:
    """Of F in (p, q) and in t, in some unit of it, at a point."""

    point: Point
    correlation: Tensor  # C (N, N)
    shared: Tensor  # S (N, N)
    by_t: Tensor  # (2N,)

    def across(self, row: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the rule that solves the derivatives over a row (2N + 1,) for right-hand sides (R, 2N + 1)."""
        C, S, eta = self.correlation, self.shared, self.point.power
        g, k, w = self._shape
        a, excess = g / eta, k - 3 - g.square()
        n = len(g)
        by_width, by_mean = self.by_t.chunk(2)
        row_p, row_q, row_t = row[:n], row[n:-1], row[-1]
        inner = (S * a).neg_()
        inner.diagonal().add_(g)
        inner = (inner @ C).mul_(a).sub_(S * (excess / eta))
        inner.diagonal().add_(excess + 2)
        matrix = row.new_empty(n + 1, n + 1)
        torch.mul(inner, 0.5 * w, out=matrix[:n, :n])
        matrix[:n, n] = by_width + self._by_mean(by_mean)
        matrix[n, :n] = row_p + 0.5 * w * (g * row_q - a * times(C, row_q))
        matrix[n, n] = row_t + row_q @ by_mean
        lu, pivots, _ = torch.linalg.lu_factor_ex(matrix)

        def solve(right: Tensor) -> Tensor:
            width, mean, last = right[:, :n], right[:, n:-1], right[:, -1:]
            reduced = torch.cat([width + self._by_mean(mean), last + times(mean, row_q)[:, None]], -1)
            solved = torch.linalg.lu_solve(lu, pivots, reduced.mT).mT
            p, t = solved[:, :-1], solved[:, -1:]
            return torch.cat([p, 0.5 * (g * w * p - times(C, a * w * p)) + by_mean * t - mean, t], -1)

        return solve

    def _by_mean(self, x: Tensor) -> Tensor:
        """Return (S a - g) x (..., N)."""
        g, _, _ = self._shape
        return times(self.shared, g / self.point.power * x) - g * x

    @property
    def _shape(self) -> tuple[Tensor, Tensor, Tensor]:
        """g, k and w (N,)."""
        tilted, v = self.point.tilted, self.point.tilted.variance
        return tilted.third / (v * v.sqrt()), tilted.fourth / v.square(), self.point.cavity.precision * v


def differentiate(point: Point, path: Path | None = None, unit: float = 1.0) -> Derivatives:
    """Return the derivatives of F at a point; those in t, in some unit of it, are zero without a path."""
    mean, v = point.tilted.mean, point.tilted.variance
    s = v.sqrt()
    C = fast_covariance(point.posterior) / s.unsqueeze(-1)
    C.div_(s)
    S = C.square().mul_((v / point.posterior.variance).unsqueeze(-1))
    if path is None:
        return Derivatives(point, C, S, torch.zeros_like(point.residual))
    ahead, after = _sites(*path(point.t + _DIFFERENCE), point.cavity)
    dtau, dnu = after.precision - point.sites.precision, after.shift - point.sites.shift
    by_width = -times(S, v * dtau) - (ahead.variance - v) / v
    by_mean = times(C, s * (dnu - mean * dtau)) - (ahead.mean - mean) / s
    return Derivatives(point, C, S, torch.cat([by_width, by_mean]) * (unit / _DIFFERENCE))
