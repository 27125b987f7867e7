r"""The predictive distribution of y = f + e^g e whose location f and log scale g are Gaussian, correlated or not.

    p(y) = int N(g | m_g, v_g) p(y | g) dg,     p(y | g) = int N(f | m(g), v) p(y | f, e^g) df

Given g, Gaussian noise leaves a Gaussian of variance v + e^{2g}. A Student-t leaves a mixture of such, of variance
v + e^{2g} / w over w ~ Gamma(n / 2, rate n / 2), whose integrals over log w converge geometrically with the nodes of a
trapezoidal rule, as those over g do. Y is so a finite mixture of normals, and its quantiles are those of the mixture;
they start from a mixture with a fourth of the nodes, whose error is about the square root.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Normal

from gpext.distributions.predictive.compound import CompoundDistribution
from gpext.distributions.predictive.correlated_latents import in_every
from gpext.distributions.predictive.newton_quantiles import check_probability
from gpext.distributions.predictive.normal_mixture_quantiles import AT_ONCE, normal_mixture_quantiles
from gpext.distributions.predictive.normal_plus_student_t import (
    DIGITS,
    NormalPlusStudentT,
    mixing_range,
    mixing_rule,
)
from gpext.quadrature import GivenScale

_REACH = 7.5  # of the rule over g, in standard deviations
_ANGLES = (0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.1, 1.3, 1.45)  # of e^{2g} off the real line
_HIGHEST, _DENSEST = 8.0, 100.0  # imaginary part of u, nodes a standard deviation
_IN_CACHE = 2**14  # values of a distribution function at a time
_TINY = torch.finfo(torch.float64).tiny


class CompoundLocationScale(CompoundDistribution):
    """Real targets, batch shape (..., N), as a mixture over their log scale.

    Args:
        latent_mean: of f and g (..., 2, N).
        latent_covariance: (..., 2, 2, N), positive semidefinite.
        log_density: maps (value, mean, covariance) to log p(value) (..., N).
        deg_free: degrees of freedom of the noise; None for Gaussian noise.
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import HeteroscedasticGaussianLikelihood
        >>> f = MultivariateNormal(torch.ones(2, 1).double(), torch.eye(1).double().expand(2, 1, 1))
        >>> HeteroscedasticGaussianLikelihood()(f).mean
        tensor([1.], dtype=torch.float64)
    """

    def __init__(
        self,
        latent_mean: Tensor,
        latent_covariance: Tensor,
        log_density: Callable[[Tensor, Tensor, Tensor], Tensor],
        deg_free: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self._latents, self._joint_log_density = (latent_mean, latent_covariance), log_density
        given = GivenScale.of(latent_mean, latent_covariance)
        scale_mean, scale_variance = latent_mean[..., 1, :], latent_covariance[..., 1, 1, :]
        self._given, self._deg_free = given, deg_free
        super().__init__(_Conditional(given, deg_free), scale_mean, scale_variance, validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: CompoundDistribution | None = None) -> CompoundDistribution:
        """The same distribution, repeated over `batch_shape`."""
        new = type(self).__new__(type(self)) if _instance is None else _instance
        new._latents, new._joint_log_density = self._latents, self._joint_log_density
        new._given, new._deg_free = self._given, self._deg_free
        return super().expand(batch_shape, new)

    def _log_density(self, value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return self._joint_log_density(value, *in_every(value.shape, *self._latents))

    def _cdf(self, value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[P(Y <= value | g)], by a trapezoidal rule over g that resolves it, to about 1e-12."""
        mean, sd, value64 = mean.double(), variance.double().sqrt(), value.double()
        density = _nodes_per_deviation(self._given, self._deg_free_or_inf, DIGITS)
        num_nodes = int((2 * _REACH * density).max().ceil()) + 1 if sd.numel() else 1
        u = torch.linspace(-_REACH, _REACH, num_nodes, dtype=sd.dtype, device=sd.device)
        u = u.view(-1, *(1,) * sd.dim())
        total = torch.zeros_like(sd)
        size = max(_IN_CACHE // max(sd.numel(), 1), 1)
        for nodes, weights in zip(u.split(size), torch.softmax(-0.5 * u.square(), 0).split(size), strict=True):
            total = total + (weights * self.conditional(mean + sd * nodes).cdf(value64)).sum(0)
        return total.clamp(max=1).to(value.dtype)  # the weights sum to one but for rounding

    @property
    def _deg_free_or_inf(self) -> Tensor | float:
        return math.inf if self._deg_free is None else self._deg_free

    def icdf(self, value: Tensor | float) -> Tensor:
        """The quantile: y with cdf(y) = value, to about 1e-11 of the smaller tail. No gradient.

        Raises:
            ValueError: a probability is not strictly between 0 and 1.
        """
        with torch.no_grad():
            q, _ = torch.broadcast_tensors(check_probability(value, self.latent_mean), self.latent_mean)
            given, n = self._given, torch.as_tensor(self._deg_free_or_inf, dtype=torch.float64, device=q.device)
            fields = (given.mean, given.scale_deviation, given.slope, given.variance, given.scale_mean, n)
            fields = torch.broadcast_tensors(*fields)
            if q.shape[q.dim() - fields[0].dim() :] != fields[0].shape:
                fields = torch.broadcast_tensors(*fields, q)[:-1]
            mean, *rest = (field.reshape(-1) for field in fields)
            levels = q.double().reshape(-1, len(mean)) if len(mean) else q.double().reshape(0, 0)
            digits = DIGITS - float(torch.minimum(levels, 1 - levels).amin().log()) if levels.numel() else DIGITS
            density = _nodes_per_deviation(given, n, digits).expand(fields[0].shape).reshape(-1)
            found = torch.empty_like(levels)
            order = density.argsort()  # similar numbers of nodes together
            while len(order):
                most = _num_nodes(density[order[-1:]], rest[-1], digits)
                size = max(AT_ONCE // (math.prod(most) * len(levels)), 1)
                order, now = order[:-size], order[-size:]
                part, q_now = [field[now] for field in rest], levels[:, now]
                near = normal_mixture_quantiles(q_now, *_normals(digits, [k // 2 + 1 for k in most], *part))
                found[:, now] = normal_mixture_quantiles(q_now, *_normals(digits, most, *part), start=near)
            return (mean + found).view(q.shape).to(q.dtype)


def _nodes_per_deviation(given: GivenScale, deg_free: Tensor | float, digits: float) -> Tensor:
    """Return how many nodes of g a standard deviation needs (..., N), for sums over g to e^-digits.

    With b = d E[f | g] / du, on the line Im u = a the integrand N(u) Phi((y - m - b u) / s(u)), s^2 = v + e^{2g}, is at
    most exp(a^2 (1 + b^2 / (|s^2| cos 2 a sd_g)) / 2 - u^2 / 2) for any y, as long as 2 a sd_g < pi / 2: each a gives
    the step h of a valid rule, 2 pi a / h - log of the bound = digits.
    """
    sd = given.scale_deviation
    moved = (given.slope * sd).square()
    u = torch.arange(-8.0, 1.0, dtype=sd.dtype, device=sd.device).view(-1, *(1,) * sd.dim())
    square = given.variance + (2 * given.scale(u)).exp() / (1 + 8 / deg_free)
    least = torch.full_like(sd, 1 / _DENSEST)
    for angle in _ANGLES:
        a = (0.5 * angle / sd).clamp_max(_HIGHEST)
        narrow = (square * (math.cos(angle) * math.cos(0.5 * angle))).clamp_min(_TINY)
        growth = (0.5 * a.square() * moved / narrow - 0.5 * u.square()).amax(0) + 0.5 * a.square()
        least = torch.maximum(least, 2 * math.pi * a / (digits + growth))
    return torch.where(sd > 0, least.reciprocal(), 0.0)


def _num_nodes(per_deviation: Tensor, deg_free: Tensor, digits: float) -> list[int]:
    """Return the numbers of nodes of g and of w, odd, for data that need so many of g a standard deviation."""
    of_scale = int((math.sqrt(2 * digits) * per_deviation.max()).ceil())
    if bool(deg_free.isinf().all()):
        return [2 * of_scale + 1, 1]
    low, high, step = mixing_range(0.5 * deg_free, digits)
    return [2 * of_scale + 1, 2 * int((0.5 * (high - low) / step).max().ceil()) + 1]


def _normals(
    digits: float,
    most: list[int],
    deviation: Tensor,
    slope: Tensor,
    variance: Tensor,
    scale_mean: Tensor,
    deg_free: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights, means less that of f, and rates (B, K) of the normals that are mixed; tensors are (B,)."""
    reach = math.sqrt(2 * digits)
    u = torch.linspace(-reach, reach, most[0], dtype=deviation.dtype, device=deviation.device)
    moved = deviation.unsqueeze(-1) * u
    noise = (2 * (scale_mean.unsqueeze(-1) + moved)).exp().unsqueeze(-1)  # (B, G, 1)
    weights = torch.softmax(-0.5 * u.square(), 0).view(1, -1, 1)
    if bool(deg_free.isfinite().all()):
        a = 0.5 * deg_free
        low, high, _ = mixing_range(a, digits)
        log_w, of_w = mixing_rule(a, low, high, most[1])
        noise, weights = noise * (-log_w).exp().mT.unsqueeze(-2), weights * of_w.mT.unsqueeze(-2)
    rate = (variance.view(-1, 1, 1) + noise).rsqrt()
    loc = (slope.unsqueeze(-1) * moved).unsqueeze(-1)
    weights, loc, rate = torch.broadcast_tensors(weights, loc, rate)
    return weights.flatten(1), loc.flatten(1), rate.flatten(1)


class _Conditional:
    """Maps g (Q, ..., N) to p(y | g)."""

    def __init__(self, given: GivenScale, deg_free: Tensor | None) -> None:
        self.given, self.deg_free = given, deg_free

    def __call__(self, g: Tensor) -> torch.distributions.Distribution:
        location, variance = self.given.location(g.double()).to(g.dtype), self.given.variance.to(g.dtype)
        if self.deg_free is None:
            return Normal(location, (variance + (2 * g).exp()).sqrt(), validate_args=False)
        return NormalPlusStudentT(location, variance.expand(g.shape), self.deg_free.to(g.dtype), g.exp())
