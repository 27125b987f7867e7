"""The Bayesian support vector machine: the hinge loss as a pseudo-likelihood [GWO20 Tab. 1]."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid

from gpext.augmentations import Augmentation, ExponentialRadial
from gpext.distributions import Bernoulli
from gpext.likelihoods.checks import check_binary, floating
from gpext.likelihoods.super_gaussian import AugmentedLikelihood
from gpext.quadrature import log_expectation


class HingeBernoulli(Bernoulli):
    """The classes given f under the hinge loss: sampled and averaged as the normalised Bernoulli.

    `log_prob` is the pseudo-likelihood -2 max(0, 1 - s f), s = 2y - 1, which does not sum to one over the classes; the
    Bayesian SVM is defined by it.
    """

    def __init__(self, function_samples: Tensor) -> None:
        self.function_samples = function_samples
        super().__init__(logits=_hinge(function_samples) - _hinge(-function_samples))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the unnormalised log pseudo-likelihood of value in {0, 1}."""
        return _hinge((2 * value - 1) * self.function_samples)

    def expand(self, batch_shape: torch.Size, _instance: Distribution | None = None) -> HingeBernoulli:
        """Return the distribution expanded to batch_shape."""
        return HingeBernoulli(self.function_samples.expand(batch_shape))


class BayesianSVMLikelihood(AugmentedLikelihood):
    r"""The pseudo-likelihood :math:`L(y|f) = e^{-2 \max(0, 1 - s f)}` with s = 2y - 1, targets in {0, 1}.

    :math:`L = e^{-1} e^{s f} e^{-|1 - s f|}`: g = s, h = 1 - s f, phi(r) = exp(-sqrt r) [Polson & Scott 2011]. It is no
    normalised density in y: `expected_log_prob`, `log_marginal` and inference use L; the predictive distribution
    normalises it over the two classes, p(y=1|f) = L(1|f) / (L(0|f) + L(1|f)).

    Example:
        >>> import torch
        >>> likelihood = BayesianSVMLikelihood()
        >>> likelihood.log_prob(torch.tensor([1.0, 1.0]), torch.tensor([2.0, -1.0]))
        tensor([ 0., -4.])
    """

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target is neither 0 nor 1."""
        check_binary(targets)

    def unchecked_augmentation(self, targets: Tensor) -> Augmentation:
        """Return the augmentation of targets in the support."""
        sign = 2 * floating(targets) - 1
        one = torch.ones((), dtype=sign.dtype, device=sign.device)
        return Augmentation(ExponentialRadial(), -one, potential=sign, center=sign, curvature=one, offset=0 * one)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> HingeBernoulli:
        """Return the classes given f; its log_prob is the pseudo-likelihood."""
        return HingeBernoulli(function_samples)

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Bernoulli:
        """Return the Bernoulli distribution of y at the marginals of function_dist; both tails keep full precision."""
        mean = function_dist.mean
        knots = torch.stack([torch.full_like(mean, -1.0), torch.ones_like(mean)])  # the two hinges

        def log_prob(sign: int) -> Tensor:
            def given(f: Tensor) -> Tensor:
                return logsigmoid(sign * HingeBernoulli(f).logits)

            return log_expectation(given, mean, function_dist.variance, knots=knots)

        return Bernoulli(logits=log_prob(1) - log_prob(-1))


def _hinge(margin: Tensor) -> Tensor:
    return -2 * torch.relu(1 - margin)
