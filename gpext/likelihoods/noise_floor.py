r"""A least noise for additive noise on targets: noise far below their spread is none, and has no digits left.

Where a latent function may pass through every target, the evidence rises (or stays) as the noise falls to zero, and
nothing but rounding stops it: the posterior needs diag(noise)^-1 beside K^-1, and loses its digits one after another.
The floor of the squared scale is

    max(sqrt(eps), 10 eps') s^2,     s = the median of |y_i - median(y)|

with eps of float64, in which posteriors are computed, and eps' of the data's own dtype, in which K is. A scale of 1e-4
of the spread leaves half of the digits on either side. Medians, for a floor that outliers do not raise.
"""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from gpytorch.constraints import GreaterThan, Positive
from torch import Tensor
from torch.nn.functional import softplus

from gpext.likelihoods.composed import ComposedLikelihood
from gpext.likelihoods.matern32 import Matern32Likelihood

_NOISY = (gpytorch.likelihoods.StudentTLikelihood, gpytorch.likelihoods.LaplaceLikelihood, Matern32Likelihood)


class NoiseFloor(GreaterThan):
    """The constraint that a :class:`gpext.models.LatentGP` puts in the place of `Positive` on the noise: a least value.

    Its bound is a part of the state dict, as that of `Positive` is: values that were saved with the one are the same
    under the other once their bounds are loaded with them. Any other constraint, such as
    `noise_constraint=gpytorch.constraints.GreaterThan(0.0)`, stays as it is.

    Example:
        >>> NoiseFloor(1e-4).lower_bound
        tensor(1.0000e-04)
    """


def noise_floor(targets: Tensor) -> float:
    """Return the least squared scale of noise that can be distinguished from none, given targets (..., N).

    Of a batch it is the smallest; of constant targets it belongs to their size instead of their spread.
    """
    values = targets.detach().double()
    median = values.median(-1, keepdim=True).values
    distances = (values - median).abs()
    spread = distances.median(-1).values
    apart = distances.where(distances > 0, torch.inf).amin(-1)  # where more than half are equal
    size = median.squeeze(-1).abs()
    spread = torch.where(spread > 0, spread, torch.where(apart.isfinite(), apart, torch.where(size > 0, size, 1.0)))
    eps = torch.finfo(targets.dtype).eps if targets.is_floating_point() else torch.finfo(torch.get_default_dtype()).eps
    share = max(torch.finfo(torch.float64).eps ** 0.5, 10 * eps)
    return share * float(spread.square().min())


@torch.no_grad()
def bound_noise(likelihood: Any, targets: Tensor) -> None:
    """Keep the noise of a robust likelihood from falling below the floor of these targets; its value stays.

    Nothing happens to a noise that is not trained, that lies below the floor already, or that has a constraint other
    than `Positive`. Of several data sets the lowest floor counts; of a composed likelihood, those inside are bounded.
    """
    if isinstance(likelihood, ComposedLikelihood):
        for part in likelihood.observed(targets, targets.new_zeros(likelihood.datum_shape(targets))):
            bound_noise(part.likelihood, part.targets)
        return
    if not isinstance(likelihood, _NOISY) or not likelihood.raw_noise.requires_grad:
        return
    present, floor, noise = likelihood.raw_noise_constraint, noise_floor(targets), likelihood.noise.clone()
    if isinstance(present, NoiseFloor):
        floor = min(floor, float(present.lower_bound))
    elif type(present) is not Positive or not torch.equal(noise, softplus(likelihood.raw_noise)):
        return
    if not bool((noise > 2 * floor).all()):
        return
    constraint = NoiseFloor(floor).to(likelihood.raw_noise)
    likelihood.register_constraint("raw_noise", constraint, replace=True)
    likelihood.raw_noise.copy_(constraint.inverse_transform(noise))


def at_noise_floor(constraint: Any, value: Tensor) -> bool:
    """Return whether all of a noise has come down to its floor."""
    return isinstance(constraint, NoiseFloor) and bool((value < 2 * constraint.lower_bound).all())
