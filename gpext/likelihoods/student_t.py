"""Student-t noise: robust regression with polynomial tails [GWO20 Tab. 1, JVV11]."""

from __future__ import annotations

import math
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpext.augmentations import Augmentation, StudentTRadial
from gpext.distributions import CompoundStudentT, StudentT
from gpext.likelihoods.latent import STRIP
from gpext.likelihoods.super_gaussian import AdditiveNoiseLikelihood


class StudentTLikelihood(AdditiveNoiseLikelihood, gpytorch.likelihoods.StudentTLikelihood):
    r"""y = f + s t with t Student-t distributed; the class of the same name in gpytorch with accurate integrals.

    :math:`p(y|f) = \frac{\Gamma((\nu+1)/2)}{\Gamma(\nu/2)\sqrt{\nu\pi}\,s} (1 + (y-f)^2 / (\nu s^2))^{-(\nu+1)/2}`

    Parameters, constraints, priors and `state_dict` are gpytorch's: `noise` is the squared scale s^2 and `deg_free` is
    nu, above 2 unless you pass `deg_free_constraint`. The predictive variance is infinite for nu <= 2, its mean
    undefined for nu <= 1.

    Example:
        >>> import torch
        >>> likelihood = StudentTLikelihood()
        >>> likelihood.deg_free, likelihood.noise = 4.0, 0.25
        >>> likelihood(torch.zeros(1)).variance.detach()  # 0.25 * 4 / (4 - 2)
        tensor([0.5000])
    """

    def expansion_point(self, targets: Tensor) -> Tensor:
        """Return where Taylor expands: the target, the mode of p(y | f), where its curvature is positive."""
        return targets

    def strip(self, targets: Tensor) -> Tensor:
        """Return half the width of the strip in which p(y | f) is analytic: it has a pole at y +- i s sqrt(nu)."""
        width = self.noise.sqrt() * (0.8 * self.deg_free.sqrt()).clamp(max=STRIP)
        return width.detach().expand(targets.shape)

    def log_prob_slopes(self, targets: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return the derivatives of log p(y | f) in f, r = y - f: of -(nu + 1) log(nu s^2 + r^2) / 2.

        :math:`(\nu + 1) r / (\nu s^2 + r^2)` and :math:`(\nu + 1) (r^2 - \nu s^2) / (\nu s^2 + r^2)^2`.
        """
        nu, residual = self.deg_free.to(f), targets.to(f) - f
        spread = nu * self.noise.to(f)
        total = spread + residual.square()
        rate = (nu + 1) / total
        return rate * residual, rate * (1 - 2 * spread / total)  # an outlier's square may overflow

    def unchecked_augmentation(self, targets: Tensor) -> Augmentation:
        """Return the augmentation of targets in the support."""
        nu, noise = self.deg_free, self.noise
        log_constant = (
            torch.lgamma(0.5 * (nu + 1)) - torch.lgamma(0.5 * nu) - 0.5 * (nu.log() + math.log(math.pi) + noise.log())
        )
        zero = torch.zeros_like(noise)
        return Augmentation(StudentTRadial(nu), log_constant, zero, center=targets, curvature=1 / noise, offset=zero)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> StudentT:
        """Return p(y | f)."""
        return StudentT(df=self.deg_free, loc=function_samples, scale=self.noise.sqrt())

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> CompoundStudentT:
        """Return p(y) at the marginals of function_dist: mean, variance, log_prob, cdf, icdf, quantile, sample."""
        return CompoundStudentT(self.forward, function_dist.mean, function_dist.variance)
