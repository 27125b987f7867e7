r"""The tilted distributions of EP, N(f | m, v) p(y | f)^eta / Z^, for any likelihood of one latent [JVV11 Eq. 15]."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import gpytorch
import torch
from torch import Tensor

from gpext.bounds import conditional_log_prob, has_density_of
from gpext.bounds.contracts import HasKnots
from gpext.likelihoods.laplace import LaplaceLikelihood
from gpext.likelihoods.latent import LatentLikelihood, strip_of
from gpext.likelihoods.pairwise import PairwiseProbitLikelihood
from gpext.likelihoods.student_t import StudentTLikelihood
from gpext.quadrature import (
    TiltedMoments,
    analytic_tilted_moments,
    gaussian_tilted_moments,
    laplace_tilted_moments,
    probit_tilted_moments,
    student_t_tilted_moments,
    tilted_moments,
)

_GAUSSIAN = (gpytorch.likelihoods.GaussianLikelihood,)
_PROBIT = (gpytorch.likelihoods.BernoulliLikelihood,)
_PAIRWISE = (PairwiseProbitLikelihood,)
_STUDENT_T = (gpytorch.likelihoods.StudentTLikelihood, StudentTLikelihood)
_LAPLACE = (gpytorch.likelihoods.LaplaceLikelihood, LaplaceLikelihood)

_TEMPER = 10.0

Tilt = Callable[[Tensor, Tensor], TiltedMoments]
"""Mean and variance (..., N) of the cavities -> the moments of the tilted distributions."""


def tilt(likelihood: Any, targets: Tensor, power: float, *, widening: float = 1.0) -> Tilt:
    """Return the rule that fits the likelihood, a closed form if there is one, else adaptive quadrature.

    Gaussian and Laplace noise have one at every power, the probit at power 1; Student-t noise has a smooth rule. A
    subclass with a density of its own gets none of them.

    Args:
        likelihood: of one latent.
        targets: (..., N).
        power: eta in (0, 1].
        widening: how many times larger the squared scale of Gaussian and Student-t noise is taken to be, and how many
            times smaller the log density of any other likelihood.
    """
    rate = power / widening
    if has_density_of(likelihood, *_GAUSSIAN):
        return lambda mean, variance: _shifted(
            mean, gaussian_tilted_moments(targets - mean, variance, widening * likelihood.noise.double(), power)
        )
    if has_density_of(likelihood, *_STUDENT_T):

        def student_t(mean: Tensor, variance: Tensor) -> TiltedMoments:
            noise = widening * likelihood.noise.double()
            about = student_t_tilted_moments(targets - mean, variance, likelihood.deg_free.double(), noise, power)
            return _shifted(mean, about)

        return student_t
    if has_density_of(likelihood, *_LAPLACE):
        return lambda mean, variance: _shifted(
            mean, laplace_tilted_moments(targets - mean, variance, likelihood.noise.double(), rate)
        )
    if has_density_of(likelihood, *_PROBIT) and rate == 1:
        return lambda mean, variance: probit_tilted_moments(2 * targets.to(mean) - 1, mean, variance)
    if has_density_of(likelihood, *_PAIRWISE) and rate == 1:
        return lambda mean, variance: _pairwise(2 * targets.to(mean) - 1, mean, variance)
    strip = strip_of(likelihood, targets) if isinstance(likelihood, LatentLikelihood) else None
    if strip is not None:
        return partial(analytic_tilted_moments, likelihood.part(targets, rate), strip=strip)

    knots = likelihood.knots(targets) if isinstance(likelihood, HasKnots) else None

    def adaptive(mean: Tensor, variance: Tensor) -> TiltedMoments:
        return tilted_moments(
            lambda f: rate * conditional_log_prob(likelihood, targets, f), mean, variance, knots=knots
        )

    return adaptive


def _pairwise(sign: Tensor, mean: Tensor, variance: Tensor) -> TiltedMoments:
    """Return the moments of N(f | mean, variance) Phi(sign f / sqrt 2), from those of f / sqrt 2."""
    of = probit_tilted_moments(sign, mean / math.sqrt(2), 0.5 * variance)
    return TiltedMoments(of.log_normalizer, math.sqrt(2) * of.mean, 2 * of.variance, 2**1.5 * of.third, 4 * of.fourth)


def _shifted(mean: Tensor, about: TiltedMoments) -> TiltedMoments:
    """Return the moments of f, given those of f - mean."""
    return TiltedMoments(about.log_normalizer, mean + about.mean, about.variance, about.third, about.fourth)


def widest_needed(likelihood: Any, targets: Tensor, mean: Tensor, variance: Tensor) -> float:
    """Return the widening with which no datum is far out: the scale is twice what the prior makes of the largest gap.

    Args:
        likelihood: of one latent.
        targets: what it takes.
        mean: of the prior (..., N).
        variance: of the prior (..., N).
    """
    if not has_density_of(likelihood, *_STUDENT_T):
        return _TEMPER
    with torch.no_grad():
        largest = ((targets - mean).square() + variance).amax(-1)
        return max(4 * float((largest / likelihood.noise.squeeze(-1)).max()), _TEMPER)
