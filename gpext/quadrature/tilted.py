r"""Moments of tilted distributions, p^(f) = N(f | m, v) e^{l(f)} / Z^, all data at once [JVV11 Eq. 9].

In general by the adaptive rule of this package, which finds the modes near m and near the knots. Powers of a Student-t
have a smooth rule of their own: with a = eta (n + 1) / 2 and precision p = 2 w / s^2,

    (1 + (y - f)^2 / (n s^2))^-a = int Gamma(w | a, n) e^{-p (y - f)^2 / 2} dw

so that given t = log w everything is Gaussian. With k = v p, rho = k / (1 + k) and d = y - m,

    Z^    = int Gamma(e^t | a, n) e^t (1 + k)^{-1/2} exp(-d^2 p / (2 (1 + k))) dt
    f | t ~ N(m + rho d, (1 - rho) v)

and the moments of f are those of rho. The integrand is analytic in the strip |Im t| < pi/2 whatever the numbers are,
two-moded or not, and the trapezoidal rule converges geometrically.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.quadrature.adaptive import integrate, warn_unresolved
from gpext.quadrature.gauss_kronrod import FINEST, Function
from gpext.quadrature.softmax.gumbel import DIGITS, gumbel_step

_CHUNK = 2**17  # numbers at a time: 1 MB each, a third of the time of 4 MB
_FAR = 1e300  # of d^2 / s^2, beyond which densities are zero to float64


@dataclass(frozen=True)
class TiltedMoments:
    """log Z^ and the central moments of p^, (...) each; `log_normalizer` is in the graph of what shaped l.

    Example:
        >>> import torch
        >>> from gpext.quadrature import gaussian_tilted_moments
        >>> one = torch.ones(1).double()
        >>> gaussian_tilted_moments(one, one, one, 1.0).mean
        tensor([0.5000], dtype=torch.float64)
    """

    log_normalizer: Tensor
    mean: Tensor
    variance: Tensor
    third: Tensor
    fourth: Tensor


def tilted_moments(
    log_function: Function,
    mean: Tensor,
    variance: Tensor,
    *,
    knots: Tensor | None = None,
    finest: float = FINEST,
) -> TiltedMoments:
    """Return the moments of N(f | mean, variance) exp(log_function(f)), to about 1e-10 of their scale.

    Args:
        log_function: l, maps f (Q, ...) to values broadcastable with it.
        mean: m (...).
        variance: v (...), positive.
        knots: where l has a kink or a narrow feature, (J, ...).
        finest: how narrow at the least, in standard deviations.

    Example:
        >>> import torch
        >>> moments = tilted_moments(lambda f: -0.5 * f.square(), torch.ones(1).double(), torch.ones(1).double())
        >>> moments.mean, moments.variance  # of a product of Gaussians: 1/2, 1/2
        (tensor([0.5000], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))
    """
    result = integrate(log_function, mean, variance, log_space=True, knots=knots, finest=finest)
    warn_unresolved(result)
    with torch.no_grad():
        weights = (result.log_weights + log_function(result.nodes)).softmax(0)
        offset = result.nodes - mean
        centre = (weights * offset).sum(0)
        offset = offset - centre
        second, third, fourth = ((weights * offset**k).sum(0) for k in (2, 3, 4))
    return TiltedMoments(result.value, mean.detach() + centre, second, third, fourth)


def student_t_tilted_moments(
    offset: Tensor, variance: Tensor, deg_free: Tensor, noise: Tensor, power: float
) -> TiltedMoments:
    """Return the moments of N(x | 0, v) t(d - x | deg_free, noise)^power: those of f - m, to about 1e-12.

    Args:
        offset: d = y - m (...).
        variance: v (...), positive.
        deg_free: n, broadcastable; positive.
        noise: s^2, the squared scale.
        power: eta, in (0, 1].

    Example:
        >>> import torch
        >>> one = torch.ones(1).double()
        >>> student_t_tilted_moments(0 * one, one, 4 * one, one, 1.0).mean.abs() < 1e-10
        tensor([True])
    """
    parts = _in_chunks(_moments_by_trapezoid, offset, variance, deg_free, noise, power)
    return TiltedMoments(*parts)


def student_t_log_normalizer(offset: Tensor, variance: Tensor, deg_free: Tensor, noise: Tensor, power: float) -> Tensor:
    """Return the log normaliser of `student_t_tilted_moments` alone, in half the time.

    Example:
        >>> import torch
        >>> one = torch.ones(1).double()
        >>> student_t_log_normalizer(0 * one, one, 4 * one, one, 1.0).shape
        torch.Size([1])
    """
    return _in_chunks(_log_z_by_trapezoid, offset, variance, deg_free, noise, power)[0]


def _in_chunks(
    rule: Callable[..., tuple[Tensor, ...]],
    offset: Tensor,
    variance: Tensor,
    deg_free: Tensor,
    noise: Tensor,
    power: float,
) -> list[Tensor]:
    one = deg_free.numel() == 1
    offset, variance, deg_free, noise = torch.broadcast_tensors(offset, variance, deg_free, noise)
    d, v, n, s2 = (tensor.reshape(-1).double() for tensor in (offset, variance, deg_free, noise))
    with torch.no_grad():
        start, end, step = _layout(d, v, n, s2, power, one)
        most = int(((end - start) / step).max().ceil()) + 1 if len(d) else 1
    chunks = zip(*(t.split(max(_CHUNK // most, 1)) for t in (d, v, n, s2, start, end, step)), strict=True)
    parts = [rule(_Exponent.of(chunk, power), power) for chunk in chunks]
    return [torch.cat(values).view(offset.shape) for values in zip(*parts, strict=True)]


def _layout(d: Tensor, v: Tensor, n: Tensor, noise: Tensor, power: float, one: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the nodes t start and end, and their largest steps, (B,); `one` if all n are the same.

    Right of log(a / n) the integrand falls like the Gamma density, left of log(a / (n + d^2 / s^2)), where the last
    mode can be, like e^{a t}. Left of log(a / n) it gains at most d^2 / (2 v) nats, and falls like e^{(a - 1/2) t}.
    """
    a = 0.5 * power * (n + 1)
    x = _reach(a, DIGITS)
    start = (a / (n + (d.square() / noise).clamp_max(_FAR))).log() - x
    falls = a > 0.5
    gain = torch.where(v > 0, d.square() / (2 * v), torch.inf)
    further = _reach(torch.where(falls, a - 0.5, 1), DIGITS + 0.5 + gain)
    start = torch.where(falls, torch.maximum(start, (a / n).log() - further), start)
    end = (a / n).log() + x.log1p()
    weight = a + 2
    step = torch.full_like(a, _step_of(float(weight[0]))) if one and len(a) else gumbel_step(weight)
    return start, end, step


def _reach(a: Tensor, digits: float | Tensor) -> Tensor:
    """Return how far left of its peak exp(a (t - e^t)) has fallen by so many nats, at most."""
    return digits / a + (2 * digits / a).sqrt()


@functools.lru_cache(maxsize=64)
def _step_of(weight: float) -> float:
    """Return `gumbel_step` of one weight, which all data share where they share their degrees of freedom."""
    return float(gumbel_step(torch.tensor(weight, dtype=torch.float64)))


@dataclass(frozen=True)
class _Exponent:
    """The logarithm of the integrand over t (Q, B), and what it is made of."""

    d: Tensor  # (B,), like v, n, noise and step
    v: Tensor
    n: Tensor
    noise: Tensor
    step: Tensor
    k: Tensor  # (Q, B), like rest = 1 - rho
    rest: Tensor
    value: Tensor

    @classmethod
    def of(cls, chunk: tuple[Tensor, ...], power: float) -> _Exponent:
        d, v, n, noise, start, end, step = chunk
        num_nodes = int(((end - start) / step).max().ceil()) + 1 if len(d) else 1
        step = (end - start) / max(num_nodes - 1, 1)
        a = 0.5 * power * (n + 1)
        t = start + step * torch.arange(num_nodes, dtype=d.dtype, device=d.device).unsqueeze(-1)
        w = t.exp()
        k = (2 * v / noise) * w
        rest = 1 / (1 + k)
        value = a * (t + n.log()) - n * w - 0.5 * k.log1p() - (d.square() / noise) * (w * rest)
        return cls(d, v, n, noise, step, k, rest, value)


def _log_z_by_trapezoid(at: _Exponent, power: float) -> tuple[Tensor]:
    n = at.n
    log_z = torch.logsumexp(at.value, 0) + at.step.log() - torch.lgamma(0.5 * power * (n + 1))
    log_constant = torch.lgamma(0.5 * (n + 1)) - torch.lgamma(0.5 * n) - 0.5 * (math.pi * n * at.noise).log()
    return (log_z + power * log_constant,)


def _moments_by_trapezoid(at: _Exponent, power: float) -> tuple[Tensor, ...]:
    (log_z,) = _log_z_by_trapezoid(at, power)
    d, v, k, rest = at.d, at.v, at.k, at.rest
    with torch.no_grad():
        weights = at.value.softmax(0)
        left = (weights * rest).sum(0)  # E[1 - rho]
        rho = k * rest
        shrunk = (weights * rho).sum(0)
        mean = d * shrunk
        swing = torch.where(k < 1, rho - shrunk, left - rest)  # rho - E[rho], without cancellation
        weighted = weights * swing
        second = (weighted * swing).sum(0)
        weighted = weighted * swing
        d2 = d.square()
        variance = v * left + d2 * second
        third = d * d2 * (weighted * swing).sum(0) - 3 * d * v * second
        fourth = (
            d2.square() * (weighted * swing.square()).sum(0)
            + 6 * d2 * v * (weighted * rest).sum(0)
            + 3 * v.square() * (weights * rest.square()).sum(0)
        )
    return log_z, mean, variance, third, fourth
