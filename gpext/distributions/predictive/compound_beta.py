r"""The predictive distribution of a proportion: a Beta whose parameters are functions of two correlated Gaussians.

p(y) = int Beta(y | theta(f)) N(f | m, V) df,      P(Y <= y) = E[I_y(theta_1, theta_2)]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import SigmoidTransform, TransformedDistribution, constraints

from gpext.distributions.predictive.compound_dirichlet import CompoundDirichlet
from gpext.distributions.predictive.latent_mixture import LatentMixture
from gpext.distributions.predictive.newton_quantiles import check_probability, quantile_between
from gpext.distributions.with_cdf import Beta
from gpext.quadrature import in_parts, joint_expectation

_TOLERANCE = 1e-9  # of a quantile, in probability: that of the integrals
_LOWEST, _HIGHEST = -700.0, 36.0  # logits of proportions that float64 can tell from 0 and 1


class CompoundBeta(LatentMixture):
    """Proportions y in (0, 1), batch shape (..., N): the first share of a :class:`CompoundDirichlet` of two.

    Args:
        latent_mean: m (..., 2, N).
        latent_covariance: V (..., 2, 2, N), positive semidefinite.
        log_concentration: log theta, maps f (..., 2, N) to the logarithms (..., 2, N) of the parameters.
        log_density: maps (value, mean, covariance) to log p(value) (..., N).
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import BetaLikelihood
        >>> f = MultivariateNormal(torch.zeros(2, 1).double(), torch.eye(1).double().expand(2, 1, 1))
        >>> BetaLikelihood()(f).mean
        tensor([0.5000], dtype=torch.float64)
    """

    support = constraints.unit_interval

    def __init__(
        self,
        latent_mean: Tensor,
        latent_covariance: Tensor,
        log_concentration: Callable[[Tensor], Tensor],
        log_density: Callable[[Tensor, Tensor, Tensor], Tensor],
        validate_args: bool | None = None,
    ) -> None:
        self._log_concentration = log_concentration
        super().__init__(latent_mean, latent_covariance, log_density, validate_args=validate_args)

    @property
    def _shares(self) -> CompoundDirichlet:
        """(y, 1 - y)."""
        latents = self.latent_mean, self.latent_covariance
        return CompoundDirichlet(*latents, self._log_concentration, self._log_density, False)

    @property
    def mean(self) -> Tensor:
        """E[y] (..., N)."""
        return self._shares.mean[..., 0]

    @property
    def variance(self) -> Tensor:
        """Var[y] (..., N)."""
        return self._shares.variance[..., 0]

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value), to 1e-9; no gradient."""
        if self._validate_args:
            self._validate_sample(value)
        value, mean, covariance = self._with_latents(value)

        def integral(m: Tensor, V: Tensor, y: Tensor) -> Tensor:
            return joint_expectation(lambda f: Beta(*self._log_concentration(f).exp().unbind(-2)).cdf(y), m, V)

        with torch.no_grad():
            return in_parts(integral, mean, covariance, value)

    def icdf(self, value: Tensor | float) -> Tensor:
        """The quantile, to 1e-9 in probability, by Newton's method on logit y inside a bracket; no gradient.

        Raises:
            ValueError: a probability is not strictly between 0 and 1.
        """
        dtype = self.latent_mean.dtype
        with torch.no_grad():
            q = check_probability(value, self.latent_mean.double())
            exact = CompoundBeta(
                self.latent_mean.double(),
                self.latent_covariance.double(),
                self._log_concentration,
                self._log_density,
                False,
            )
            logit = SigmoidTransform().inv
            on_line = TransformedDistribution(exact, [logit], validate_args=False)
            q = q.expand(torch.broadcast_shapes(q.shape, self.batch_shape))
            middle = logit(exact._with_its_moments().icdf(q))
            low, high = _bracket(on_line, q, middle)
            u = quantile_between(on_line, q, low, high, tolerance=_TOLERANCE)
            return logit.inv(u).to(dtype)

    def quantile(self, q: Tensor | float) -> Tensor:
        """The same as `icdf`."""
        return self.icdf(q)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape."""
        return self._shares.sample(sample_shape, generator=generator)[..., 0]

    def _with_its_moments(self) -> Beta:
        """Return the Beta distribution with the same mean and variance."""
        mean = self.mean
        total = mean * (1 - mean) / self.variance - 1
        return Beta(mean * total, (1 - mean) * total)


def _bracket(distribution: TransformedDistribution, q: Tensor, middle: Tensor) -> tuple[Tensor, Tensor]:
    """Return ends around the quantiles; of those beyond what float64 holds both are the last number."""
    reach = 0.5
    middle = middle.clamp(_LOWEST + reach, _HIGHEST - reach)
    low, high = middle - reach, middle + reach
    while True:
        above, below = distribution.cdf(low) > q, distribution.cdf(high) < q
        if reach > -_LOWEST or not bool((above | below).any()):
            return torch.where(below, high, low), torch.where(above, low, high)
        reach = 2 * reach
        low = torch.where(above, middle - reach, low).clamp_min(_LOWEST)
        high = torch.where(below, middle + reach, high).clamp_max(_HIGHEST)
