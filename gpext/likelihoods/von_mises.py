r"""The von Mises likelihood: angles whose direction and concentration two latent functions say [Cha13 Sec. 4.2].

    p(y | eta) = exp(eta' T(y)) / (2 pi I0(kappa)),   T(y) = (cos y, sin y),   kappa = |eta|

    u = T - c1 eta,   U = c1 I + c2 / kappa^2 eta eta' = A' I + (c1 - A') t t' / kappa^2,    t = (-eta_2, eta_1)

c1 = A / kappa and A' = c1 + c2 = dA/dkappa with A = I1 / I0. The second form of U has no negative term: c1 and c2
cancel where kappa is large.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Distribution

from gpext.callers import warn_caller
from gpext.distributions import CompoundVonMises, VonMises
from gpext.distributions.circular.von_mises_mixture import expected_log_i0, log_compound_density
from gpext.likelihoods.checks import floating_like
from gpext.likelihoods.curvature import Curvature, diagonal_blocks
from gpext.likelihoods.joint import JointLikelihood
from gpext.special import log_i0, log_i0_derivative, log_i0e, resultant_slope


class AngleWarning(UserWarning):
    """Angles beyond a full turn, which may be degrees."""


class VonMisesLikelihood(JointLikelihood):
    """Angles in radians (..., N) from two latent functions (..., 2, N): a vector that points where the angle may be.

    Its length is the concentration kappa; everything is accurate for kappa from 0 to 1e6 and beyond. The prior of two
    independent latents with one kernel and zero means prefers no direction.

    Example:
        >>> import torch
        >>> f = torch.tensor([[3.0], [0.0]])
        >>> VonMisesLikelihood()(f).concentration
        tensor([3.])
    """

    num_latents = 2

    def __init__(self) -> None:
        super().__init__()
        self._has_warned = False

    def check_support(self, targets: Tensor) -> None:
        """Warn once of angles that look like degrees."""
        if self._has_warned or not bool((targets.abs() > 2 * math.pi).any()):
            return
        self._has_warned = True
        index = tuple((targets.abs() > 2 * math.pi).nonzero()[0].tolist())
        warn_caller(
            f"angles are in radians, and {targets[index].item():g} at index {index[0] if len(index) == 1 else index} "
            "is more than a full turn. If these are degrees convert them with torch.deg2rad(y); else nothing is wrong: "
            "they count as what is left of them after whole turns.",
            AngleWarning,
        )

    def expansion_point(self, targets: Tensor) -> Tensor:
        """Return T(y) (..., 2, N), the observed direction, where Taylor expands."""
        return torch.stack([targets.cos(), targets.sin()], -2)

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Log density; at large kappa by eta'T - kappa = -|eta - kappa T|^2 / (2 kappa)."""
        T, squared = self.expansion_point(floating_like(targets, f)), f.square().sum(-2)
        far = squared > 1
        s = torch.where(far, squared, 1)
        kappa = s.sqrt()
        at_far = -(f - kappa.unsqueeze(-2) * T).square().sum(-2) / (2 * kappa) - log_i0e(s)
        at_near = (f * T).sum(-2) - log_i0(torch.where(far, 0, squared))
        return torch.where(far, at_far, at_near) - math.log(2 * math.pi)

    def curvature(self, targets: Tensor, f: Tensor) -> Curvature:
        """Return log p(y | f) to second order at f (..., 2, N).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        squared = f.square().sum(-2)
        gradient = self.expansion_point(floating_like(targets, f)) - log_i0_derivative(squared, 1).unsqueeze(-2) * f
        precision = resultant_slope(squared).unsqueeze(-2).expand_as(f)
        across = torch.stack([-f[..., 1, :], f[..., 0, :]], -2)
        coupling = -log_i0_derivative(squared, 2)
        return Curvature(self.unchecked_log_prob(targets, f), gradient, precision, coupling, across, precision)

    def joint_log_density(self, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, covariance) df (..., N), an integral in one dimension, to 1e-9.

        Args:
            targets: angles (..., N).
            mean: (..., 2, N).
            covariance: of the latents of each datum (..., 2, 2, N).

        Raises:
            TypeError, ValueError: as :meth:`check`; a covariance is not positive semidefinite.
        """
        self.check(targets)
        return log_compound_density(targets, mean, covariance)

    def joint_expected_log_density(self, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, covariance), (..., N), in one dimension; as :meth:`joint_log_density`.

        Raises:
            TypeError, ValueError: as :meth:`joint_log_density`.
        """
        self.check(targets)
        aligned = (mean * self.expansion_point(floating_like(targets, mean))).sum(-2)
        return aligned - expected_log_i0(mean, covariance) - math.log(2 * math.pi)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, variance), (..., N), for independent latents (..., 2, N).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        return self.joint_expected_log_density(targets, mean, diagonal_blocks(variance))

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f) for f (..., 2, N), a :class:`gpext.distributions.VonMises` with batch shape (..., N)."""
        first, second = function_samples.unbind(-2)
        return VonMises(torch.atan2(second, first), torch.hypot(first, second))

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y), a :class:`gpext.distributions.CompoundVonMises`: mean direction, concentration, log_prob."""
        return CompoundVonMises(*self._blocks(function_dist), self.joint_log_density)
