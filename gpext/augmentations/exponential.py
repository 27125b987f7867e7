"""phi(r) = exp(-sqrt(r)): Laplace noise and the hinge loss, mixed by w ~ Levy(1/2) [GWO20 Tab. 1]."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gpext.augmentations.radial import RadialFunction, distance, folded_mean
from gpext.distributions import InverseGaussian


@dataclass(frozen=True)
class ExponentialRadial(RadialFunction):
    """The radial function of a Laplace density of unit scale; the tilted w is inverse Gaussian, mean 1/(2c).

    Example:
        >>> import torch
        >>> ExponentialRadial().mean(torch.tensor([2.0]))  # 1 / (2c)
        tensor([0.3536])
    """

    def log_phi(self, r: Tensor) -> Tensor:
        """Return -sqrt(r)."""
        return -distance(r)

    def mean(self, r: Tensor) -> Tensor:
        """Return 1 / (2 sqrt(r)), which is infinite at r = 0: p(w) has no mean."""
        return 0.5 * r.rsqrt()

    def mixing(self, r: Tensor) -> InverseGaussian:
        """Return the inverse Gaussian of mean 1 / (2 sqrt r) and shape 1/2; Levy at r = 0."""
        return InverseGaussian(self.mean(r), 0.5)

    def mixing_of_power(self, r: Tensor, power: Tensor) -> InverseGaussian:
        """Return the inverse Gaussian of mean power / (2 sqrt r) and shape power^2 / 2: exp(-power sqrt r)."""
        return InverseGaussian(power * self.mean(r), 0.5 * power.square())

    def expected_log_phi(self, gap: Tensor, variance: Tensor) -> Tensor:
        """Return -E|z| for z ~ N(gap, variance)."""
        return -folded_mean(gap, variance)
