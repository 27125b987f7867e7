r"""The predictive distribution of an angle: a von Mises whose natural parameter is Gaussian in the plane.

p(y) = int VM(y | eta) N(eta | m, V) d eta,     E[e^{iy}] = E[A(|eta|) e^{i arg eta}] = R e^{i loc}
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import constraints

from gpext.distributions.angle_table import AngleTable
from gpext.distributions.bessel import log_i0_derivative, resultant_slope
from gpext.distributions.circular import CircularDistribution
from gpext.distributions.correlated_latents import draw_latents, in_every
from gpext.distributions.von_mises import VonMises
from gpext.distributions.von_mises_mixture import compound_resultant, log_compound_density

_NEWTON_STEPS = 6


class CompoundVonMises(CircularDistribution):
    """Angles y in radians given a Gaussian eta = kappa (cos, sin); batch shape (..., N).

    A mixture of von Mises distributions, and not one itself: it may be skewed, have longer tails, or two modes. `cdf`,
    `icdf` and `credible_arc` are the mixture's, to 1e-9.

    Args:
        latent_mean: m (..., 2, N).
        latent_covariance: V (..., 2, 2, N), positive semidefinite.
        log_density: maps (value, mean, covariance) to log p(value) (..., N).
        validate_args: as in torch.distributions.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    support = constraints.real

    def __init__(
        self,
        latent_mean: Tensor,
        latent_covariance: Tensor,
        log_density: Callable[[Tensor, Tensor, Tensor], Tensor],
        validate_args: bool | None = None,
    ) -> None:
        self.latent_mean, self.latent_covariance, self._log_density = latent_mean, latent_covariance, log_density
        super().__init__(latent_mean.select(-2, 0).shape, validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: CompoundVonMises | None = None) -> CompoundVonMises:
        """The same distribution, repeated over `batch_shape`."""
        new = self._get_checked_instance(CompoundVonMises, _instance)
        *batch, size = batch_shape
        new.latent_mean = self.latent_mean.expand(*batch, 2, size)
        new.latent_covariance = self.latent_covariance.expand(*batch, 2, 2, size)
        new._log_density = self._log_density
        super(CompoundVonMises, new).__init__(torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def resultant(self) -> Tensor:
        """(E[cos y], E[sin y]) (..., 2, N)."""
        return self._resultant().to(self.latent_mean.dtype)

    @property
    def mean(self) -> Tensor:
        """The mean direction in (-pi, pi]."""
        east, north = self.resultant.unbind(-2)
        return torch.atan2(north, east)

    @property
    def resultant_length(self) -> Tensor:
        """R = |E[e^{iy}]|, between 0 (no direction) and 1."""
        return self._length().to(self.latent_mean.dtype)

    @property
    def variance(self) -> Tensor:
        """The circular variance 1 - R."""
        return (1 - self._length()).to(self.latent_mean.dtype)

    @property
    def concentration(self) -> Tensor:
        """That of the von Mises distribution with the same resultant."""
        return concentration_of(self._length()).to(self.latent_mean.dtype)

    def _resultant(self) -> Tensor:
        """Return (E[cos y], E[sin y]) in float64: 1 - R and what follows from it cancel in float32."""
        return compound_resultant(self.latent_mean.double(), self.latent_covariance.double())

    def _length(self) -> Tensor:
        return torch.hypot(*self._resultant().unbind(-2))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density in radians; value and result broadcast with the batch shape."""
        if self._validate_args:
            self._validate_sample(value)
        return self._log_density(value, *in_every(value.shape, self.latent_mean, self.latent_covariance))

    def _make_table(self) -> AngleTable:
        def density(angle: Tensor) -> Tensor:  # (M, ..., N)
            latents = in_every(angle.shape, self.latent_mean.double(), self.latent_covariance.double())
            return log_compound_density(angle, *latents).exp()

        with torch.no_grad():
            return AngleTable.of(density, self.mean, concentration_of(self._length()))

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws in (-pi, pi] of shape sample_shape + batch_shape."""
        with torch.no_grad():
            f = draw_latents(self.latent_mean, self.latent_covariance, torch.Size(sample_shape), generator)
            first, second = f.unbind(-2)
            return VonMises(torch.atan2(second, first), torch.hypot(first, second)).sample(generator=generator)


def concentration_of(length: Tensor) -> Tensor:
    """Return the kappa with I1(kappa) / I0(kappa) = length, by Newton's method [Best & Fisher 1981]."""
    with torch.no_grad():
        R = length.double()
        middle, large = -0.4 + 1.39 * R + 0.43 / (1 - R), 1 / (R * (1 - R) * (3 - R))
        kappa = torch.where(R < 0.53, 2 * R + R**3 + 5 * R**5 / 6, torch.where(R < 0.85, middle, large))
        for _ in range(_NEWTON_STEPS):
            kappa = _newton(kappa, R)
    return _newton(kappa, length.double()).to(length.dtype)


def _newton(kappa: Tensor, length: Tensor) -> Tensor:
    squared = kappa.square()
    return kappa - (kappa * log_i0_derivative(squared, 1) - length) / resultant_slope(squared)
