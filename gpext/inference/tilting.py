r"""The tilted distributions of EP, N(f | m, v) p(y | f)^eta / Z^, for any likelihood of one latent [JVV11 Eq. 15]."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gpytorch
import torch
from torch import Tensor

from gpext.bounds import conditional_log_prob, num_latents
from gpext.quadrature import TiltedMoments, student_t_tilted_moments, tilted_moments

_TEMPER = 10.0

Tilt = Callable[[Tensor, Tensor], TiltedMoments]
"""Mean and variance (..., N) of the cavities -> the moments of the tilted distributions."""


def tilt(likelihood: Any, targets: Tensor, power: float, *, widening: float = 1.0) -> Tilt:
    """Return the rule that fits the likelihood: a Gaussian's, a Student-t's, or adaptive quadrature.

    Args:
        likelihood: of one latent.
        targets: (..., N).
        power: eta in (0, 1].
        widening: how many times larger a Student-t's squared scale is taken to be, and how many times smaller the log
            density of any other likelihood.

    Raises:
        TypeError: the likelihood has several latents a datum.
    """
    if num_latents(likelihood) is not None:
        raise TypeError(
            f"EP takes one latent function per datum; {type(likelihood).__qualname__} has {likelihood.num_latents}. "
            "Use gpext.inference.KL()."
        )
    if isinstance(likelihood, gpytorch.likelihoods.GaussianLikelihood):
        return lambda mean, variance: _gaussian(targets, mean, variance, widening * likelihood.noise.double(), power)
    if isinstance(likelihood, gpytorch.likelihoods.StudentTLikelihood):

        def student_t(mean: Tensor, variance: Tensor) -> TiltedMoments:
            about = student_t_tilted_moments(
                targets - mean, variance, likelihood.deg_free.double(), widening * likelihood.noise.double(), power
            )
            return TiltedMoments(about.log_normalizer, mean + about.mean, about.variance, about.third, about.fourth)

        return student_t
    knots = getattr(likelihood, "_knots", lambda _: None)(targets)

    def adaptive(mean: Tensor, variance: Tensor) -> TiltedMoments:
        return tilted_moments(
            lambda f: (power / widening) * conditional_log_prob(likelihood, targets, f), mean, variance, knots=knots
        )

    return adaptive


def widest_needed(likelihood: Any, gap: Tensor) -> float:
    """Return the widening that makes the likelihood as wide as the typical gap between target and prior mean."""
    if not isinstance(likelihood, gpytorch.likelihoods.StudentTLikelihood):
        return _TEMPER
    with torch.no_grad():
        return max(float((gap.square().median(-1).values / likelihood.noise.squeeze(-1)).max()), _TEMPER)


def _gaussian(targets: Tensor, mean: Tensor, variance: Tensor, noise: Tensor, power: float) -> TiltedMoments:
    offset, total = targets - mean, variance + noise / power
    share = variance / total
    log_z = -0.5 * (offset.square() / total + (2 * math.pi * total).log())
    log_z = log_z + 0.5 * (2 * math.pi * noise / power).log() - 0.5 * power * (2 * math.pi * noise).log()
    v = noise / power * share
    return TiltedMoments(log_z, mean + share * offset, v, torch.zeros_like(v), 3 * v.square())
