"""Matern-3/2 noise: a density shaped like the Matern-3/2 kernel, flat at the top, exponential in the tails [GWO20]."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.priors import Prior
from torch import Tensor

from gpext.augmentations import Augmentation, Matern32Radial
from gpext.distributions import Matern32
from gpext.likelihoods.super_gaussian import AdditiveNoiseLikelihood


class Matern32Likelihood(AdditiveNoiseLikelihood):
    r""":math:`p(y|f) = \frac{\sqrt3}{4\rho} (1 + \sqrt3 |y-f|/\rho) e^{-\sqrt3 |y-f|/\rho}` [GWO20 Tab. 1].

    Args:
        batch_shape: shape of a batch of noise parameters.
        noise_prior: prior of `noise`.
        noise_constraint: constraint of `noise`; positive by default.

    The parameter `noise` is the squared scale rho^2, named as in gpytorch's robust likelihoods.

    Example:
        >>> import torch
        >>> likelihood = Matern32Likelihood()
        >>> likelihood.noise = 1.0
        >>> likelihood.log_prob(torch.zeros(1), torch.zeros(1)).exp().detach()  # sqrt(3) / 4
        tensor([0.4330])
    """

    def __init__(
        self,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008  gpytorch's own signature; a Size is immutable
        noise_prior: Prior | None = None,
        noise_constraint: Interval | None = None,
    ) -> None:
        super().__init__()
        self.register_parameter("raw_noise", torch.nn.Parameter(torch.zeros(*batch_shape, 1)))
        if noise_prior is not None:
            self.register_prior("noise_prior", noise_prior, _get_noise, _set_noise)
        self.register_constraint("raw_noise", noise_constraint if noise_constraint is not None else Positive())

    @property
    def noise(self) -> Tensor:
        """The squared scale rho^2, shape (*batch_shape, 1)."""
        return self.raw_noise_constraint.transform(self.raw_noise)

    @noise.setter
    def noise(self, value: Tensor | float) -> None:
        value = torch.as_tensor(value, dtype=self.raw_noise.dtype, device=self.raw_noise.device)
        self.initialize(raw_noise=self.raw_noise_constraint.inverse_transform(value))

    def expansion_point(self, targets: Tensor) -> Tensor:
        """Return where Taylor expands: the target, the mode of p(y | f), where its curvature is positive."""
        return targets

    def unchecked_augmentation(self, targets: Tensor) -> Augmentation:
        """Return the augmentation of targets in the support."""
        noise = self.noise
        zero = torch.zeros_like(noise)
        log_constant = 0.5 * math.log(3) - math.log(4) - 0.5 * noise.log()
        return Augmentation(Matern32Radial(), log_constant, zero, targets, curvature=1 / noise, offset=zero)

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        c = (targets - f).abs() * (3 / self.noise).sqrt()
        # |c| has no derivative at 0, but log(1 + c) - c = -c^2 / 2 + O(c^3) has two
        exponent = torch.where(c < 1e-8, -0.5 * (targets - f).square() * 3 / self.noise, torch.log1p(c) - c)
        return 0.5 * math.log(3) - math.log(4) - 0.5 * self.noise.log() + exponent

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Matern32:
        """Return p(y | f)."""
        return Matern32(loc=function_samples, scale=self.noise.sqrt())


def _get_noise(module: Matern32Likelihood) -> Tensor:
    return module.noise


def _set_noise(module: Matern32Likelihood, value: Tensor) -> None:
    module.noise = value
