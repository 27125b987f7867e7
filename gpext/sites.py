r"""Gaussian sites: the hinge between a likelihood and a posterior.

Every deterministic inference rule replaces the likelihood factor of a datum by

    t(f) = exp(shift * f - precision * f^2 / 2)

with `shift` = nu and `precision` = tau of the papers. This is the only convention in the package. The precision may be
negative (EP, Laplace); nothing is stored as mean and variance, and nothing is clamped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GaussianSites:
    """One unnormalised Gaussian factor per datum.

    Args:
        shift: nu, (..., N).
        precision: tau, (..., N), of any sign.

    Raises:
        ValueError: the two differ in shape, dtype or device.
    """

    shift: Tensor  # (..., N)
    precision: Tensor  # (..., N)

    def __post_init__(self) -> None:
        if self.shift.shape != self.precision.shape:
            raise ValueError(
                f"shift and precision must have one shape; got {tuple(self.shift.shape)} and "
                f"{tuple(self.precision.shape)}."
            )
        if self.shift.dtype != self.precision.dtype or self.shift.device != self.precision.device:
            raise ValueError(
                f"shift and precision must share dtype and device; got {self.shift.dtype} on {self.shift.device} and "
                f"{self.precision.dtype} on {self.precision.device}."
            )

    def expected_log(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log t(f)] under N(mean, variance), (..., N)."""
        return self.shift * mean - 0.5 * self.precision * (mean.square() + variance)

    def lerp(self, other: GaussianSites, rate: float | Tensor) -> GaussianSites:
        """Return the sites a fraction `rate` of the way to `other`, in natural parameters: a damped update."""
        return GaussianSites(
            torch.lerp(self.shift, other.shift, rate), torch.lerp(self.precision, other.precision, rate)
        )

    def choose(self, other: GaussianSites, which: Tensor) -> GaussianSites:
        """Return the other sites where `which` holds, broadcastable with (..., N), and these elsewhere."""
        return GaussianSites(
            torch.where(which, other.shift, self.shift), torch.where(which, other.precision, self.precision)
        )

    def motion_to(self, other: GaussianSites, mean: Tensor, variance: Tensor) -> Tensor:
        """Return how far other sites would move the marginals N(mean, variance), were each alone replaced (..., N).

        The larger of the mean's motion in standard deviations and the relative motion of the variance.
        """
        precision = other.precision - self.precision
        shift = other.shift - self.shift - precision * mean
        return torch.maximum(shift.abs() * variance.sqrt(), precision.abs() * variance)

    def detach(self) -> GaussianSites:
        """Return the same sites outside the autograd graph."""
        return GaussianSites(self.shift.detach(), self.precision.detach())

    def to(self, dtype: torch.dtype) -> GaussianSites:
        """Return the sites in another dtype."""
        return GaussianSites(self.shift.to(dtype), self.precision.to(dtype))
