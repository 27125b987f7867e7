r"""Noise whose scale varies with the input: two latent functions, the location f and the log scale g.

    p(y | f, g) = e^-g p_0(r),     r = (y - f) e^-g,     log p_0(r) = -psi(r) + const

    u = (psi' e^-g, r psi' - 1),     U = [psi'' e^-2g, h r e^-g; h r e^-g, h r^2],     h = psi'/r + psi''

and U = diag((psi'' + h) e^-2g, 2 h r^2) - h w w' with w = (e^-g, -r): diagonal plus rank one, its coupling negative, so
that inference takes three Cholesky factors of the size of the data. Gaussian noise has psi = r^2 / 2 and h = 2
[Goldberg, Williams & Bishop 1998; Lazaro-Gredilla & Titsias 2011], a Student-t psi = (n + 1) / 2 log(1 + r^2 / n) and
h = 2 n (n + 1) / (n + r^2)^2. U is indefinite wherever r is not zero: a residual is explained by either latent.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import partial
from typing import Any

import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.distributions import MultivariateNormal, base_distributions
from gpytorch.priors import Prior
from torch import Tensor
from torch.distributions import Distribution

from gpext.distributions import CompoundLocationScale, StudentT
from gpext.likelihoods.checks import floating_like
from gpext.likelihoods.curvature import Curvature
from gpext.likelihoods.joint import JointLikelihood
from gpext.quadrature import (
    JointMoments,
    ScaleNoise,
    expected_log_square_sum,
    gaussian_tilted_moments,
    location_scale_moments,
    log_location_scale_density,
    student_t_log_normalizer,
    student_t_tilted_moments,
)


class HeteroscedasticLikelihood(JointLikelihood):
    """y = f + e^g e with noise e of a fixed kind: the base of the two likelihoods below.

    Latents (..., 2, N) are f, in the units of y, and g, the logarithm of a scale in these units. Give the mean and the
    kernel `batch_shape=torch.Size([2])`. Under zero prior means the noise has a scale of about one: standardise the
    targets, or give the mean of g a constant of its own, log(std) of the noise expected.

    `KL`, `EP` and natural gradients are the rules to use. Under a wide prior of g the joint mode, which `Laplace`
    takes, may be one where the noise vanishes; and `Taylor` has no point where its posterior is sure to exist.
    """

    num_latents = 2

    def expansion_point(self, targets: Tensor) -> Tensor:
        """Return where Taylor expands (..., 2, N): the mean of the targets and the logarithm of their spread."""
        mean = targets.mean(-1, keepdim=True).expand(targets.shape)
        spread = (targets - mean).square().mean(-1, keepdim=True).sqrt()
        return torch.stack([mean, torch.where(spread > 0, spread, 1.0).log().expand(targets.shape)], -2)

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N)."""
        return self.forward(f).log_prob(floating_like(targets, f))

    def curvature(self, targets: Tensor, f: Tensor) -> Curvature:
        """Return log p(y | f) to second order at f (..., 2, N).

        `expected_precision` makes U positive definite: it is 2 h (e^-2g, r^2), with which U would be singular, and the
        Fisher information of f and of g.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        location, log_scale = f.unbind(-2)
        rate = (-log_scale).exp()
        r = (floating_like(targets, f) - location) * rate
        slope, bend, h = self._radial(r)
        information_f, information_g = self._information
        gradient = torch.stack([slope * rate, r * slope - 1], -2)
        precision = torch.stack([(bend + h) * rate.square(), 2 * h * r.square()], -2)
        positive = torch.stack([(2 * h + information_f) * rate.square(), 2 * h * r.square() + information_g], -2)
        return Curvature(
            self.unchecked_log_prob(targets, f), gradient, precision, -h, torch.stack([rate, -r], -2), positive
        )

    @abstractmethod
    def _radial(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return psi', psi'' and h at r."""

    @property
    @abstractmethod
    def _information(self) -> tuple[Tensor | float, Tensor | float]:
        """The Fisher information of f and of g at a scale of one."""

    @abstractmethod
    def _noise(self, power: float) -> ScaleNoise:
        """Return the integrals over f of a power of p(y | f, e^g)."""

    def joint_log_density(self, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, covariance) df (..., N), an integral in one dimension, to 1e-10.

        Args:
            targets: (..., N).
            mean: (..., 2, N).
            covariance: of the latents of each datum (..., 2, 2, N).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        return log_location_scale_density(targets, mean, covariance, self._noise(1.0)).to(mean.dtype)

    def joint_tilted_moments(self, targets: Tensor, mean: Tensor, covariance: Tensor, power: float) -> JointMoments:
        """Return the moments of N(f | mean, covariance) p(y | f)^power, for EP, to about 1e-10 of their scale."""
        return location_scale_moments(targets, mean, covariance, self._noise(power))

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y), a :class:`gpext.distributions.CompoundLocationScale`: moments, log_prob, cdf, quantiles."""
        return CompoundLocationScale(*self._blocks(function_dist), self.joint_log_density, self._degrees)

    @property
    def _degrees(self) -> Tensor | None:
        """Degrees of freedom of the noise; None if it is Gaussian."""
        return None


class HeteroscedasticGaussianLikelihood(HeteroscedasticLikelihood):
    r"""Gaussian noise whose logarithm of the standard deviation is a latent function.

    :math:`p(y|f, g) = N(y | f, e^{2g})`, f and g the two latents. Expectations are in closed form,

    .. math:: E[\log p] = -\tfrac12 \log 2\pi - m_g - \tfrac12 ((y - m_f + 2c)^2 + v_f) e^{2 v_g - 2 m_g}

    with c the covariance of f and g, which is zero under KL.

    Example:
        >>> import torch
        >>> f = torch.tensor([[1.0, 1.0], [0.0, -1.0]])  # locations 1 and 1, standard deviations 1 and 1 / e
        >>> HeteroscedasticGaussianLikelihood()(f).stddev
        tensor([1.0000, 0.3679])
    """

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f) for f (..., 2, N), with batch shape (..., N)."""
        location, log_scale = function_samples.unbind(-2)
        return base_distributions.Normal(location, log_scale.exp(), validate_args=False)

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), also where e^g underflows."""
        location, log_scale = f.unbind(-2)
        r = (floating_like(targets, f) - location) * (-log_scale).exp()
        return -0.5 * math.log(2 * math.pi) - log_scale - 0.5 * r.square()

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] (..., N) under independent N(mean, variance), (..., 2, N), in closed form.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        return _expected_gaussian(targets, mean, variance, 0.0)

    def joint_expected_log_density(self, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return E[log p(y | f)] (..., N) under N(mean, covariance), covariances (..., 2, 2, N), in closed form.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        variance = covariance.diagonal(dim1=-3, dim2=-2).mT
        return _expected_gaussian(targets, mean, variance, covariance[..., 0, 1, :])

    def _radial(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one = torch.ones_like(r)
        return r, one, 2 * one

    @property
    def _information(self) -> tuple[float, float]:
        return 1.0, 2.0

    def _noise(self, power: float) -> ScaleNoise:
        moments = partial(gaussian_tilted_moments, power=power)
        return ScaleNoise(moments, lambda *arguments: moments(*arguments).log_normalizer, 0.17)


class HeteroscedasticStudentTLikelihood(HeteroscedasticLikelihood):
    r"""Student-t noise whose logarithm of the scale is a latent function: outliers, and noise that varies.

    :math:`p(y|f, g) = t_\nu((y - f) e^{-g}) e^{-g}`, f and g the two latents; `deg_free` is nu, one for all data.

    Args:
        deg_free_prior: prior of `deg_free`.
        deg_free_constraint: above 2 by default, as in gpytorch's StudentTLikelihood, so that y has a variance.

    Raises:
        TypeError: a constraint of another kind.

    Example:
        >>> import torch
        >>> f = torch.tensor([[1.0], [0.0]])
        >>> HeteroscedasticStudentTLikelihood()(f).mean
        tensor([1.])
    """

    def __init__(self, deg_free_prior: Prior | None = None, deg_free_constraint: Interval | None = None) -> None:
        super().__init__()
        constraint = GreaterThan(2) if deg_free_constraint is None else deg_free_constraint
        if not isinstance(constraint, Interval):
            raise TypeError(f"deg_free_constraint must be a gpytorch constraint; got {constraint!r}.")
        self.register_parameter("raw_deg_free", torch.nn.Parameter(torch.zeros(())))
        self.register_constraint("raw_deg_free", constraint)
        self.initialize(deg_free=7.0)
        if deg_free_prior is not None:
            self.register_prior("deg_free_prior", deg_free_prior, _deg_free, _set_deg_free)

    @property
    def deg_free(self) -> Tensor:
        """The degrees of freedom nu ()."""
        return self.raw_deg_free_constraint.transform(self.raw_deg_free)

    @deg_free.setter
    def deg_free(self, value: Tensor | float) -> None:
        value = torch.as_tensor(value).to(self.raw_deg_free)
        self.initialize(raw_deg_free=self.raw_deg_free_constraint.inverse_transform(value))

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> StudentT:
        """Return p(y | f) for f (..., 2, N), with batch shape (..., N)."""
        location, log_scale = function_samples.unbind(-2)
        return StudentT(df=self.deg_free.to(location), loc=location, scale=log_scale.exp(), validate_args=False)

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), also where e^g underflows."""
        location, log_scale = f.unbind(-2)
        nu = self.deg_free.to(f)
        gap = (floating_like(targets, f) - location).abs()
        at_centre = gap == 0
        log_r = torch.where(at_centre, 1.0, gap).log() - log_scale
        tail = torch.nn.functional.softplus(2 * log_r - nu.log())  # log(1 + r^2 / nu), of any size
        return _log_constant(nu) - log_scale - 0.5 * (nu + 1) * torch.where(at_centre, 0.0, tail)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] (..., N) under independent N(mean, variance), (..., 2, N), to about 1e-11.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        (m_f, m_g), (v_f, v_g) = mean.unbind(-2), variance.unbind(-2)
        nu = self.deg_free.to(mean)
        whole = expected_log_square_sum(floating_like(targets, mean) - m_f, v_f, m_g + 0.5 * nu.log(), v_g)
        return _log_constant(nu) - m_g - 0.5 * (nu + 1) * (whole - nu.log() - 2 * m_g)

    def _radial(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nu = self.deg_free.to(r)
        rest = nu + r.square()
        return (nu + 1) * r / rest, (nu + 1) * (nu - r.square()) / rest.square(), 2 * nu * (nu + 1) / rest.square()

    @property
    def _information(self) -> tuple[Tensor, Tensor]:
        nu = self.deg_free
        return (nu + 1) / (nu + 3), 2 * nu / (nu + 3)

    def _noise(self, power: float) -> ScaleNoise:
        nu = self.deg_free.double()
        return ScaleNoise(
            lambda offset, variance, noise: student_t_tilted_moments(offset, variance, nu, noise, power),
            lambda offset, variance, noise: student_t_log_normalizer(offset, variance, nu, noise, power),
            0.3,
        )

    @property
    def _degrees(self) -> Tensor:
        return self.deg_free


def _expected_gaussian(targets: Tensor, mean: Tensor, variance: Tensor, covariance: Tensor | float) -> Tensor:
    (m_f, m_g), (v_f, v_g) = mean.unbind(-2), variance.unbind(-2)
    gap = floating_like(targets, mean) - m_f + 2 * covariance
    spread = (gap.square() + v_f) * (2 * (v_g - m_g)).exp()
    return -0.5 * math.log(2 * math.pi) - m_g - 0.5 * spread


def _log_constant(nu: Tensor) -> Tensor:
    return torch.lgamma(0.5 * (nu + 1)) - torch.lgamma(0.5 * nu) - 0.5 * (math.pi * nu).log()


def _deg_free(module: HeteroscedasticStudentTLikelihood) -> Tensor:
    return module.deg_free


def _set_deg_free(module: HeteroscedasticStudentTLikelihood, value: Tensor) -> None:
    module.deg_free = value
