r"""A three-parameter model of log phi with closed-form saddle points and approximate quantiles.

    -(log phi)'(S) = first X^-power,    X = 1 + (S - at) / theta

matches the first three cumulants of w at the point `at`, and is exact for powers, stable laws and inverse Gaussians
[Hougaard 1986]. It only steers the numerical inversion (contour, first guess), which needs no precision of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.distributions.laplace_inversion.radial_transform import RadialTransform

_LEAST_SKEWNESS = 1.02  # kappa_1 kappa_3 / kappa_2^2 of the model; at least 2 for generalised gamma convolutions
_STEPS = 5  # of Newton for a first guess
_FLAT = 0.05  # signed roots below which the correction is taken at its limit


@dataclass(frozen=True)
class SaddleModel:
    """The model above; fields broadcast."""

    at: Tensor
    first: Tensor
    theta: Tensor
    power: Tensor

    @classmethod
    def matched(cls, transform: RadialTransform, at: Tensor) -> SaddleModel:
        """The model with the first three cumulants at this point."""
        first, second, third = transform.cumulants(at)
        skewness = (first * third / second.square()).clamp_min(_LEAST_SKEWNESS)
        power = 1 / (skewness - 1)
        return cls(at, first, power * first / second, power)

    @classmethod
    def reference(cls, transform: RadialTransform, r: Tensor) -> SaddleModel:
        """The model matched where log phi has fallen from r by about one."""
        return cls.matched(transform, transform.fallen(r, 1.0))

    def at_places(self, index: Tensor | slice) -> SaddleModel:
        """The models of some of the data."""
        return SaddleModel(*(t[index] for t in (self.at, self.first, self.theta, self.power)))

    def vertex(self, w: Tensor, clearance: float) -> Tensor:
        """The saddle point of w; but stay right of the origin and of the model's singularity by clearance / w."""
        ratio = torch.maximum((w / self.first) ** (-1 / self.power), clearance / (w * self.theta))
        return torch.maximum((self.at - self.theta) + self.theta * ratio, clearance / w)

    def cumulants(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first two cumulants at s, and kappa_3 / (6 kappa_2)."""
        ratio = 1 + (s - self.at) / self.theta
        first = self.first * ratio**-self.power
        return first, first * self.power / (self.theta * ratio), (self.power + 1) / (6 * self.theta * ratio)

    def log_quantile(self, score: Tensor, r: Tensor) -> Tensor:
        r"""Approximate log w with P(W <= w | r) = Phi(score), by the signed root of the deviance.

        With I = -[(S - r) w + log phi(S) - log phi(r)] at the saddle point S of w, R = +-sqrt(2 I) and
        V = (S - r) sqrt(kappa_2): score = R + log(V / R) / R up to the third order [Barndorff-Nielsen 1986].
        """
        start = (1 + (r - self.at) / self.theta).clamp_min(1e-12)
        rest = 1 - self.power
        scale, gentle = self.first * self.theta, rest.abs() < 1e-6
        safe = torch.where(gentle, 1.0, rest)
        limit = (self.power + 1) / (6 * (scale * self.power * start**rest).sqrt())  # skewness / 6
        x = torch.zeros_like(score + start)
        for _ in range(_STEPS):
            log_ratio = x - start.log()
            lift = torch.where(gentle, log_ratio, torch.expm1(safe * log_ratio) / safe)
            ratio = x.exp()
            deviance = start**rest * lift - ratio ** (1 - self.power) * -torch.expm1(-log_ratio)
            root = -torch.sign(log_ratio) * (2 * scale * deviance.clamp_min(0)).sqrt()
            slope = -torch.expm1(-log_ratio) * (scale * self.power * ratio**rest).sqrt()  # V, at -root's side
            flat = root.abs() < _FLAT
            safe_root = torch.where(flat, 1.0, root)
            corrected = root + torch.where(flat, limit, (-slope / safe_root).log() / safe_root)
            speed = (scale * self.power * ratio**rest).sqrt() * torch.where(flat, 1.0, -slope / safe_root)
            x = x + ((corrected - score) / speed).clamp(-2, 2)
        return self.first.log() - self.power * x
