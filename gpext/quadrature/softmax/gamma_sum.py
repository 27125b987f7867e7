r"""E[log Gamma(S)] of S = sum_j theta_j, theta_j = softplus(f_j), over D independent Gaussians, from 1-d integrals.

Malmsten's formula log Gamma(S) = int_0^inf [(S - 1) e^{-t} - (e^{-t} - e^{-S t}) / (1 - e^{-t})] dt / t, the same for
the mean mu of S, and u = log t make of it

    E[log Gamma(S)] = log Gamma(mu) + int (M(t) - e^{-mu t}) / (1 - e^{-t}) du,    M(t) = prod_j M_j(t)

with the Laplace transforms M_j(t) = E[e^{-t theta_j}] = E[(1 + e^{f_j})^{-t}], each an integral over one latent. They
are bounded by one in |Im u| < pi / 2, so that equal steps in u converge geometrically. Where t is small M_j e^{mu_j t}
is one but for the variance of theta_j, and follows from its moments. Derivatives are those of M_j under the same nodes,

    dM_j/dm = -t E[theta' e^{-t theta}],    dM_j/dv = E[(t^2 theta'^2 - t theta'') e^{-t theta}] / 2

A wide Gaussian has mass far below zero, where M_j still changes at giant t. There E / t with E exponential takes its
place, e^{-t theta} = P(E / t > theta):

    M_j(t) = E_E[Phi((log(e^{E / t} - 1) - m) / s)]

by the Gauss rule of log E; and the nodes u are clustered around all that changes there, so that their number grows with
the logarithm of the width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from gpext.quadrature.softmax.clustered import coordinate, place
from gpext.quadrature.softmax.gumbel import REACH, gumbel_rule
from gpext.quadrature.softmax.per_datum import marginals, per_datum
from gpext.quadrature.softmax.softmax import log_sum_exp_of_rows
from gpext.quadrature.softmax.softplus import WIDE, SoftplusRule, softplus_rules

_DIGITS = 32.0  # -log of the error of the sums over u
_STEP = 2 * math.pi * 1.45 / _DIGITS  # in a strip of pi / 2, less what M_j grows by near its border
_LONGEST_SPAN = 110.0  # of u with equal steps
_CLUSTERED_STEP = math.pi / _DIGITS  # as in softmax: a strip of half a unit
_BEND = 5.0  # u up to which softplus bends, about
_GIANT = 3.5  # u from which wide Gaussians are seen through exponential variables
_SETTLED = 30.0  # mu t, where e^{-mu t} no longer matters
_FEW = 0.05  # |t (theta - mu_j)| up to which moments count
_NUM_MOMENTS = 9
_LEAST = 1e-300
_NO_WEIGHT = 1e-25
_SMALL = -40.0  # f below which softplus is e^f to rounding, above minus which it is f
_CHUNK = 2**21  # values of the innermost integrand at a time


def expected_log_gamma_of_sum(mean: Tensor, variance: Tensor) -> Tensor:
    """Return E[log Gamma(sum_k softplus(f_k))] for independent f_k ~ N(m_k, v_k), once differentiable in both.

    The error is below 1e-10, relative to the value or absolute. The cost grows with the logarithm of the variances.

    Args:
        mean: (..., K, N).
        variance: (..., K, N), nonnegative.

    Returns:
        (..., N).

    Raises:
        ValueError: means or variances are not finite, or a variance is negative.

    Example:
        >>> import torch
        >>> expected_log_gamma_of_sum(torch.zeros(2, 1).double(), torch.ones(2, 1).double()).shape
        torch.Size([1])
    """
    return per_datum(_of_rows, *marginals(mean, variance))


@dataclass(frozen=True)
class _Latents:
    """Nodes of some latents, in units of the largest theta among those of each, which may underflow itself."""

    rows: Tensor  # which latents (r,)
    mean: Tensor  # (r,)
    sd: Tensor  # (r,)
    log_unit: Tensor  # (r,)
    theta: Tensor  # (r, Q)
    columns: Tensor  # weights times 1, theta', theta'^2 and theta'' (r, 4, Q)
    log_mean: Tensor  # log mu_j (r,)
    by_mean: Tensor  # d mu_j / d m_j, in units of theta (r,)
    by_variance: Tensor  # likewise
    moments: Tensor  # of theta - mu_j, in units of theta, over factorials (r, J)
    farthest: Tensor  # |theta - mu_j|, in units of theta (r,)

    @classmethod
    def of(cls, rule: SoftplusRule, mean: Tensor, sd: Tensor) -> _Latents:
        f, weights = rule.f, rule.weights
        log_theta = _log_softplus(f)
        log_unit = torch.where(weights > _NO_WEIGHT, log_theta, -torch.inf).amax(-1, keepdim=True)
        # Nodes beyond have no weight, but might overflow.
        theta, slope = ((g - log_unit).clamp(max=0.0).exp() for g in (log_theta, logsigmoid(f)))
        columns = torch.stack([weights, weights * slope, weights * slope.square(), weights * slope * (-f).sigmoid()], 1)
        average = (weights * theta).sum(-1)
        gap = theta - average.unsqueeze(-1)
        powers = [weights * gap]
        for j in range(2, _NUM_MOMENTS + 1):
            powers.append(powers[-1] * gap / -j)
        moments = -torch.stack([p.sum(-1) for p in powers], -1)
        moments[:, 0] = 0.0
        at = rule.rows
        log_mean = average.log() + log_unit.squeeze(-1)
        by_mean, by_variance = columns[:, 1].sum(-1), 0.5 * columns[:, 3].sum(-1)
        return cls(
            at, mean[at], sd[at], log_unit.squeeze(-1), theta, columns, log_mean, by_mean, by_variance, moments,
            gap.abs().amax(-1),
        )  # fmt: skip

    def transform(self, u: Tensor, is_shifted: Tensor) -> Tensor:
        """Return log M_j(t), plus mu_j t where it is shifted, and the derivatives of M_j relative to it (3, r, U)."""
        unit = torch.exp((u + self.log_unit.unsqueeze(-1)).clamp(max=100.0))  # t times the unit of theta
        average = (self.log_mean - self.log_unit).exp().unsqueeze(-1)
        shift = torch.where(is_shifted, unit * average, 0.0)
        sums = self.columns @ torch.exp(shift.unsqueeze(1) - unit.unsqueeze(1) * self.theta.unsqueeze(-1))
        total = sums[:, 0].clamp_min(_LEAST)
        is_near = is_shifted & (unit * self.farthest.unsqueeze(-1) < _FEW)
        excess, near = torch.zeros_like(unit), torch.where(is_near, unit, 0.0)
        for moment in reversed(self.moments.unbind(-1)):
            excess = near * (moment.unsqueeze(-1) + excess)
        log_total = torch.where(is_near, torch.log1p(excess), total.log())
        slope = -unit * sums[:, 1] / total
        bend = 0.5 * (unit.square() * sums[:, 2] - unit * sums[:, 3]) / total
        return torch.stack([log_total, slope, bend])

    def transform_far(self, u: Tensor) -> Tensor:
        """Return the same of wide latents at giant t, not shifted."""
        g, weights = gumbel_rule(u.device)
        place = -(u.unsqueeze(-1) + g)  # log(E / t)
        x = place.exp()
        bent = place + torch.where(x > 1e-8, torch.log(torch.expm1(x) / x.clamp_min(_LEAST)), 0.5 * x)
        sd = self.sd[:, None]
        z = (bent - self.mean[:, None, None]) / sd.unsqueeze(-1)
        total = (torch.special.ndtr(z) @ weights).clamp_min(_LEAST)
        density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
        slope = -(density @ weights) / sd
        bend = -0.5 * ((density * z) @ weights) / sd.square()
        return torch.stack([total.log(), slope / total, bend / total])


def _of_rows(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return values (B,) and derivatives (B, K): of a little S by log Gamma(S) = -log S, S = sum_j e^{f_j}."""
    is_little = (m + REACH * v.sqrt()).amax(-1) < _SMALL
    if not bool(is_little.any()):
        return _of_larger(m, v)
    value, slope, bend = torch.empty_like(m[:, 0]), torch.empty_like(m), torch.empty_like(m)
    value[is_little], slope[is_little], bend[is_little] = (-t for t in log_sum_exp_of_rows(m[is_little], v[is_little]))
    larger = ~is_little
    if bool(larger.any()):
        value[larger], slope[larger], bend[larger] = _of_larger(m[larger], v[larger])
    return value, slope, bend


def _of_larger(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return values (B,) and derivatives (B, K) by the integral over u."""
    num_data, K = m.shape
    flat_m, s = m.flatten(), v.sqrt().flatten()
    value, slope, bend = torch.empty_like(m[:, 0]), torch.empty_like(m), torch.empty_like(m)
    low, high = _ends(m, v)
    order = (high - low).argsort()
    span = (high - low)[order].tolist()
    width = s.view(m.shape).amax(-1)[order].tolist()
    done = 0
    while done < num_data:
        most, last = 0.0, done
        while last < num_data and (span[last] > _LONGEST_SPAN) == (span[done] > _LONGEST_SPAN):
            each = min(span[last], 2 * _LONGEST_SPAN) / _STEP * (40 + 60 * min(width[last], 4.0)) * K
            most = max(most, each)
            if last > done and most * (last + 1 - done) > _CHUNK:
                break
            last += 1
        part = order[done:last]
        u, steps = _nodes(low[part], high[part], m[part], v[part])
        rows = (part.unsqueeze(-1) * K + torch.arange(K, device=part.device)).flatten()
        value[part], slope[part], bend[part] = _sum(flat_m[rows], s[rows], u, steps, K)
        done = last
    return value, slope, bend


def _log_softplus(f: Tensor) -> Tensor:
    return torch.where(f < _SMALL, f, softplus(f.clamp_min(_SMALL), threshold=-_SMALL).log())


def _ends(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return below which u the integrand is linear in t and little, and above which M has vanished, (B,) each."""
    s = v.sqrt()
    largest = softplus(m + s).square() * (s / (1 + s)).square()  # about the variance
    low = -_DIGITS - torch.log1p(largest.sum(-1))
    return low, math.log(_DIGITS) - _log_softplus(m - REACH * s).amax(-1)


def _nodes(low: Tensor, high: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return u (B, U) and steps (B, U)."""
    high = torch.maximum(high, low + 1)
    if float((high - low).max()) <= _LONGEST_SPAN:
        num = math.ceil(float((high - low).max()) / _STEP) + 1
        u = low.unsqueeze(-1) + _STEP * torch.arange(num, dtype=low.dtype, device=low.device)
        return u, torch.full_like(u, _STEP)
    half = 0.5 * (_BEND - low)
    copies = math.ceil(float(half.max()) * math.sqrt(2) * _CLUSTERED_STEP / _STEP)  # steps of _STEP below the bend
    center = torch.cat([(low + half).unsqueeze(-1).expand(-1, copies), -m], -1)
    width = torch.cat([half.unsqueeze(-1).expand(-1, copies), 2 * (1 + v.sqrt())], -1)
    start, end = coordinate(torch.stack([low, high], -1), center, width).unbind(-1)
    num = math.ceil(float((end - start).max()) / _CLUSTERED_STEP) + 1
    t = start.unsqueeze(-1) + _CLUSTERED_STEP * torch.arange(num, dtype=low.dtype, device=low.device)
    u, stretch = place(t, center, width)
    return u, _CLUSTERED_STEP * stretch


def _sum(m: Tensor, s: Tensor, u: Tensor, steps: Tensor, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the integrals (B,) and their derivatives (B, K) of latents (B K,) from nodes (B, U)."""
    latents = [_Latents.of(rule, m, s) for rule in softplus_rules(m, s.square())]
    log_mean, by_mean, by_variance = (torch.empty_like(m) for _ in range(3))
    for some in latents:
        log_mean[some.rows] = some.log_mean
        unit = (some.log_unit - some.log_mean).exp()
        by_mean[some.rows], by_variance[some.rows] = some.by_mean * unit, some.by_variance * unit
    log_mean = log_mean.view(-1, K)
    log_mu = log_mean.logsumexp(-1, keepdim=True)  # (B, 1)
    share = (log_mean - log_mu).exp()
    by_mean, by_variance = by_mean.view(-1, K) * share, by_variance.view(-1, K) * share  # of mu, relative to it
    mu_t = torch.exp((u + log_mu).clamp(max=700.0))  # (B, U)
    is_shifted = mu_t < _SETTLED

    found = u.new_empty(3, len(m), u.size(-1))
    for some in latents:
        datum = some.rows // K
        at, shifted = u[datum], is_shifted[datum]
        if bool((some.sd <= WIDE).all()):
            found[:, some.rows] = some.transform(at, shifted)
            continue
        result = u.new_zeros(3, *at.shape)
        near = (at <= _GIANT).any(0)
        result[..., near] = some.transform(at[:, near], shifted[:, near])
        far = (at > _GIANT).any(0)
        there = some.transform_far(at[:, far])
        average = (at[:, far] + some.log_mean.unsqueeze(-1)).clamp(max=700.0).exp()
        there[0] += torch.where(shifted[:, far], average, 0.0)
        result[..., far] = torch.where(at[:, far] > _GIANT, there, result[..., far])
        found[:, some.rows] = result
    log_each, slope, bend = found.view(3, -1, K, u.size(-1))
    log_total = log_each.sum(1)  # (B, U)
    decay = torch.exp(-mu_t)
    weight = -steps / torch.expm1(-torch.exp(u.clamp(max=50.0)))
    gap = torch.where(is_shifted, decay * torch.expm1(log_total), log_total.exp() - decay)
    product = (weight * torch.where(is_shifted, decay, 1.0) * log_total.exp()).unsqueeze(-1)
    moved = (weight * mu_t * decay).sum(-1, keepdim=True)
    mu = log_mu.exp()
    value = torch.lgamma(1 + mu) - log_mu
    by_mu = mu * torch.digamma(1 + mu) - 1 + moved
    return (
        value.squeeze(-1) + (weight * gap).sum(-1),
        (slope @ product).squeeze(-1) + by_mu * by_mean,
        (bend @ product).squeeze(-1) + by_mu * by_variance,
    )
