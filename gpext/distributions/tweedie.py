r"""Tweedie's compound Poisson-gamma law, 1 < p < 2, with a density to full precision [Dunn & Smyth 2005].

Y is a sum of J ~ Poisson(lambda) gamma variables of shape a and scale g: zero, or positive and continuous, with mean mu
and variance phi mu^p, where

    lambda = mu^(2-p) / (phi (2-p)),    a = (2-p) / (p-1),    g = phi (p-1) mu^(p-1)
    log p(0) = -lambda,    log p(y) = log p(y | mu = y) - D / phi,    D = half the unit deviance

Of mu the density depends through D alone. The rest is a series over J, with L and a L the values of lambda and y / g at
mu = y. Each term is a Poisson mass of j at rate L times one of a j at rate a L, both by their deviances [Loader 2000]:

    y p(y | y) = (sqrt(a) / 2 pi) sum_j exp(-(1 + a) j e2(log(L / j)) - R(j) - R(a j)),    L = y^(2-p) / (phi (2-p))
    D = y^(2-p) (e2((2-p) d) / (2-p) + e2(-(p-1) d) / (p-1)),    d = log mu - log y,    e2(x) = e^x - 1 - x

with R the remainder of Stirling's formula. No term is a difference of large numbers. About L the terms are as wide as
sqrt(L / (1 + a)): narrow sums are over all j within ten widths, and wide ones, nearly integrals of an analytic
function, take the trapezoidal rule with 6.4 nodes a width, whose error is below rounding.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from gpytorch.distributions import Distribution, base_distributions
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all

from gpext.distributions.drawing import drawn_from
from gpext.distributions.positive import with_slopes
from gpext.distributions.with_cdf import Poisson, by_scipy
from gpext.special import exp_remainder, log_poisson, stirling_remainder, stirling_remainder_slope

_HALF = 64  # nodes on either side of the largest term
_A_WIDTH = 6.4  # nodes: ten widths on either side
_WIDTHS, _BEYOND = 10.0, 12.0  # of which terms the last one is below rounding, if they are narrow
_NOTHING = 1e-18  # of a probability
_CHUNK = 8192  # data in one sum

AMOUNTS = constraints.greater_than_eq(0.0)
"""The support of a continuous Y >= 0 that is zero with a positive probability."""


class Tweedie(Distribution):
    """The sum of a Poisson number of gamma variables: zeros and positive amounts.

    There is no `log_tail` of it, so that `Censored` and `Truncated` refuse it. The terms of a tail are Poisson masses
    times incomplete gamma functions, which lie about the number of terms that is likely given Y = y far out, not about
    lambda; and inference needs the first two derivatives of its logarithm in log mu, each a series of its own.

    Args:
        log_mean: log mu.
        dispersion: phi > 0.
        power: p, in (1, 2): the variance is phi mu^p.
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> Tweedie(torch.tensor(0.0), 1.0, 1.5).log_prob(torch.tensor([0.0, 1.0]))
        tensor([-2.0000, -1.0286])
    """

    arg_constraints: ClassVar = {
        "log_mean": constraints.real,
        "dispersion": constraints.positive,
        "power": constraints.interval(1.0, 2.0),
    }
    support = AMOUNTS

    def __init__(
        self,
        log_mean: Tensor | float,
        dispersion: Tensor | float,
        power: Tensor | float,
        validate_args: bool | None = None,
    ) -> None:
        self.log_mean, self.dispersion, self.power = broadcast_all(log_mean, dispersion, power)
        super().__init__(self.log_mean.shape, validate_args=validate_args)
        if self._validate_args and bool(((self.power == 1) | (self.power == 2)).any()):
            raise ValueError("power must be strictly between 1 and 2; there are distributions Poisson and Gamma.")

    def expand(self, batch_shape: torch.Size, _instance: Tweedie | None = None) -> Tweedie:
        """The same distribution, repeated over `batch_shape`."""
        new = self._get_checked_instance(type(self), _instance)
        for name in self.arg_constraints:
            setattr(new, name, getattr(self, name).expand(batch_shape))
        super(Tweedie, new).__init__(torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        """Mu."""
        return self.log_mean.exp()

    @property
    def variance(self) -> Tensor:
        """Phi mu^p."""
        return self.dispersion * (self.power * self.log_mean).exp()

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, of zero the log probability; differentiable once in dispersion and power."""
        if self._validate_args:
            self._validate_sample(value)
        log_p = tweedie_log_prob(value.double(), self.log_mean.double(), self.dispersion.double(), self.power.double())
        return log_p.to(self.log_mean.dtype)

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value), as the Poisson mean of gamma ones, to some 1e-12; no gradient. Some 30 microseconds each."""
        rate, shape, scale = (each.detach() for each in self._parts())
        x, rate, shape = torch.broadcast_tensors(value.double().clamp_min(0) / scale, rate, shape)
        order = rate.flatten().argsort()  # similar numbers of terms together
        parts = [
            _gamma_mixture(x.flatten()[index], rate.flatten()[index], shape.flatten()[index])
            for index in order.split(_CHUNK)
        ]
        total = torch.cat([*parts, order.new_zeros(0)])[order.argsort()].view(x.shape) + (-rate).exp()
        return torch.where(value < 0, 0.0, total.clamp(max=1)).to(self.log_mean.dtype)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return draws of shape sample_shape + batch_shape."""
        with torch.no_grad(), drawn_from(generator):
            rate, shape, scale = (each.expand(self._extended_shape(torch.Size(sample_shape))) for each in self._parts())
            number = Poisson(rate).sample()
            amount = base_distributions.Gamma(torch.where(number > 0, number * shape, 1.0), 1.0).sample()
            return torch.where(number > 0, scale * amount, 0.0).to(self.log_mean.dtype)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return lambda, a and g, float64."""
        f, phi, p = self.log_mean.double(), self.dispersion.double(), self.power.double()
        rate = ((2 - p) * f - (phi * (2 - p)).log()).exp()
        return rate, (2 - p) / (p - 1), phi * (p - 1) * ((p - 1) * f).exp()


def tweedie_log_prob(
    y: Tensor, log_mean: Tensor, dispersion: Tensor, power: Tensor, *, variance: Tensor | float = 0.0
) -> Tensor:
    """Return log p(y), of y = 0 the log probability, or its expectation for a Gaussian log mu; elementwise, float64.

    E[e^(c d)] = e^(c E d + c^2 v / 2). Twice differentiable in log mu, once in phi and p. The series is summed in the
    common shape of y, phi and p: values of log mu with more dimensions in front cost next to nothing.

    Args:
        y: not negative.
        log_mean: log mu, or its mean.
        dispersion: phi.
        power: p.
        variance: of log mu.
    """
    is_zero, by_rate, by_scale = y == 0, 2 - power, power - 1
    log_y = torch.where(is_zero, 1.0, y).log()
    half = 0.5 * torch.as_tensor(variance).to(log_mean)
    d, spread = (torch.where(is_zero, 0.0, each) for each in (log_mean - log_y, half))
    left = exp_remainder(by_rate * (d + by_rate * spread)) / by_rate
    right = exp_remainder(-by_scale * (d - by_scale * spread)) / by_scale
    half_deviance = (by_rate * log_y).exp() * (left + right + spread)
    log_rate = by_rate * torch.where(is_zero, log_mean + by_rate * half, 0.0)
    return torch.where(
        is_zero,
        -log_rate.exp() / (dispersion * by_rate),
        _log_density_at_mean(log_y, dispersion, power) - log_y - half_deviance / dispersion,
    )


def _log_density_at_mean(log_y: Tensor, dispersion: Tensor, power: Tensor) -> Tensor:
    """Return log y p(y | mu = y) for y > 0, float64; differentiable once in all three."""
    log_y, dispersion, power = torch.broadcast_tensors(log_y, dispersion, power)
    L = ((2 - power) * log_y).exp() / (dispersion * (2 - power))
    a = (2 - power) / (power - 1)
    rates, shapes = L.detach().reshape(-1), a.detach().reshape(-1)
    wanted = torch.is_grad_enabled() and (L.requires_grad or a.requires_grad)
    parts = [_log_series(*part, slopes=wanted) for part in zip(rates.split(_CHUNK), shapes.split(_CHUNK), strict=True)]
    value, *slopes = (torch.cat(each).view(L.shape) for each in zip(*parts, strict=True))
    return with_slopes(value, *zip((L, a), slopes, strict=True)) if wanted else value


def _log_series(L: Tensor, a: Tensor, *, slopes: bool) -> tuple[Tensor, ...]:
    """Return the logarithm of the series, and with `slopes` its derivatives in L and in a, each (N,)."""
    j, step = _nodes(L, (L / (1 + a)).sqrt(), _HALF, 1)
    deviance = j * exp_remainder(-torch.log1p((j - L) / L))  # about L the gap j - L has its digits, log(L / j) has not
    terms = step.log() - (1 + a) * deviance - stirling_remainder(j) - stirling_remainder(a * j)
    value = torch.logsumexp(terms, 0) + 0.5 * a.log() - math.log(2 * math.pi)
    if not slopes:
        return (value,)
    share = terms.softmax(0)
    by_rate = (1 + a) * (share * (j - L)).sum(0) / L
    by_shape = 0.5 / a - (share * (deviance + j * stirling_remainder_slope(a * j))).sum(0)
    return value, by_rate, by_shape


def _gamma_mixture(x: Tensor, rate: Tensor, shape: Tensor) -> Tensor:
    """Return sum_j p(j) P(gamma of shape a j <= x) over j >= 1 with p(j) = rate^j e^-rate / j!, each (N,)."""
    from scipy import special

    refined = math.ceil(float((1 + shape.max()).sqrt())) if len(shape) else 1  # steps of the gamma cdfs are narrower
    j, step = _nodes(rate, rate.sqrt(), _HALF * refined, refined)
    mass = step * log_poisson(j, rate.log()).exp()
    counts = mass > _NOTHING
    below = by_scipy(special.gammainc, (shape * j)[counts], x.expand(j.shape)[counts])
    return torch.zeros_like(mass).masked_scatter(counts, below).mul(mass).sum(0)


def _nodes(centre: Tensor, width: Tensor, half: int, refined: int) -> tuple[Tensor, Tensor]:
    """Return places j (J, ...) and their weights (J, ...) for sums over j = 1, 2, ... of terms about a centre.

    Args:
        centre: where the terms are large (...).
        width: their standard deviation (...).
        half: J / 2, ten widths.
        refined: how many times more nodes a width has than for terms that are Gaussian.
    """
    stride = width / (_A_WIDTH * refined)
    is_wide = stride > 1
    first = (centre.round() - half).clamp_min(1)
    needed = torch.where(is_wide, 2 * half, centre + _WIDTHS * width + _BEYOND - first)
    count = min(2 * half, int(needed.max())) if needed.numel() else 0
    place = torch.arange(count, dtype=centre.dtype, device=centre.device).view(-1, *centre.dim() * (1,))
    j = torch.where(is_wide, centre + stride * (place - half), first + place)
    weight = torch.where(is_wide, stride, 1.0).expand(j.shape)
    inside = j >= 1  # of a wide sum nothing is below
    return torch.where(inside, j, 1.0), torch.where(inside, weight, 0.0)
