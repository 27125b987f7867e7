"""Special functions to full precision, with their derivatives, where torch has none or loses digits."""

from gpext.special.bessel import log_i0, log_i0_derivative, log_i0e, resultant_slope
from gpext.special.gamma import (
    exp_remainder,
    log_gamma,
    log_poisson,
    polygamma,
    stirling_remainder,
    stirling_remainder_slope,
)
from gpext.special.normal import hazard, log_mills_ratio, log_ndtr

__all__ = [
    "exp_remainder",
    "hazard",
    "log_gamma",
    "log_i0",
    "log_i0_derivative",
    "log_i0e",
    "log_mills_ratio",
    "log_ndtr",
    "log_poisson",
    "polygamma",
    "resultant_slope",
    "stirling_remainder",
    "stirling_remainder_slope",
]
