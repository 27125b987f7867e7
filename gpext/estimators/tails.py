r"""A Student-t fitted to standardised residuals: whether heavier tails than Gaussian ones are worth another training.

    z_i = (y_i - m_i) / sqrt(v_i + sigma_i^2)    of leave-one-out predictions N(m_i, v_i) of f and the noise

For each of some degrees of freedom nu the scale s is that of largest likelihood, by the EM iterations of a Gaussian
scale mixture [Liu & Rubin 1995]:

    u_i = (nu + 1) / (nu + z_i^2 / s^2),    s^2 = mean(u_i z_i^2)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.stats import norm, t

_DEGREES = np.array([2.2, 2.6, 3.2, 4.0, 5.5, 8.0, 12.0, 20.0])
_ITERATIONS = 30


class Tails(NamedTuple):
    """The Student-t of largest likelihood.

    Attributes:
        deg_free: nu, one of eight between 2.2 and 20.
        scale: s.
        gain: of the mean log density over the Gaussian of mean zero and largest likelihood.
    """

    deg_free: float
    scale: float
    gain: float


def fit_tails(residuals: np.ndarray, weights: np.ndarray) -> Tails:
    """Return the Student-t with location zero that fits residuals (n,) with weights (n,) best.

    Those that are not finite count as missing; if all others are zero, there is no scale, and no gain.
    """
    known = np.isfinite(residuals)
    residuals, weights = residuals[known], weights[known]
    if not residuals.any():
        return Tails(float(_DEGREES[-1]), 0.0, 0.0)
    degrees = _DEGREES[:, None]
    weights = weights / weights.sum()
    squares = residuals**2
    variance = np.full_like(degrees, squares @ weights)
    gaussian = float(norm.logpdf(residuals, scale=variance[0] ** 0.5) @ weights)
    for _ in range(_ITERATIONS):
        variance = ((degrees + 1) / (degrees + squares / variance) * squares) @ weights[:, None]
    values = t.logpdf(residuals, degrees, scale=variance**0.5) @ weights
    best = int(values.argmax())
    return Tails(float(_DEGREES[best]), float(variance[best, 0] ** 0.5), float(values[best]) - gaussian)
