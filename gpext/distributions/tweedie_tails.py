r"""Tails of Tweedie's compound Poisson-gamma law, 1 < p < 2, as logarithms with derivatives.

With lambda, a and g of :mod:`gpext.distributions.tweedie`, x = y / g and the incomplete gamma functions P and Q,

    P(Y <= y) = e^-lambda + sum_j p(j) P(a j, x),    P(Y > y) = sum_j p(j) Q(a j, x),    p(j) = lambda^j e^-lambda / j!

over j >= 1. The smaller of the two is summed, over the j that are likely given that Y is beyond y: between L(y) and
L(u), L(u) = u^(2-p) / (phi (2-p)), where the density of u is e^-36 of that of y, and 8.5 widths sqrt((p - 1) L)
on either side. Where these are wide, a trapezoidal rule stands for the sum; and where the shapes a j are so large that
incomplete gamma functions lose digits, the integral of the density over log u, between y and that u.

Derivatives follow from the moments beyond y in the units of mu, e_k = E[(Y / mu - 1)^k | beyond], as the law is an
exponential dispersion model: with t the tail,

    d log t / d log mu = kappa e_1,    d e_k / d log mu = kappa (e_{k+1} - e_k e_1) - k (e_{k-1} + e_k)

and kappa = mu^(2-p) / phi; since c Y has mean c mu and dispersion c^(2-p) phi, those in log phi from those in log mu
and log y,

    (2-p) d (t e_k) / d log phi = +-y p(y) (y / mu - 1)^k - d (t e_k) / d log mu

with + for the upper tail. Given j and Y > y, X = Y / g is a truncated gamma variable of shape s; its moments m_k about
c = lambda a are, by integration by parts, with h = x^s e^-x / (Gamma(s) Q(s, x)), or h = -x^s e^-x / (Gamma(s) P(s, x))
below,

    m_{k+1} = (s - c + k) m_k + k c m_{k-1} + h (x - c)^k
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpext.distributions.incomplete_gamma import log_gamma_cdf, log_gamma_survival
from gpext.distributions.tweedie_density import tweedie_log_prob
from gpext.special import log_poisson

_NEGLIGIBLE = 36.0  # nats
_WIDTHS, _BEYOND = 8.5, 12.0  # of the number of terms given Y, beyond which it is not summed
_A_WIDTH = 2.5  # nodes of a wide sum
_RARE = 0.7  # a rate, below which Y is zero more often than not
_BISECTIONS = 8
_AT_ONCE = 2**18  # terms
_LARGE = 3e4  # shape of a gamma variable
_NODES, _WEIGHTS = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(40))
_STEP = 1e-3  # of the power, as a part of (p - 1) (2 - p)
_NOWHERE = -1e5  # in place of log 0


def tweedie_log_tail(y: Tensor, log_mean: Tensor, dispersion: Tensor, power: Tensor, upper: bool) -> Tensor:
    """Return log P(Y > y) if `upper`, else log P(Y <= y), elementwise, float64.

    To 1e-10 of the tail, or 1e-13 of its logarithm if that is more. Three times differentiable in log mu, once in y
    and in the dispersion, and once, to some 1e-8, in the power; of the first derivatives in log mu likewise.

    Args:
        y: any number; below zero there is no mass.
        log_mean: log mu.
        dispersion: phi.
        power: p.
        upper: which tail.
    """
    y, log_mean, dispersion, power = torch.broadcast_tensors(y, log_mean, dispersion, power)
    positive = y > 0
    log_y = torch.where(positive, torch.where(positive, y, 1.0).log(), _NOWHERE)
    arguments = (log_y, log_mean, dispersion.log(), power)
    wanted = torch.is_grad_enabled() and any(each.requires_grad for each in arguments)
    with torch.no_grad():
        found = _tail(*arguments, upper, 4 if wanted else 1)
    log_tail = _with_derivatives(*arguments, found, upper)[0] if wanted else found[0]
    return torch.where(y < 0, 0.0 if upper else -torch.inf, log_tail)


def _with_derivatives(
    log_y: Tensor, log_mean: Tensor, log_phi: Tensor, power: Tensor, found: Tensor, upper: bool
) -> Tensor:
    """Return log t, e_1, e_2 and e_3 (4, ...) as they are known, in the graph of the parameters."""
    known = _Tail.apply(log_y, log_mean, log_phi, power, found, upper)
    return known + _InPower.apply(log_y.detach(), log_mean.detach(), log_phi.detach(), power, upper)


class _InPower(torch.autograd.Function):
    """Zeros (4, ...) with the derivatives in the power, which cost as much as four tails: only where asked for."""

    @staticmethod
    def forward(ctx: Any, log_y: Tensor, log_mean: Tensor, log_phi: Tensor, power: Tensor, upper: bool) -> Tensor:
        ctx.save_for_backward(log_y, log_mean, log_phi, power)
        ctx.upper = upper
        return power.new_zeros(4, *power.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        log_y, log_mean, log_phi, power = ctx.saved_tensors
        with torch.no_grad():
            slope = _slope_in_power(log_y, log_mean, log_phi, power, ctx.upper)
        return None, None, None, (grad * slope).sum(0), None


class _Tail(torch.autograd.Function):
    """log t, e_1, e_2 and e_3 (4, ...) with their derivatives in all but the power."""

    @staticmethod
    def forward(
        ctx: Any, log_y: Tensor, log_mean: Tensor, log_phi: Tensor, power: Tensor, found: Tensor, upper: bool
    ) -> Tensor:
        ctx.save_for_backward(log_y, log_mean, log_phi, power, found)
        ctx.upper = upper
        return found.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        log_y, log_mean, log_phi, power, found = ctx.saved_tensors
        if bool(grad[3].any()):
            raise NotImplementedError(
                "the tails of a Tweedie distribution are differentiable three times in the mean, twice where one of "
                "the derivatives is in another parameter; got a request for one more."
            )
        if torch.is_grad_enabled():  # for derivatives of the derivative
            found = _with_derivatives(log_y, log_mean, log_phi, power, found, ctx.upper)
        log_t, e1, e2, e3 = found
        of_y, of_mean, of_phi = ctx.needs_input_grad[:3]
        kappa = ((2 - power) * log_mean - log_phi).exp()
        by_mean = torch.stack([kappa * e1, kappa * (e2 - e1.square()) - 1 - e1, kappa * (e3 - e2 * e1) - 2 * (e1 + e2)])
        by_y = by_phi = None
        if of_y or of_phi:
            is_zero, gap = log_y <= _NOWHERE, (log_y - log_mean).expm1()
            log_p = tweedie_log_prob(torch.where(is_zero, 0.0, log_y.exp()), log_mean, log_phi.exp(), power) + log_y
            hazard = torch.where(is_zero, 0.0, (log_p - log_t).exp()) * (1 if ctx.upper else -1)
            at_y = hazard * torch.stack([torch.ones_like(gap), gap, gap.square()])  # +-y p(y) (y / mu - 1)^k / t
            e = torch.stack([torch.zeros_like(e1), e1, e2])  # d e_k = d (t e_k) / t - e_k d log t for k > 0
            whole = by_mean + e * by_mean[0]
            by_y = e * at_y[0] - at_y
            by_phi = (at_y - whole) / (2 - power)
            by_phi = by_phi - e * by_phi[0]
        parts = ((of_y, by_y), (of_mean, by_mean), (of_phi, by_phi))
        slopes = (None if not needed or part is None else (grad[:3] * part).sum(0) for needed, part in parts)
        return *slopes, None, None, None


def _slope_in_power(log_y: Tensor, log_mean: Tensor, log_phi: Tensor, power: Tensor, upper: bool) -> Tensor:
    """Return the derivatives of log t, e_1, e_2 and e_3 in the power (4, ...), by differences of the fourth order."""
    step = _STEP * (power - 1) * (2 - power) / (1 + log_mean.abs())
    far, near = (
        _tail(log_y, log_mean, log_phi, power + k * step, upper)
        - _tail(log_y, log_mean, log_phi, power - k * step, upper)
        for k in (2, 1)
    )
    return (8 * near - far) / (12 * step)


def _tail(log_y: Tensor, log_mean: Tensor, log_phi: Tensor, power: Tensor, upper: bool, number: int = 4) -> Tensor:
    """Return the first `number` of log t, e_1, e_2 and e_3 (number, ...)."""
    if not log_y.numel():
        return log_y.new_empty(number, *log_y.shape)
    flat = [each.reshape(-1) for each in (log_y, log_mean, log_phi, power)]
    found, is_upper = _smaller_tail(number, *flat)
    kappa = ((2 - flat[3]) * flat[1] - flat[2]).exp()
    whole = torch.stack([torch.zeros_like(kappa), 1 / kappa, flat[3] / kappa.square()])  # moments of all of Y
    share = found[0].exp()
    other = torch.cat([torch.log1p(-share).unsqueeze(0), (whole[: number - 1] - share * found[1:]) / (1 - share)])
    return torch.where(is_upper == upper, found, other).view(number, *log_y.shape)


class _Rows(NamedTuple):
    """Tails of one kind, (B,) each."""

    log_y: Tensor
    log_mean: Tensor
    log_phi: Tensor
    power: Tensor
    upper: Tensor  # which tail
    y_rate: Tensor  # L(y)
    u_rate: Tensor  # L(u)


def _smaller_tail(
    number: int, log_y: Tensor, log_mean: Tensor, log_phi: Tensor, power: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log t, e_1, ... (number, N) of the tail that is summed, and whether it is the upper one (N,)."""
    kappa = ((2 - power) * log_mean - log_phi).exp()
    upper = (log_y >= log_mean) | (kappa < _RARE * (2 - power))
    y_rate, u_rate = _likely(log_y - log_mean, kappa, power, upper)
    is_large = y_rate * (2 - power) > _LARGE * (power - 1)
    found = torch.empty(number, *log_y.shape, dtype=log_y.dtype, device=log_y.device)
    for rows, rule in ((~is_large, _by_sums), (is_large, _by_integrals)):
        if bool(rows.any()):
            every = (log_y, log_mean, log_phi, power, upper, y_rate, u_rate)
            found[:, rows] = rule(number, _Rows(*(each[rows] for each in every)))
    return found, upper


def _likely(t: Tensor, kappa: Tensor, power: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return L(y), and L(u) of the u beyond y where the density has fallen by e^-36, (N,).

    The density falls like exp(-kappa B(log u / mu)), and L(u) = lambda r with r = (u / mu)^(2-p),

        B(t) = (e^t - r / (2-p)) / (p - 1) + 1 / (2-p) >= e^t - 1 - t for t >= 0.

    Args:
        t: log y - log mu.
        kappa: mu^(2-p) / phi.
        power: p.
        upper: which tail.
    """
    q = 2 - power

    def fall(r: Tensor) -> Tensor:
        return ((r.log() / q).exp() - r / q) / (power - 1) + 1 / q

    at_y = (q * t).exp()
    near = torch.where(upper, at_y.clamp_min(1), at_y)
    enough = fall(near) + _NEGLIGIBLE / kappa
    far = torch.minimum((2 * enough).sqrt(), (4 * enough).log().clamp_min(2))
    far = torch.where(upper, (q * far).exp(), 0.0)
    for _ in range(_BISECTIONS + int((1 + kappa / q * at_y).max().log2())):  # to a part of one term
        middle = 0.5 * (near + far)
        within = fall(middle) < enough
        near, far = torch.where(within, middle, near), torch.where(within, far, middle)
    return kappa / q * at_y, kappa / q * far


def _by_integrals(number: int, rows: _Rows) -> Tensor:
    """Return log t, e_1, ... (number, B), by Gauss-Legendre rules over log u from y on."""
    log_y, log_mean, log_phi, power, _, y_rate, u_rate = rows
    width = (u_rate / y_rate).log() / (2 - power)
    shape = (-1, *width.dim() * (1,))
    log_u = log_y + width * (0.5 + 0.5 * _NODES.to(width).view(shape))
    log_p = tweedie_log_prob(log_u.exp(), log_mean, log_phi.exp(), power)
    terms = log_p + log_u + (0.5 * width.abs() * _WEIGHTS.to(width).view(shape)).log()
    share, gap = terms.softmax(0), (log_u - log_mean).expm1()
    return torch.stack([terms.logsumexp(0), *((share * gap**k).sum(0) for k in range(1, number))])


def _by_sums(number: int, rows: _Rows) -> Tensor:
    """Return log t, e_1, ... (number, B), by sums over the number of terms j."""
    log_y, log_mean, log_phi, power, upper, y_rate, u_rate = rows
    rate, shape = ((2 - power) * log_mean - log_phi).exp() / (2 - power), (2 - power) / (power - 1)
    log_x = log_y - log_phi - (power - 1).log() - (power - 1) * log_mean
    first, last = torch.minimum(y_rate, u_rate), torch.maximum(y_rate, u_rate)
    first = (first - _WIDTHS * (first * (power - 1)).sqrt() - _BEYOND).floor().clamp_min(1)
    last = (last + _WIDTHS * (last * (power - 1)).sqrt() + _BEYOND).ceil()
    stride = ((first * (power - 1)).sqrt() / _A_WIDTH).clamp_min(1)
    count = ((last - first) / stride).ceil().long() + 1
    parts, at, ends = [], 0, count.cumsum(0)
    while at < len(count):
        limit = int(ends[at - 1]) + _AT_ONCE if at else _AT_ONCE
        to = max(int(torch.searchsorted(ends, limit, right=True)), at + 1)
        parts.append(_sums(number, *(each[at:to] for each in (rate, shape, log_x, upper, first, stride, count))))
        at = to
    return torch.cat(parts, 1)


def _sums(
    number: int,
    rate: Tensor,
    shape: Tensor,
    log_x: Tensor,
    upper: Tensor,
    first: Tensor,
    stride: Tensor,
    count: Tensor,
) -> Tensor:
    """Return log t, e_1, ... (number, B): sums over j = first, first + stride, ..., `count` of them for each of B."""
    index = torch.repeat_interleave(count)
    place = torch.arange(len(index), device=index.device) - (count.cumsum(0) - count)[index]
    j = first[index] + stride[index] * place
    a, log_x, is_upper = shape[index], log_x[index], upper[index]
    s = a * j
    log_beyond = torch.empty_like(s)
    for rows, log_part in ((is_upper, log_gamma_survival), (~is_upper, log_gamma_cdf)):
        log_beyond[rows] = log_part(log_x[rows], s[rows])
    terms = log_poisson(j, rate.log()[index]) + log_beyond + stride.log()[index]
    atom = torch.where(upper, -torch.inf, -rate)
    peak = atom.scatter_reduce(0, index, terms, "amax")
    weights, atom = (terms - peak[index]).exp(), (atom - peak).exp()

    def total(values: Tensor) -> Tensor:
        return torch.zeros_like(rate).index_add(0, index, values)

    mass = total(weights) + atom
    if number == 1:
        return (peak + mass.log()).unsqueeze(0)
    h = (s.log() + log_poisson(s, log_x) - log_beyond).exp() * torch.where(is_upper, 1.0, -1.0)
    centre = (rate * shape)[index]
    gap, offset = log_x.exp() - centre, a * (j - rate[index])
    m1 = offset + h
    m2 = (offset + 1) * m1 + centre + h * gap
    m3 = (offset + 2) * m2 + 2 * centre * m1 + h * gap.square()
    moments = [(total(weights * m / centre**k) + (-1) ** k * atom) / mass for k, m in ((1, m1), (2, m2), (3, m3))]
    return torch.stack([peak + mass.log(), *moments])
