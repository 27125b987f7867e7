"""Optional methods of a likelihood, beyond gpytorch's `forward`, that bounds and inference rules call if it has them.

gpext's own likelihoods inherit most of these from `gpext.likelihoods.LatentLikelihood`; one of your own, or of another
package, takes part by having the method. Targets are (..., N), or what the likelihood takes; latent values, means and
variances are (..., N), or (..., D, N) for D latents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from gpext.bounds.bound import MultinomialTerms, SoftplusTerms
    from gpext.quadrature import JointMoments


@runtime_checkable
class HasLogProb(Protocol):
    """Evaluates its own density."""

    def log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(y | f) (..., N), twice differentiable in f."""


@runtime_checkable
class HasLogProbSlopes(Protocol):
    """Has closed-form derivatives of its own log density, which autograd takes several times as long to find."""

    def log_prob_slopes(self, targets: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the second derivative of log p(y | f) in f (..., N), in the graph of f."""


@runtime_checkable
class HasExpectedLogDensity(Protocol):
    """Integrates its own log density."""

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] (..., N) under independent N(mean, variance)."""


@runtime_checkable
class HasLogDensity(Protocol):
    """Integrates its own density."""

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, variance) df (..., N)."""


@runtime_checkable
class HasJointLogDensity(Protocol):
    """Integrates its own density over correlated latents."""

    def joint_log_density(self, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, covariance) df (..., N), covariance (..., D, D, N)."""


@runtime_checkable
class HasJointTiltedMoments(Protocol):
    """Has the tilted moments of several latents, which EP needs."""

    def joint_tilted_moments(self, targets: Tensor, mean: Tensor, covariance: Tensor, power: float) -> JointMoments:
        """Return the moments of N(f | mean, covariance) p(y | f)^power, covariance (..., D, D, N)."""


@runtime_checkable
class HasSoftplusTerms(Protocol):
    """Has a log density that is a sum of log(1 + e^x), as binary and ordinal logit likelihoods do."""

    def softplus_terms(self, targets: Tensor) -> SoftplusTerms:
        """Return the terms of the sum."""


@runtime_checkable
class HasMultinomialTerms(Protocol):
    """Has a log density in log sum_k exp(f_k), as the multinomial likelihood does."""

    def multinomial_terms(self, targets: Tensor) -> MultinomialTerms:
        """Return counts, their total and the constant."""


@runtime_checkable
class HasCurvature(Protocol):
    """Says its second derivatives in D latents, which Laplace and Taylor need."""

    def curvature(self, targets: Tensor, f: Tensor) -> Any:
        """Return a `gpext.likelihoods.curvature.Curvature` or `BlockCurvature`: log p(y | f) to second order at f."""


@runtime_checkable
class HasKnots(Protocol):
    """Knows latent values about which the integrand may be narrow."""

    def knots(self, targets: Tensor) -> Tensor | None:
        """Return latent values (J, ..., N) where p(y | f) has a kink or a narrow peak, or None."""


@runtime_checkable
class HasExpansionPoint(Protocol):
    """Knows where Taylor's expansion is best made."""

    def expansion_point(self, targets: Tensor) -> Tensor:
        """Return f (..., N) or (..., D, N) about which log p(y | f) is expanded."""


@runtime_checkable
class HasNumLatents(Protocol):
    """Has D latent functions a datum, along an axis of their own, or None for one without."""

    num_latents: int | None
