r"""The predictive distribution of an angle: a von Mises whose natural parameter is Gaussian in the plane.

p(y) = int VM(y | eta) N(eta | m, V) d eta,     E[e^{iy}] = E[A(|eta|) e^{i arg eta}] = R e^{i loc}
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import constraints

from gpext.distributions.circular.angle_table import AngleTable
from gpext.distributions.circular.distribution import CircularDistribution
from gpext.distributions.circular.von_mises import VonMises
from gpext.distributions.circular.von_mises_mixture import compound_resultant, log_compound_density
from gpext.distributions.predictive.correlated_latents import in_every
from gpext.distributions.predictive.latent_mixture import LatentMixture
from gpext.special import log_i0_derivative, resultant_slope

_NEWTON_STEPS = 6


class CompoundVonMises(LatentMixture, CircularDistribution):
    """Angles y in radians given a Gaussian eta = kappa (cos, sin); batch shape (..., N).

    A mixture of von Mises distributions, and not one itself: it may be skewed, have longer tails, or two modes. `cdf`,
    `icdf` and `credible_arc` are the mixture's, to 1e-9.

    Args:
        latent_mean: m (..., 2, N).
        latent_covariance: V (..., 2, 2, N), positive semidefinite.
        log_density: maps (value, mean, covariance) to log p(value) (..., N).
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import VonMisesLikelihood
        >>> f = MultivariateNormal(torch.tensor([[5.0], [0.0]]).double(), torch.eye(1).double().expand(2, 1, 1))
        >>> VonMisesLikelihood()(f).mean.cos()  # the direction (1, 0)
        tensor([1.], dtype=torch.float64)
    """

    support = constraints.real

    def __init__(
        self,
        latent_mean: Tensor,
        latent_covariance: Tensor,
        log_density: Callable[[Tensor, Tensor, Tensor], Tensor],
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(latent_mean, latent_covariance, log_density, validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: LatentMixture | None = None) -> LatentMixture:
        """The same distribution, repeated over `batch_shape`."""
        new = super().expand(batch_shape, _instance)
        new.__dict__.pop("_table", None)  # has the shape of the old batch
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
            first, second = self._draw_latents(sample_shape, generator).unbind(-2)
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
