"""The Bernoulli likelihood with logit link: Polya-Gamma augmentation [GWO20 Tab. 1]."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpext.augmentations import Augmentation, SechRadial
from gpext.bounds import SoftplusTerms
from gpext.distributions import Bernoulli
from gpext.likelihoods.checks import check_binary, floating
from gpext.likelihoods.latent import STRIP
from gpext.likelihoods.super_gaussian import AugmentedLikelihood


class BernoulliLogitLikelihood(AugmentedLikelihood):
    r""":math:`p(y=1|f) = 1 / (1 + e^{-f})`, targets in {0, 1}, no parameters.

    With s = 2y - 1: :math:`\sigma(s f) = e^{s f/2} / (2 \cosh(f/2))`, so g = s/2, h = f/2 and phi(r) = 1/cosh(sqrt r).
    gpytorch's BernoulliLikelihood has the probit link instead.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> f = MultivariateNormal(torch.tensor([0.0, 2.0]), torch.eye(2))
        >>> BernoulliLogitLikelihood()(f).probs  # the logistic function, averaged over f
        tensor([0.5000, 0.8445])
    """

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target is neither 0 nor 1."""
        check_binary(targets)

    def unchecked_augmentation(self, targets: Tensor) -> Augmentation:
        """Return the augmentation of targets in the support."""
        targets = floating(targets)
        one = torch.ones((), dtype=torch.float64, device=targets.device)  # scalars take on the dtype of the latents
        return Augmentation(
            SechRadial(one), -math.log(2) * one, targets - 0.5, center=0 * one, curvature=0.25 * one, offset=0 * one
        )

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        return torch.nn.functional.logsigmoid((2 * floating(targets) - 1) * f)

    def log_prob_slopes(self, targets: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return the derivatives of log p(y | f) in f, :math:`s \sigma(-s f)` and :math:`-\sigma(f) \sigma(-f)`."""
        sign = 2 * targets.to(f) - 1
        return sign * torch.sigmoid(-sign * f), -torch.sigmoid(f) * torch.sigmoid(-f)

    def strip(self, targets: Tensor) -> Tensor:
        """Return half the width of a strip in which the logistic function has no pole: those are at +- i pi."""
        return torch.full_like(floating(targets), STRIP)

    def softplus_terms(self, targets: Tensor) -> SoftplusTerms:
        """Return log p(y | f) = y f - softplus(f)."""
        self.check(targets)
        targets = floating(targets)
        one = torch.ones_like(targets)
        return SoftplusTerms(0 * one, targets, one.unsqueeze(0), one.unsqueeze(0), 0 * one.unsqueeze(0))

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Bernoulli:
        """Return p(y | f)."""
        return Bernoulli(logits=function_samples)

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Bernoulli:
        """Return the Bernoulli distribution of y at the marginals of function_dist; both tails keep full precision."""
        zeros = torch.zeros_like(function_dist.mean)
        log_probs = [
            self.log_density(label, function_dist.mean, function_dist.variance) for label in (zeros, zeros + 1)
        ]
        return Bernoulli(logits=log_probs[1] - log_probs[0])
