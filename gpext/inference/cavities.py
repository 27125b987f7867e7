r"""The equations of EP in its cavities, and their derivatives.

On a branch of solutions cavities may come to be 10^8 times as wide as their marginals. So the unknowns x are the
cavities, by log r and b of r = 1/v_-, b = m_-/v_-, which are then proper wherever a step leads; tilted moments follow,
then sites, and the marginals N(m, v) of their posterior have to be those moments:

    tau = (1/v^ - r) / eta,  nu = (m^/v^ - b) / eta,    F = (log(v/v^), (m - m^)/s),  s = sqrt(v^)

With r moved by r dp, b by m^ dr + dq/s, and g, k the third and fourth standardised moments of p^,

    dm^/s = dq - g w dp / 2,   dv^/v^ = g dq - (k - 1) w dp / 2,   w = r v^
    v^ dtau = -(dv^/v^ + w dp) / eta,   s (dnu - m^ dtau) = (dm^/s - dq) / eta
    dm = V (dnu - m dtau),   dv = -(V o V) dtau

so that the derivatives of F in (p, q) are in closed form; in t, on which power and likelihood depend, they are
differences of tilted integrals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.inference.problem import Problem
from gpext.inference.tilting import Tilt
from gpext.posteriors import Posterior
from gpext.posteriors.products import times
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
        """Where this is."""
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


def look(problem: Problem, path: Path, t: float, cavity: GaussianSites) -> Point:
    """Return the point at some cavities: one tilted integral a datum, one factorisation, the variances."""
    tilt, power = path(t)
    tilted, sites = _sites(tilt, power, cavity)
    posterior = problem.condition(sites)
    m, v = posterior.mean, posterior.variance
    residual = torch.cat([(v / tilted.variance).log(), (m - tilted.mean) / tilted.variance.sqrt()])
    proper = posterior.positive_definite & residual.isfinite().all()
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


def bordered(path: Path, point: Point, unit: float, row: Tensor) -> Tensor:
    """Return the derivatives of F in (p, q) and in t in some unit of it, over a row, (2N + 1, 2N + 1)."""
    V = point.posterior.covariance
    result = row.new_empty(len(row), len(row))
    _write_jacobian(point, V, result[:-1, :-1])
    result[:-1, -1] = unit * _slope(path, point, V)
    result[-1] = row
    return result


def _write_jacobian(point: Point, V: Tensor, out: Tensor) -> None:
    """Write the derivatives of F in (p, q) into a tensor (2N, 2N)."""
    eta, tilted = point.power, point.tilted
    v, s = tilted.variance, tilted.variance.sqrt()
    g, k, w = tilted.third / (v * s), tilted.fourth / v.square(), point.cavity.precision * v
    offset = (point.posterior.mean - tilted.mean) / s
    none, one = torch.zeros_like(g), torch.ones_like(g)
    mean = torch.stack([-0.5 * g * w, one])  # dm^ / s, by p and by q
    width = torch.stack([-0.5 * (k - 1) * w, g])  # dv^ / v^
    precision = -(width + torch.stack([w, none])) / eta  # v^ dtau
    shift = (mean - torch.stack([none, one])) / eta - offset * precision  # s (dnu - m dtau)
    n = len(v)
    # d log v = -(V o V / v_i) dtau and dm / s_i = (V / s_i) (dnu - m dtau), each less what the tilted moments do
    upper = torch.mul(V, V, out=out[:n, :n]).div_(point.posterior.variance.unsqueeze(-1))
    lower = torch.div(V, s.unsqueeze(-1), out=out[n:, :n])
    for block, factor, beside in ((upper, -precision / v, out[:n, n:]), (lower, shift / s, out[n:, n:])):
        torch.mul(block, factor[1], out=beside)
        block.mul_(factor[0])
    for i, columns in enumerate((slice(None, n), slice(n, None))):
        out[:n, columns].diagonal().sub_(width[i])
        out[n:, columns].diagonal().sub_(mean[i] + 0.5 * offset * width[i])


def _slope(path: Path, point: Point, V: Tensor) -> Tensor:
    """Return the derivatives of F in t at fixed cavities (2N,), from differences of the tilted moments."""
    ahead, after = _sites(*path(point.t + _DIFFERENCE), point.cavity)
    m, v, s = point.posterior.mean, point.tilted.variance, point.tilted.variance.sqrt()
    dtau, dnu = after.precision - point.sites.precision, after.shift - point.sites.shift
    width, mean = (ahead.variance - v) / v, (ahead.mean - point.tilted.mean) / s
    by_width = -times(V.square(), dtau) / point.posterior.variance - width
    by_mean = times(V, dnu - m * dtau) / s - mean - 0.5 * (m - point.tilted.mean) / s * width
    return torch.cat([by_width, by_mean]) / _DIFFERENCE
