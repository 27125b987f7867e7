r"""Super-Gaussian likelihoods: the shared gpytorch shell, and the one built from phi alone [GWO20 Eq. 4].

    p(y | f) = C e^{g(y) f} phi(h^2),     h^2 = alpha(y) - beta(y) f + gamma(y) f^2

A subclass defines the :class:`~gpext.augmentations.Augmentation` of its targets and the distribution p(y | f);
expectations, marginals, predictions and conjugate inference follow from these two.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Distribution

from gpext.augmentations import Augmentation, AutomaticRadial, check_completely_monotone
from gpext.distributions import AdditiveNoisePredictive, RadialNoise, log_normalizer, with_cdf
from gpext.likelihoods.checks import floating
from gpext.likelihoods.latent import LatentLikelihood, strip_of
from gpext.quadrature import log_expectation


class AugmentedLikelihood(LatentLikelihood):
    """A likelihood of one latent with a scale-mixture augmentation: the base of every super-Gaussian likelihood.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import BernoulliLogitLikelihood
        >>> isinstance(BernoulliLogitLikelihood(), AugmentedLikelihood)
        True
        >>> BernoulliLogitLikelihood().augmentation(torch.ones(2)).radial.mean(torch.zeros(2))  # E[w] at c = 0
        tensor([0.5000, 0.5000])
    """

    def augmentation(self, targets: Tensor) -> Augmentation:
        """Return the terms of the augmented likelihood for targets (..., N).

        Raises:
            TypeError: the targets are half precision.
            ValueError: targets are not finite or outside the support.
        """
        self.check(targets)
        return self.unchecked_augmentation(targets)

    @abstractmethod
    def unchecked_augmentation(self, targets: Tensor) -> Augmentation:
        """Return the augmentation of targets that :meth:`check` has passed; what a subclass overrides."""

    def augmented_bound(self, observations: Tensor, function_dist: MultivariateNormal) -> Tensor:
        """Return the augmented lower bound on :meth:`expected_log_prob`, (..., N) [GWO20 App. A.4].

        Raises:
            TypeError, ValueError: as :meth:`expected_log_prob`.
        """
        mean, variance = self._fitting_marginals(observations, function_dist)
        return self._sum_tasks(self.augmentation(observations).bound(mean, variance), function_dist)

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        return self.unchecked_augmentation(targets).log_prob(f)

    def knots(self, targets: Tensor) -> Tensor:
        """Return where h^2 is least: phi may have a kink there."""
        centre = self.unchecked_augmentation(targets).center.detach()
        return floating(centre).expand(torch.broadcast_shapes(centre.shape, self.datum_shape(targets))).unsqueeze(0)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, variance), elementwise: :meth:`expected_log_prob` from plain tensors."""
        return self.augmentation(targets).expected_log_prob(mean, variance)

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, variance) df, elementwise: :meth:`log_marginal` from plain tensors."""
        self.check(targets)
        if strip_of(self, targets) is None:
            return self.unchecked_augmentation(targets).log_marginal(mean, variance)
        return self._in_chunks(log_expectation, targets, mean, variance)  # by equal steps, a twentieth of the time


class AdditiveNoiseLikelihood(AugmentedLikelihood):
    """y = f + noise with a symmetric density: its predictive distribution is a location mixture."""

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y) at the marginals of function_dist: mean, variance, log_prob, cdf, icdf, quantile, sample."""
        return AdditiveNoisePredictive(
            self.forward, function_dist.mean, function_dist.variance, log_prob=self.log_density
        )


class SuperGaussianLikelihood(AdditiveNoiseLikelihood):
    r"""A likelihood from a radial function alone; automatic differentiation and numerical inversion do the rest.

    :math:`p(y|f) = C e^{g(y) f} \varphi(\alpha(y) - \beta(y) f + \gamma(y) f^2)` [GWO20 Eqs. 4, 5]. By default
    :math:`h^2 = (y - f)^2`: additive noise with density C phi((y - f)^2), normalised numerically.

    Args:
        phi: completely monotone with phi(0) = 1, elementwise on a tensor of any shape; for Gibbs sampling also on
            complex128 tensors (no clamp, maximum or softplus). An `nn.Module` is registered, so its parameters are
            learned with the others.
        log_phi: log phi, where phi would underflow (e.g. exp(-sqrt r) beyond r = 5e5). Exactly one of the two.
        potential: g(y); zero by default.
        alpha, beta, gamma: the quadratic, functions of y; all three or none.
        log_constant: log C(y), function of y. Required with a potential or a quadratic of your own.
        conditional: f -> p(y | f) as a torch distribution (one of `pyro.distributions` to be sampled in Pyro). Needed
            for :meth:`forward` and predictions if the quadratic or the potential are your own; additive noise has its
            own.

    Raises:
        ValueError: phi is not completely monotone or phi(0) is not 1 (the message names the order and the point); the
            noise density cannot be normalised; the terms are incomplete. From inference and predictions:
            :class:`gpext.distributions.InversionError`, where phi has underflowed and log_phi would not.

    Example:
        >>> import torch
        >>> likelihood = SuperGaussianLikelihood(phi=lambda r: torch.exp(-torch.sqrt(1 + r) + 1))
        >>> likelihood.augmentation(torch.zeros(1)).radial.mean(torch.ones(1))
        tensor([0.3536])
    """

    def __init__(
        self,
        phi: Callable[[Tensor], Tensor] | None = None,
        *,
        log_phi: Callable[[Tensor], Tensor] | None = None,
        potential: Callable[[Tensor], Tensor] | None = None,
        alpha: Callable[[Tensor], Tensor] | None = None,
        beta: Callable[[Tensor], Tensor] | None = None,
        gamma: Callable[[Tensor], Tensor] | None = None,
        log_constant: Callable[[Tensor], Tensor] | None = None,
        conditional: Callable[[Tensor], Distribution] | None = None,
    ) -> None:
        super().__init__()
        given = [term is not None for term in (alpha, beta, gamma)]
        if any(given) and not all(given):
            raise ValueError("alpha, beta and gamma belong together: give all three or none of them.")
        self._additive = not any(given) and potential is None
        if not self._additive and log_constant is None:
            raise ValueError(
                "with your own potential or quadratic the normalising constant is not known: give log_constant, a "
                "function of the targets (lambda y: torch.zeros_like(y) for an unnormalised one)."
            )
        self.phi, self.log_phi = phi, log_phi
        self._radial = AutomaticRadial(phi, log_phi=log_phi)
        check_completely_monotone(self._radial.evaluate)
        self._potential, self._log_constant, self._conditional = potential, log_constant, conditional
        self._alpha, self._beta, self._gamma = alpha, beta, gamma
        self._fixed_constant: Tensor | None = None
        if self._additive and log_constant is None:
            constant = log_normalizer(self._radial.evaluate, torch.ones((), dtype=torch.float64))
            if not any(True for _ in self.parameters()):  # nothing to learn inside phi: once is enough
                self._fixed_constant = constant.detach()

    def _normalizer(self, like: Tensor) -> Tensor:
        if self._fixed_constant is not None:
            return self._fixed_constant.to(like.device)  # a scalar: it takes on the dtype of what it is added to
        one = torch.ones((), dtype=torch.float64, device=like.device)
        return log_normalizer(self._radial.evaluate, one).to(like)

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if user-defined alpha, beta and gamma are not valid for a target."""
        if not self._additive:
            self.unchecked_augmentation(targets)

    def unchecked_augmentation(self, targets: Tensor) -> Augmentation:
        """Return the augmentation of targets in the support.

        Raises:
            ValueError: user-defined alpha, beta and gamma give an h^2 below zero.
        """
        targets = floating(targets)
        zero, one = torch.zeros_like(targets), torch.ones_like(targets)
        potential = self._potential(targets) if self._potential else zero
        log_constant = self._log_constant(targets) if self._log_constant else self._normalizer(targets)
        if self._alpha and self._beta and self._gamma:
            quadratic = (self._alpha(targets), self._beta(targets), self._gamma(targets))
            return Augmentation.from_quadratic(self._radial, log_constant, potential, *quadratic)
        return Augmentation(self._radial, log_constant, potential, center=targets, curvature=one, offset=zero)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f).

        Raises:
            ValueError: the quadratic or the potential are your own and no `conditional` was given.
        """
        if self._conditional is not None:
            return with_cdf(self._conditional(function_samples))
        if not self._additive:
            raise ValueError(
                "p(y | f) as a distribution is not known for your own potential or quadratic: give `conditional`, a "
                "function of f that returns a torch distribution."
            )
        return RadialNoise(function_samples, self._radial.evaluate, 1.0)

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y) at the marginals of function_dist as a distribution object."""
        if self._additive:
            return super().marginal(function_dist)
        return LatentLikelihood.marginal(self, function_dist)
