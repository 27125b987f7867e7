"""Laplace noise: robust regression with exponential tails [GWO20 Tab. 1]."""

from __future__ import annotations

import math
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal, base_distributions
from torch import Tensor
from torch.distributions import Distribution

from gpext.augmentations import Augmentation, ExponentialRadial
from gpext.distributions import CompoundLaplace
from gpext.distributions.predictive.normal_plus_laplace import log_density
from gpext.likelihoods.super_gaussian import AdditiveNoiseLikelihood


class LaplaceLikelihood(AdditiveNoiseLikelihood, gpytorch.likelihoods.LaplaceLikelihood):
    r""":math:`p(y|f) = \frac{1}{2b} e^{-|y-f|/b}`; the class of the same name in gpytorch with accurate integrals.

    Parameters, constraints, priors and `state_dict` are gpytorch's: `noise` is the squared scale b^2.

    Example:
        >>> import torch
        >>> likelihood = LaplaceLikelihood()
        >>> likelihood.noise = 0.04  # the squared scale
        >>> likelihood(torch.zeros(1)).scale.detach()
        tensor([0.2000])
    """

    def unchecked_augmentation(self, targets: Tensor) -> Augmentation:
        """Return the augmentation of targets in the support."""
        noise = self.noise
        zero = torch.zeros_like(noise)
        log_constant = -0.5 * noise.log() - math.log(2)
        return Augmentation(ExponentialRadial(), log_constant, zero, targets, curvature=noise.reciprocal(), offset=zero)

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, variance) df, elementwise, in closed form."""
        self.check(targets)
        return log_density(targets - mean, variance, self.noise.sqrt())

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> CompoundLaplace:
        """Return p(y) at the marginals of function_dist: mean, variance, log_prob, cdf, icdf, quantile, sample."""
        return CompoundLaplace(self.forward, function_dist.mean, function_dist.variance)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f)."""
        return base_distributions.Laplace(loc=function_samples, scale=self.noise.sqrt())
