r"""The predictive distribution of a datum with several latents, from p(y | f) as a distribution object.

p(y) = int p(y | f) N(f | m, V) df,     E[y] = E[E(y | f)],     Var[y] = E[Var(y | f) + (E(y | f) - E[y])^2]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints

from gpext.distributions.drawing import drawn_from
from gpext.distributions.predictive.correlated_latents import in_every
from gpext.distributions.predictive.latent_mixture import LatentMixture, total_variance
from gpext.distributions.predictive.newton_quantiles import check_probability
from gpext.distributions.predictive.quantile_search import integer_quantile, real_quantile
from gpext.distributions.with_cdf import with_cdf
from gpext.quadrature import in_parts, joint_expectation

_TOLERANCE = 1e-9  # of a distribution function, that of the integrals


class CompoundJointDistribution(LatentMixture):
    """Targets of any kind, batch shape (..., N), event shape () or (C,).

    Args:
        conditional: maps f (..., D, N) to p(y | f), with batch shape (..., N).
        latent_mean: m (..., D, N).
        latent_covariance: V (..., D, D, N), positive semidefinite.
        log_density: maps (value, mean, covariance) to log p(value) (..., N).
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> def conditional(f):  # a mean and a log scale
        ...     return torch.distributions.Normal(f[..., 0, :], f[..., 1, :].exp())
        >>> def log_density(y, mean, covariance):
        ...     return conditional(mean).log_prob(y)  # of latents that are known
        >>> y = CompoundJointDistribution(conditional, torch.zeros(2, 1), torch.zeros(2, 2, 1), log_density)
        >>> y.mean, y.log_prob(torch.zeros(1))
        (tensor([0.]), tensor([-0.9189]))
    """

    def __init__(
        self,
        conditional: Callable[[Tensor], torch.distributions.Distribution],
        latent_mean: Tensor,
        latent_covariance: Tensor,
        log_density: Callable[[Tensor, Tensor, Tensor], Tensor],
        validate_args: bool | None = None,
    ) -> None:
        self.conditional = conditional
        at_mean, shape = conditional(latent_mean), latent_mean.select(-2, 0).shape
        if at_mean.batch_shape != shape or len(at_mean.event_shape) > 1:
            raise ValueError(
                f"conditional must map f of shape {tuple(latent_mean.shape)} to a distribution of batch shape "
                f"{tuple(shape)} and event shape () or (C,); got batch shape {tuple(at_mean.batch_shape)} and event "
                f"shape {tuple(at_mean.event_shape)}."
            )
        super().__init__(latent_mean, latent_covariance, log_density, at_mean.event_shape, validate_args)

    @property
    def support(self) -> constraints.Constraint | None:
        """The support of the conditional."""
        return self.conditional(self.latent_mean).support

    @property
    def mean(self) -> Tensor:
        """E[y], batch_shape + event_shape."""
        expected = partial(joint_expectation, lambda f: self._moments(f)[0])
        return self._of_event(in_parts(expected, self.latent_mean, self.latent_covariance))

    @property
    def variance(self) -> Tensor:
        """Var[y], of each entry of an event, batch_shape + event_shape."""
        return self._of_event(total_variance(self._moments, self.latent_mean, self.latent_covariance))

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value) = E[P(Y <= value | f)] of numbers, to 1e-9; no gradient.

        Raises:
            NotImplementedError: Y is a vector, or the conditional has no cdf.
        """
        self._refuse_vectors()
        if self._validate_args:
            self._validate_sample(value)
        with torch.no_grad():
            return self._cdf(*self._with_latents(value))

    def _refuse_vectors(self) -> None:
        if self.event_shape:
            raise NotImplementedError(
                f"a distribution of vectors, event shape {tuple(self.event_shape)}, has neither cdf nor quantiles."
            )

    def _cdf(self, value: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        def integral(m: Tensor, V: Tensor, y: Tensor) -> Tensor:
            return joint_expectation(lambda f: with_cdf(self.conditional(f)).cdf(y), m, V)

        try:
            return in_parts(integral, mean, covariance, value).clamp(max=1)  # 1 + 1e-10 where the weights sum to that
        except NotImplementedError as error:
            name = type(self.conditional(mean)).__name__
            raise NotImplementedError(
                f"{name}, p(y | f) as `conditional` has it, has no cdf, and so p(y) has neither cdf nor quantiles; "
                "gpext.distributions has some with one."
            ) from error

    def icdf(self, value: Tensor | float) -> Tensor:
        """The quantile, to 1e-9 in probability; for integers the smallest k with cdf(k) >= value. No gradient.

        Raises:
            NotImplementedError: as :meth:`cdf`.
            ValueError: a probability is not strictly between 0 and 1.
        """
        self._refuse_vectors()
        with torch.no_grad():
            q = check_probability(value, self.latent_mean.double())
            q = q.expand(torch.broadcast_shapes(q.shape, self.batch_shape))
            mean, covariance = in_every(q.shape, self.latent_mean.double(), self.latent_covariance.double())
            given = self.conditional(mean)

            def cdf(y: Tensor) -> Tensor:
                return self._cdf(y, mean, covariance)

            if given.support is not None and given.support.is_discrete:
                return integer_quantile(cdf, q, given.support, tolerance=_TOLERANCE).to(self.latent_mean.dtype)
            if given.support is None:
                raise NotImplementedError("the conditional does not declare its support.")
            centre = torch.where(given.mean.isfinite(), given.mean, biject_to(given.support)(torch.zeros_like(q)))
            y = real_quantile(
                cdf,
                lambda y: self._log_density(y, mean, covariance),
                q,
                given.support,
                centre,
                torch.ones_like(q),
                tolerance=_TOLERANCE,
            )
            return y.to(self.latent_mean.dtype)

    def quantile(self, q: Tensor | float) -> Tensor:
        """The same as `icdf`."""
        return self.icdf(q)

    def _moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return E(y | f) and Var(y | f) (..., C, N); C = 1 of numbers."""
        given = self.conditional(f)
        if self.event_shape:
            return given.mean.mT, given.variance.mT
        return given.mean.unsqueeze(-2), given.variance.unsqueeze(-2)

    def _of_event(self, values: Tensor) -> Tensor:
        """Return (..., C, N) as batch_shape + event_shape."""
        return values.mT if self.event_shape else values.squeeze(-2)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape + event_shape; from torch's global generator by default."""
        with torch.no_grad(), drawn_from(generator):
            return self.conditional(self._draw_latents(sample_shape, None)).sample()
