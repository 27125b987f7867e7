r"""Integrals of a von Mises density over a Gaussian natural parameter, each in one dimension.

1 / I0(|eta|) = prod_k (1 + |eta|^2 / j_k^2)^-1 over the zeros j_k of J0 is a Laplace transform in |eta|^2, of the time
in which Brownian motion leaves a disc, and so is the ratio c1 of Bessel functions:

    1 / I0(kappa) = int exp(-kappa^2 w) p(w) dw,                p(w) = sum_k 2 j_k / J1(j_k) exp(-j_k^2 w)
    I1(kappa) / (kappa I0(kappa)) = int exp(-kappa^2 w) g(w) dw,    g(w) = sum_k 2 exp(-j_k^2 w)

Given w, exp(eta' T - |eta|^2 w) is a Gaussian site. With eta ~ N(m, V), R = (I + 2 w V)^-1 and T = (cos y, sin y)

    E[VM(y | eta)] = int p(w) |R|^1/2 exp(T'VR T / 2 + T'R m - w m'R m) dw / (2 pi)
    E[c1(|eta|) eta] = int g(w) |R|^1/2 R m exp(-w m'R m) dw
    E[log I0(|eta|)] = int g(w) (1 - |R|^1/2 exp(-w m'R m)) dw / (2 w),    as d log I0(sqrt s) / ds = c1 / 2

With p's leading term exp(-1 / (4 w)) / (2 w^2), w times the first integrand has one maximum, q = 1 / (2 w) its place,

    1 + sum_i v_i / (q + v_i) / 2 + q [sum_i a_i^2 / (q + v_i)^2 - 1] / 2 = 0,    a = m + V T along the axes of V,

whose variances are v_i. The trapezoidal rule in x does the rest, log w = log w^ + scale sinh x about that maximum: its
error falls geometrically.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

_SMALL = 0.015  # w below it: asymptotic series in w, whose errors are of order exp(-1 / w)
_TERMS = 22  # of them
_NODES = 121
_REACH = 60.0  # in log w, to either side; what falls like sqrt(w) has lost 13 digits there
_LOG_STEP, _LAST = 0.25, 3.5  # in log w, where there are two scales, and where g is below e^-190
_LEAST = 3.0  # q of the centre of the rule: where the maximum is below, the leading term does not say where
_BISECTIONS = 40
_PART = 2048  # data at a time


@functools.cache
def _series() -> tuple[np.ndarray, np.ndarray]:
    """Return the first zeros j of J0 and the coefficients 2 j / J1(j) of p, which alternate."""
    from scipy import special

    zeros = special.jn_zeros(0, 24)  # to 1e-9
    zeros = zeros + special.j0(zeros) / special.j1(zeros)
    return zeros, 2 * zeros / special.j1(zeros)


def _far_coefficients() -> tuple[list[float], list[float]]:
    """Return d of p = exp(-1 / (4 w)) / (2 w^2) sum_m d_m w^m, and a of I1 / I0 = sum_j a_j kappa^-j."""
    length = [1.0]
    for j in range(1, _TERMS + 1):
        length.append(0.5 * ((j - 2) * length[j - 1] - sum(length[i] * length[j - i] for i in range(1, j))))
    # sqrt(2 pi kappa) exp(-kappa) I0 = exp(-sum_j a_{j+1} kappa^-j / j), the integral of I1 / I0; b of its inverse
    log_b = [0.0] + [length[j + 1] / j for j in range(1, _TERMS)]
    b = [1.0]
    for k in range(1, _TERMS):
        b.append(sum(j * log_b[j] * b[k - j] for j in range(1, k + 1)) / k)
    # kappa^(1/2-k) exp(-kappa) is the transform of a parabolic cylinder function, here by its asymptotic series
    d = [
        sum(
            b[k] * 2.0**k * (-1) ** (m - k) * math.prod(k - 1.5 + i for i in range(2 * (m - k))) / math.factorial(m - k)
            for k in range(m + 1)
        )
        for m in range(_TERMS)
    ]
    return d, length


_D, _A = _far_coefficients()


def log_mixing_density(w: Tensor) -> Tensor:
    """Return log p(w), w > 0, whose Laplace transform is 1 / I0(sqrt s)."""
    small = w.clamp_max(_SMALL)
    series = sum((d * small**m for m, d in enumerate(_D)), torch.zeros_like(w))
    below = series.log() - 0.25 / small - 2 * small.log() - math.log(2)
    return torch.where(w < _SMALL, below, _log_sum(_series()[1], w.clamp_min(_SMALL)))


def log_ratio_density(w: Tensor) -> Tensor:
    """Return log g(w), w > 0, whose Laplace transform is I1(kappa) / (kappa I0(kappa)) in kappa^2."""
    root = w.clamp_max(_SMALL).sqrt()
    series = sum((a * root**j / math.gamma((j + 1) / 2) for j, a in enumerate(_A)), torch.zeros_like(w))
    return torch.where(
        w < _SMALL, series.log() - root.log(), _log_sum(np.full(len(_series()[0]), 2.0), w.clamp_min(_SMALL))
    )


def _log_sum(coefficients: np.ndarray, w: Tensor) -> Tensor:
    """Return log sum_k coefficients_k exp(-j_k^2 w)."""
    zeros = _series()[0]
    first = float(zeros[0]) ** 2
    total = torch.zeros_like(w)
    for c, j in zip(coefficients, zeros, strict=True):
        total = total + float(c) * torch.exp((first - float(j) ** 2) * w)
    return total.log() - first * w


def log_compound_density(y: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """Return log E[VM(y | eta)] (..., N), eta ~ N(mean, covariance), differentiable in all; float64 inside.

    Args:
        y: angles in radians (..., N) or (..., 1).
        mean: m (..., 2, N).
        covariance: V (..., 2, 2, N).

    Raises:
        ValueError: a covariance is not positive semidefinite.
    """
    _check(covariance)
    y = y.double().expand(*y.shape[:-1], mean.size(-1))
    parts = zip(*(t.double().split(_PART, -1) for t in (mean, covariance, y)), strict=True)
    return torch.cat([_log_density(*part) for part in parts], -1).to(mean.dtype)


def _log_density(m: Tensor, V: Tensor, y: Tensor) -> Tensor:
    T = torch.stack([y.cos(), y.sin()], -2)
    with torch.no_grad():
        w, log_weight = _rule(*_centre(T, m, V))
    log_det, Rm = _resolved(w, m, V)
    _, RT = _resolved(w, T, V)
    along = 0.5 * (T * _times(V, RT)).sum(-2) + (T * Rm).sum(-2) - w * (m * Rm).sum(-2)
    total = (log_mixing_density(w) + log_weight - 0.5 * log_det + along).logsumexp(0)
    return total - math.log(2 * math.pi)


def compound_resultant(mean: Tensor, covariance: Tensor) -> Tensor:
    """Return E[T(y)] = E[c1(|eta|) eta] (..., 2, N); arguments and errors as :func:`log_compound_density`."""
    _check(covariance)
    parts = zip(*(t.double().split(_PART, -1) for t in (mean, covariance)), strict=True)
    return torch.cat([_resultant(*part) for part in parts], -1).to(mean.dtype)


def _resultant(m: Tensor, V: Tensor) -> Tensor:
    log_size = _log_size(m, V)
    w, log_weight = _rule(-log_size, torch.ones_like(log_size))
    log_det, Rm = _resolved(w, m, V)
    weight = torch.exp(log_ratio_density(w) + log_weight - 0.5 * log_det - w * (m * Rm).sum(-2))
    return (weight.unsqueeze(-2) * Rm).sum(0)


def expected_log_i0(mean: Tensor, covariance: Tensor) -> Tensor:
    """Return E[log I0(|eta|)] (..., N); arguments and errors as :func:`log_compound_density`."""
    _check(covariance)
    parts = zip(*(t.double().split(_PART, -1) for t in (mean, covariance)), strict=True)
    return torch.cat([_expected_log_i0(*part) for part in parts], -1).to(mean.dtype)


def _expected_log_i0(m: Tensor, V: Tensor) -> Tensor:
    first = -float(_log_size(m, V).max()) - _REACH  # below, the integrand falls like sqrt(w)
    count = math.ceil((_LAST - first) / _LOG_STEP)
    w = torch.exp(_LAST - _LOG_STEP * torch.arange(count, dtype=m.dtype, device=m.device)).view(
        -1, *(1,) * (m.dim() - 1)
    )
    log_det, Rm = _resolved(w, m, V)
    lost = -torch.expm1(-0.5 * log_det - w * (m * Rm).sum(-2))
    return 0.5 * _LOG_STEP * (log_ratio_density(w).exp() * lost).sum(0)


def _log_size(m: Tensor, V: Tensor) -> Tensor:
    """Return how large |eta|^2 may be, as a logarithm (..., N), without gradients."""
    with torch.no_grad():
        return torch.log(1 + m.square().sum(-2) + 2 * (V[..., 0, 0, :] + V[..., 1, 1, :]))


def _check(V: Tensor) -> None:
    a, b, c = V[..., 0, 0, :], V[..., 0, 1, :], V[..., 1, 1, :]
    rounding = 10 * torch.finfo(V.dtype).eps * (a + c).abs()
    good = (torch.minimum(a, c) >= -rounding) & (a * c - b.square() >= -rounding * (a + c).abs())
    if not bool(good.all()):
        index = tuple((~good).nonzero()[0].tolist())
        raise ValueError(
            f"a covariance of the latents of a datum is not positive semidefinite, first at index {index}."
        )


def _centre(T: Tensor, m: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Return log w^ and the scale of the peak there, each (..., N)."""
    v, axes = torch.linalg.eigh(V.movedim(-1, -3))
    v = v.clamp_min(0)  # rounding may have made a zero negative
    a = (axes.mT @ (m + _times(V, T)).mT.unsqueeze(-1)).squeeze(-1).abs()  # (..., N, 2)
    low, high = torch.full_like(a[..., 0], _LEAST).log(), (8 + 2 * a.sum(-1)).log()
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        is_left = _slopes(middle.exp(), a, v)[0] > 0
        low, high = torch.where(is_left, middle, low), torch.where(is_left, high, middle)
    log_q = 0.5 * (low + high)
    return -log_q - math.log(2), _slopes(log_q.exp(), a, v)[1].clamp_min(1).rsqrt()


def _slopes(q: Tensor, a: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the derivative in log q of the logarithm of what is integrated over log w, and its negative derivative."""
    wide = q.unsqueeze(-1) + v
    share = (a / wide).square()
    excess = 0.5 * (share.sum(-1) - 1)
    bend = 0.5 * (v / wide.square()).sum(-1) - excess + q * (share / wide).sum(-1)
    return 1 + 0.5 * (v / wide).sum(-1) + q * excess, q * bend


def _rule(log_centre: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes w and the logarithms of their weights in int dw, (Q, ..., N)."""
    reach = torch.asinh(_REACH / scale)
    x = reach * torch.linspace(-1, 1, _NODES, dtype=reach.dtype, device=reach.device).view(-1, *(1,) * reach.dim())
    log_w = log_centre + scale * torch.sinh(x)
    return log_w.exp(), log_w + torch.log(scale * torch.cosh(x) * (2 * reach / (_NODES - 1)))


def _resolved(w: Tensor, vector: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Return log |R^-1| (Q, ..., N) and R vector (Q, ..., 2, N)."""
    a, b, c = V[..., 0, 0, :], V[..., 0, 1, :], V[..., 1, 1, :]
    excess = 2 * w * (a + c) + (2 * w).square() * (a * c - b.square()).clamp_min(0)  # of the determinant over one
    adjugate = torch.stack([torch.stack([c, -b], -2), torch.stack([-b, a], -2)], -3)
    w, scale = w.unsqueeze(-2), 1 + excess.unsqueeze(-2)
    return excess.log1p(), vector / scale + 2 * w / scale * _times(adjugate, vector)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return matrix (..., 2, 2, N) times vector (..., 2, N)."""
    return torch.einsum("...den,...en->...dn", matrix, vector)
