r"""The predictive distribution of y = f + e^g e whose location f and log scale g are Gaussian, correlated or not.

    p(y) = int N(g | m_g, v_g) p(y | g) dg,     p(y | g) = int N(f | m(g), v) p(y | f, e^g) df

Given g, Gaussian noise leaves a Gaussian of variance v + e^{2g}. A Student-t leaves a mixture of such over w ~
Gamma(n / 2, rate n / 2), whose integrals over log w converge geometrically with the nodes of a trapezoidal rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from gpytorch.distributions import Distribution
from torch import Tensor
from torch.distributions import Normal, constraints

from gpext.distributions.drawing import drawn_from
from gpext.distributions.predictive.compound import CompoundDistribution
from gpext.distributions.predictive.correlated_latents import in_every
from gpext.distributions.with_cdf import StudentT
from gpext.quadrature import GivenScale, student_t_log_normalizer
from gpext.quadrature.softmax.gumbel import DIGITS, gumbel_step

_REACH, _STEP_OF_SCALE, _STEP_OF_NORMAL = 7.5, 0.2, 0.8  # of the rule over g, in nats and in standard deviations
_DIGITS = 28.0  # -log of the error of the sum over w
_IN_CACHE = 2**14  # values of a distribution function at a time


class CompoundLocationScale(CompoundDistribution):
    """Real targets, batch shape (..., N), as a mixture over their log scale.

    Args:
        latent_mean: of f and g (..., 2, N).
        latent_covariance: (..., 2, 2, N), positive semidefinite.
        log_density: maps (value, mean, covariance) to log p(value) (..., N).
        deg_free: degrees of freedom of the noise; None for Gaussian noise.
        validate_args: as in torch.distributions.
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
        super().__init__(_Conditional(given, deg_free), scale_mean, scale_variance, validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: CompoundDistribution | None = None) -> CompoundDistribution:
        """The same distribution, repeated over `batch_shape`."""
        new = type(self).__new__(type(self)) if _instance is None else _instance
        new._latents, new._joint_log_density = self._latents, self._joint_log_density
        return super().expand(batch_shape, new)

    def _log_density(self, value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return self._joint_log_density(value, *in_every(value.shape, *self._latents))

    def _cdf(self, value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[P(Y <= value | g)], by a trapezoidal rule over g that resolves it, to about 1e-12."""
        mean, sd, value64 = mean.double(), variance.double().sqrt(), value.double()
        num_nodes = int((2 * _REACH * (sd / _STEP_OF_SCALE).clamp_min(1 / _STEP_OF_NORMAL)).max().ceil()) + 1
        u = torch.linspace(-_REACH, _REACH, num_nodes, dtype=sd.dtype, device=sd.device)
        u = u.view(-1, *(1,) * sd.dim())
        total = torch.zeros_like(sd)
        size = max(_IN_CACHE // max(sd.numel(), 1), 1)
        for nodes, weights in zip(u.split(size), torch.softmax(-0.5 * u.square(), 0).split(size), strict=True):
            total = total + (weights * self.conditional(mean + sd * nodes).cdf(value64)).sum(0)
        return total.clamp(max=1).to(value.dtype)  # the weights sum to one but for rounding


class _Conditional:
    """Maps g (Q, ..., N) to p(y | g)."""

    def __init__(self, given: GivenScale, deg_free: Tensor | None) -> None:
        self.given, self.deg_free = given, deg_free

    def __call__(self, g: Tensor) -> torch.distributions.Distribution:
        location, variance = self.given.location(g.double()).to(g.dtype), self.given.variance.to(g.dtype)
        if self.deg_free is None:
            return Normal(location, (variance + (2 * g).exp()).sqrt(), validate_args=False)
        return _NormalPlusStudentT(location, variance.expand(g.shape), self.deg_free.to(g.dtype), g.exp())


class _NormalPlusStudentT(Distribution):
    """The sum of a Gaussian N(loc, variance) and an independent Student-t variable times `scale`, (...) each."""

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    support = constraints.real

    def __init__(self, loc: Tensor, variance: Tensor, df: Tensor, scale: Tensor) -> None:
        self.loc, self.normal_variance, self.df, self.scale = loc, variance, df, scale
        super().__init__(loc.shape, validate_args=False)

    @property
    def _noise(self) -> StudentT:
        return StudentT(df=self.df, loc=self.loc, scale=self.scale, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """`loc`; nan for df <= 1."""
        return self._noise.mean

    @property
    def variance(self) -> Tensor:
        """The sum of both; infinite for 1 < df <= 2, nan below."""
        return self._noise.variance + self.normal_variance

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density."""
        noise = self.scale.square()
        found = student_t_log_normalizer(value - self.loc, self.normal_variance, self.df, noise, 1.0)
        return found.to(self.loc.dtype)

    def cdf(self, value: Tensor) -> Tensor:
        """Return P(Y <= value); no gradient."""
        with torch.no_grad():
            z, v, a = torch.broadcast_tensors(value - self.loc, self.normal_variance, 0.5 * self.df)
            z, v, a = z.double(), v.double(), a.double()
            noise = self.scale.double().square()
            reach = _DIGITS / a + (2 * _DIGITS / a).sqrt()
            low = -(z.square() / (2 * a * noise)).log1p() - reach  # left of it the integrand falls like w^a
            high = reach.log1p()
            num_nodes = int(((high - low) * _DIGITS / DIGITS / gumbel_step(a)).max().ceil()) + 1 if z.numel() else 1
            step = (high - low) / max(num_nodes - 1, 1)
            t = low + step * torch.arange(num_nodes, dtype=z.dtype, device=z.device).view(-1, *(1,) * z.dim())
            w = t.exp()
            weight = (a * (t - w + a.log()) - torch.lgamma(a) + step.log()).exp()
            total = (weight * torch.special.ndtr(z * (v + noise / w).rsqrt())).sum(0)
            return total.to(self.loc.dtype)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape; from torch's global generator by default."""
        with torch.no_grad(), drawn_from(generator):
            noise = self._noise.sample(torch.Size(sample_shape))
            return noise + self.normal_variance.sqrt() * torch.randn_like(noise)
