r"""Integrals of location-scale noise whose location f and log scale g are both Gaussian: y = f + e^g e.

Given g the location is Gaussian and its integral has a rule of its own; what remains is one dimension, with

    f | g ~ N(m_f + (c / v_g) (g - m_g), v_f - c^2 / v_g),     c = cov(f, g)

    log Z^ = log int N(g | m_g, v_g) Z^(g) dg,     Z^(g) = int N(f | g) p(y | f, e^g)^eta df

and the tilted moments are those of the mixture over g. Under independent latents the expectation of a Student-t's log
density needs H = E log(e^{2g} + z^2), z ~ N(d, v), whatever the scales are: by log x = int (e^-s - e^{-s x}) ds / s

    H = log b + int (e^-s - E[e^{-s z^2 / b}] E[e^{-s e^{2g} / b}]) ds / s,     b = E[z^2] + e^{2 m_g}

where the first factor is (1 + 2 s v / b)^{-1/2} exp(-(s d^2 / b) / (1 + 2 s v / b)). In log s the integrand is analytic
in the strip |Im log s| < pi/2, and so is the second factor's in g for |Im g| < pi/4: trapezoidal rules converge
geometrically.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gpext.quadrature.tilted import TiltedMoments

_STEP_OF_LOG = 0.4  # of log s: exp(-pi^2 / h) is 2e-11
_DIGITS = 36.0  # nats, all of float64
_REACH = 8.0  # standard deviations of g
_STEP_OF_SCALE = 0.2  # of g, whose strip is half as wide
_STEP_OF_NORMAL = 0.85  # standard deviations: exp(-2 pi^2 / h^2) is 1e-12
_IN_CACHE = 2**19  # numbers at a time
_LEAST_NODES, _MOST_NODES, _MOST_ZOOMS = 25, 400, 12
_NEGLIGIBLE = 50.0  # nats below the largest term
_LEAST_IN_MASS = 24  # nodes, of a Gaussian every 0.8 standard deviations
_TINY = torch.finfo(torch.float64).tiny

T = TypeVar("T", TiltedMoments, Tensor)


@dataclass(frozen=True)
class ScaleNoise:
    """A kind of noise at given scales: its integrals over f, and how smooth they are in the log scale.

    Example:
        >>> from functools import partial
        >>> from gpext.quadrature import gaussian_tilted_moments
        >>> moments = partial(gaussian_tilted_moments, power=1.0)
        >>> ScaleNoise(moments, lambda *arguments: moments(*arguments).log_normalizer, 0.17).step  # Gaussian noise
        0.17
    """

    moments: Callable[[Tensor, Tensor, Tensor], TiltedMoments]  # of y - E[f], Var[f] and e^{2g}; of f less its mean
    log_normalizer: Callable[[Tensor, Tensor, Tensor], Tensor]  # that of the moments
    step: float  # of g, of a trapezoidal rule that resolves them


@dataclass(frozen=True)
class JointMoments:
    """log Z^ and the moments of a tilted distribution of D latents; `log_normalizer` is in the graph of the noise.

    Example:
        >>> import torch
        >>> moments = JointMoments(torch.zeros(1), torch.zeros(2, 1), torch.eye(2).unsqueeze(-1))
        >>> moments.covariance.shape
        torch.Size([2, 2, 1])
    """

    log_normalizer: Tensor  # (..., N)
    mean: Tensor  # (..., D, N)
    covariance: Tensor  # (..., D, D, N)


def location_scale_moments(targets: Tensor, mean: Tensor, covariance: Tensor, noise: ScaleNoise) -> JointMoments:
    """Return the moments of N((f, g) | mean, covariance) p(y | f, e^g)^eta, to about 1e-10 of their scale.

    Args:
        targets: y (..., N).
        mean: of f and g (..., 2, N).
        covariance: (..., 2, 2, N), positive semidefinite.
        noise: the integrals over f at given scales.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> from gpext.quadrature import gaussian_tilted_moments
        >>> moments = partial(gaussian_tilted_moments, power=1.0)
        >>> noise = ScaleNoise(moments, lambda *arguments: moments(*arguments).log_normalizer, 0.17)
        >>> mean, covariance = torch.zeros(2, 1).double(), torch.eye(2).double().unsqueeze(-1)
        >>> found = location_scale_moments(torch.ones(1).double(), mean, covariance, noise)
        >>> found.mean.mT.round(decimals=4)  # of f and of the log scale
        tensor([[ 0.5806, -0.2588]], dtype=torch.float64)
    """
    given = GivenScale.of(mean, covariance)
    u, log_weights, found = _scale_rule(targets, given, noise.step, noise.moments)
    g = given.scale(u)
    if torch.is_grad_enabled():
        found = noise.moments(*given.arguments(targets, g))
    terms = log_weights + found.log_normalizer
    with torch.no_grad():
        weights = terms.softmax(0)
        f, g = given.slope * (g - given.scale_mean) + found.mean, g - given.scale_mean
        mean_f, mean_g = (weights * f).sum(0), (weights * g).sum(0)
        f, g = f - mean_f, g - mean_g
        var_f = (weights * (found.variance + f.square())).sum(0)
        cross, var_g = (weights * f * g).sum(0), (weights * g.square()).sum(0)
        moved = torch.stack([given.mean + mean_f, given.scale_mean + mean_g], -2)
        blocks = torch.stack([torch.stack([var_f, cross], -2), torch.stack([cross, var_g], -2)], -3)
    return JointMoments(terms.logsumexp(0), moved, blocks)


def log_location_scale_density(targets: Tensor, mean: Tensor, covariance: Tensor, noise: ScaleNoise) -> Tensor:
    """Return log int p(y | f, e^g)^eta N((f, g) | mean, covariance) df dg (..., N), differentiable once.

    Arguments are those of :func:`location_scale_moments`.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> from gpext.quadrature import gaussian_tilted_moments
        >>> moments = partial(gaussian_tilted_moments, power=1.0)
        >>> noise = ScaleNoise(moments, lambda *arguments: moments(*arguments).log_normalizer, 0.17)
        >>> mean, covariance = torch.zeros(2, 1).double(), torch.eye(2).double().unsqueeze(-1)
        >>> log_location_scale_density(torch.ones(1).double(), mean, covariance, noise).round(decimals=4)
        tensor([-1.6378], dtype=torch.float64)
    """
    given = GivenScale.of(mean, covariance)
    u, log_weights, terms = _scale_rule(targets, given, noise.step, noise.log_normalizer)
    if torch.is_grad_enabled():
        terms = noise.log_normalizer(*given.arguments(targets, given.scale(u)))
    return (log_weights + terms).logsumexp(0)


@dataclass(frozen=True)
class GivenScale:
    """The law of f given g = m_g + sd_g u.

    Example:
        >>> import torch
        >>> mean, covariance = torch.tensor([[1.0], [0.0]]), torch.tensor([[2.0, 1.0], [1.0, 1.0]]).unsqueeze(-1)
        >>> given = GivenScale.of(mean, covariance)
        >>> given.location(torch.tensor([2.0])), given.variance  # of f, once its log scale is known
        (tensor([3.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """

    mean: Tensor  # m_f (..., N)
    scale_mean: Tensor  # m_g
    scale_deviation: Tensor  # sd_g
    slope: Tensor  # c / v_g
    variance: Tensor  # v_f - c^2 / v_g

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor) -> GivenScale:
        """Return the law for means (..., 2, N) and covariances (..., 2, 2, N)."""
        (m_f, m_g), cross = mean.double().unbind(-2), covariance[..., 0, 1, :].double()
        v_f, v_g = covariance.double().diagonal(dim1=-3, dim2=-2).unbind(-1)
        varies = v_g > 0
        safe = torch.where(varies, v_g, 1)
        slope = torch.where(varies, cross / safe, 0)
        rest = (v_f - slope * cross).clamp_min(0)  # negative by rounding alone
        return cls(m_f, m_g, torch.where(varies, safe.sqrt(), 0), slope, rest)

    def scale(self, u: Tensor) -> Tensor:
        """Return g (Q, ..., N)."""
        return self.scale_mean + self.scale_deviation * u

    def location(self, g: Tensor) -> Tensor:
        """Return E[f | g] (Q, ..., N)."""
        return self.mean + self.slope * (g - self.scale_mean)

    def arguments(self, targets: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return y - E[f | g], Var[f | g] and e^{2g} at scales g (Q, ..., N)."""
        return targets - self.location(g), self.variance, (2 * g).exp()


@torch.no_grad()
def _scale_rule(
    targets: Tensor, given: GivenScale, step: float, evaluate: Callable[[Tensor, Tensor, Tensor], T]
) -> tuple[Tensor, Tensor, T]:
    """Return nodes u (Q, ..., N), the logarithms of their weights, N(u) du, and the integrals over f there.

    The nodes are as far apart as the noise and the Gaussian allow; where the mass is in a few of them, as of an outlier
    in far too narrow noise, or the range is too long, the range is narrowed to it. Where e^{2g} overflows at every node
    the integral is not finite.
    """
    low, high, most = _scale_range(targets, given, step)
    for _ in range(_MOST_ZOOMS):
        num_nodes = min(max(int(((high - low) / most).max().ceil()) + 1, _LEAST_NODES), _MOST_NODES)
        width = (high - low) / (num_nodes - 1)
        place = torch.arange(num_nodes, dtype=low.dtype, device=low.device).view(-1, *(1,) * low.dim())
        u = low + width * place
        found = evaluate(*given.arguments(targets, given.scale(u)))
        terms = (found if isinstance(found, Tensor) else found.log_normalizer) - 0.5 * u.square()
        peak = terms.amax(0)
        massive = terms > peak - _NEGLIGIBLE
        first = torch.where(massive, place, torch.inf).amin(0)
        last = torch.where(massive, place, -torch.inf).amax(0)
        settled = ~peak.isfinite() | (width <= 1.01 * most) & (last - first >= _LEAST_IN_MASS)
        if bool(settled.all()):
            break
        low, high = (
            torch.where(settled, low, low + width * (first - 1).clamp_min(0)),
            torch.where(settled, high, low + width * (last + 1).clamp_max(num_nodes - 1)),
        )
    return u, width.log() - 0.5 * u.square() - 0.5 * math.log(2 * math.pi), found


def _scale_range(targets: Tensor, given: GivenScale, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return between which u the mass is, and the largest distance of nodes.

    p(y | g) rises with g only where e^g is smaller than the residual, and falls no faster than e^-g; through their
    correlation a known f moves the mean of g to m_g + (c / v_f) (y - m_f). Nor is any mass where N(u) is far below
    what a scale as large as the residual explains.
    """
    offset, sd = targets - given.mean, given.scale_deviation
    moved = given.slope * sd  # c / sd_g
    at_value = moved * offset / (given.variance + moved.square()).clamp_min(_TINY)
    residual = torch.maximum(offset.abs(), (offset - moved * at_value).abs())
    turn = 0.5 * (residual.square() + given.variance).clamp_min(_TINY).log()
    varies = sd > 0
    safe = torch.where(varies, sd, 1)
    at_turn = torch.where(varies, (turn - given.scale_mean) / safe, 0)
    gain = turn - 0.5 * given.variance.clamp_min(_TINY).log()  # of log p(y | g), at most, where f = y
    farthest = (at_turn.square() + 2 * (gain + turn.abs() + _NEGLIGIBLE)).sqrt()
    low = (at_value.clamp_max(0) - sd - _REACH).maximum(-farthest)
    high = (torch.maximum(at_value, at_turn).clamp_min(0) + sd + _REACH).minimum(farthest)
    return low, high, torch.where(varies, step / safe, _STEP_OF_NORMAL).clamp_max(_STEP_OF_NORMAL)


def expected_log_square_sum(gap: Tensor, variance: Tensor, scale_mean: Tensor, scale_variance: Tensor) -> Tensor:
    """Return E log(e^{2g} + z^2) (...), z ~ N(gap, variance) and g ~ N(scale_mean, scale_variance) independent.

    To about 1e-10, for any ratio of the scales; differentiable once in all four.

    Example:
        >>> import torch
        >>> zero = torch.zeros(1).double()
        >>> expected_log_square_sum(zero + 1, zero, zero, zero)  # log(1 + 1)
        tensor([0.6931], dtype=torch.float64)
    """
    shape = torch.broadcast_shapes(gap.shape, variance.shape, scale_mean.shape, scale_variance.shape)
    arguments = [t.expand(shape) for t in (gap, variance, scale_mean, scale_variance)]
    with torch.no_grad():
        flat = [t.reshape(-1).double() for t in arguments]
        of_log, of_scale = _layout(*flat)
        size = max(_IN_CACHE // (of_log * of_scale), 1)
        chunks = zip(*(t.split(size) for t in flat), strict=True)
        parts = [_by_trapezoid(d, v, m, w, of_log, of_scale) for d, v, m, w in chunks]
        value, *slopes = (torch.cat(each).view(shape) for each in zip(*parts, strict=True))
    for argument, slope in zip(arguments, slopes, strict=True):
        value = value + slope * (argument - argument.detach())
    return value.to(gap.dtype)


def _layout(d: Tensor, v: Tensor, m: Tensor, w: Tensor) -> tuple[int, int]:
    """Return how many nodes of log s and of g all data need."""
    low, high = _ends(d, v, m, w)
    spread = w.sqrt()
    step = torch.minimum(_STEP_OF_NORMAL * spread, torch.full_like(w, _STEP_OF_SCALE))
    of_scale = (2 * _REACH + 2 * spread) * spread / torch.where(step > 0, step, 1)
    return int(((high - low) / _STEP_OF_LOG).max().ceil()) + 1, int(of_scale.max().ceil()) + 1


def _ends(d: Tensor, v: Tensor, m: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return log s where the integrand has vanished, next to zero and far out.

    Next to zero it is s (E[x / b] - 1), with x = e^{2g} + z^2; far out it is what is left of the smaller of the factors
    of z, if d has any, and of the smallest scale.
    """
    b = _unit(d, v, m)
    low = -_DIGITS - torch.logaddexp(torch.zeros_like(m), 2 * m + 2 * w - b.log())
    high = math.log(_DIGITS) + b.log() - 2 * (m - (_REACH + w.sqrt()) * w.sqrt())
    return low, torch.maximum(high, torch.full_like(high, math.log(_DIGITS)))


def _unit(d: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return d.square() + v + (2 * m).exp()


def _by_trapezoid(
    d: Tensor, v: Tensor, m: Tensor, w: Tensor, of_log: int, of_scale: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return H and its derivatives in d, v, m and w, (B,) each."""
    b, (low, high) = _unit(d, v, m), _ends(d, v, m, w)
    step = (high - low) / max(of_log - 1, 1)
    t = low + step * torch.arange(of_log, dtype=d.dtype, device=d.device).unsqueeze(-1)  # (S, B)
    s = t.exp() / b
    shrunk = 1 / (1 + 2 * s * v)
    of_z = shrunk.sqrt() * torch.exp(-s * d.square() * shrunk)
    u = torch.linspace(-1, 1, of_scale, dtype=d.dtype, device=d.device).view(-1, 1, 1)
    u = u * (_REACH + w.sqrt())  # (G, 1, B) standard deviations
    weight = torch.softmax(-0.5 * u.square(), 0)
    x = s * torch.exp(2 * (m + w.sqrt() * u))  # (G, S, B)
    factor = torch.exp(-x)
    of_g = (weight * factor).sum(0)
    first = -2 * (weight * x * factor).sum(0)  # d/dm; d/dw is half the second derivative
    second = 2 * (weight * (x.square() - x) * factor).sum(0)
    value = b.log() + step * (torch.exp(-t.exp()) - of_z * of_g).sum(0)
    by_d = step * (2 * s * d * shrunk * of_z * of_g).sum(0)
    by_v = step * (s * shrunk * (1 - 2 * s * d.square() * shrunk) * of_z * of_g).sum(0)
    return value, by_d, by_v, -step * (of_z * first).sum(0), -step * (of_z * second).sum(0)
