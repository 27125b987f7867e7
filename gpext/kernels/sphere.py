"""Places on the Earth as points in space, for kernels of their distance and for nearest neighbours."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpext.checks import check_finite, check_tensor


def sphere_points(places: Tensor, *, radius: float = 1.0) -> Tensor:
    r"""Return the points (..., 3) of places on a sphere, whose straight distance is the chord between them.

        |p - p'| = 2 R sin(angle / 2)

    A Matern kernel, or any other that is valid in space, is valid on the sphere as a function of the chord, and smooth
    at the date line and at the poles; of the great-circle distance most are not positive definite [Guinness & Fuentes
    2016]. The nearest places by chord are the nearest on the sphere, so that
    ``LatentGP(sphere_points(x), ..., neighbours=20)`` takes them. A lengthscale is in units of the radius.

    Args:
        places: longitude and latitude in degrees (..., 2).
        radius: R, 6371 for the Earth in kilometres.

    Raises:
        TypeError: not a tensor, or not of floating point.
        ValueError: not two columns, not finite, or a latitude beyond 90 degrees.

    Example:
        >>> import torch
        >>> from gpext.kernels import sphere_points
        >>> sphere_points(torch.tensor([[0.0, 0.0], [60.0, 0.0]])).round(decimals=3)
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.8660, 0.0000]])
    """
    check_tensor("places", places)
    if not places.is_floating_point():
        raise TypeError(f"places must be of floating point; got {places.dtype}. Convert them with places.double().")
    check_finite("places", places)
    if places.size(-1) != 2:
        raise ValueError(f"expected longitude and latitude, (..., 2); got shape {tuple(places.shape)}.")
    longitude, latitude = (math.pi / 180 * places).unbind(-1)
    if bool((places[..., 1].abs() > 90).any()):
        largest = float(places.detach()[..., 1].abs().max())
        raise ValueError(
            f"a latitude is at most 90 degrees; got {largest:g}. The columns are longitude, then latitude."
        )
    flat = latitude.cos()
    return radius * torch.stack([flat * longitude.cos(), flat * longitude.sin(), latitude.sin()], -1)
