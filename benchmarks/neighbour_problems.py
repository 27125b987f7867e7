r"""Data in the plane for the benchmarks of nearest-neighbour priors: California, and generated fields.

The fields have the Matern-3/2 covariance with lengthscale l, :math:`(1 + \sqrt 3 r / l) e^{-\sqrt 3 r / l}`, at
cells of a grid, by circulant embedding [Dietrich and Newsam 1997]: the covariance on a torus of twice the side is
diagonal in the basis of the discrete Fourier transform, and with its eigenvalues L,

    f = Re F (L / N)^(1/2) (e + i e'),    e, e' standard normal

has it exactly, whatever the number of data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor

from benchmarks.datasets import raw_table
from benchmarks.gpboost_families import Data, Family, log_normal_mean
from gpext import likelihoods

Array = Any


@dataclass(frozen=True)
class Field:
    """Data of a likelihood about a field: the family, and the values that they are drawn with."""

    family: Family
    mean: float  # of the latent field
    variance: float
    parameters: dict[str, float]  # of gpext's likelihood


def random_field(size: int, lengthscale: float, seed: int, cells: int = 1024) -> tuple[Array, Array]:
    """Return inputs (size, 2) at random places of a grid of cells^2 on the unit square, and a field (size,)."""
    rng = np.random.default_rng(seed)
    side = np.arange(2 * cells)
    side = np.minimum(side, 2 * cells - side) / cells
    r = 3**0.5 * np.hypot(side[:, None], side) / lengthscale
    eigenvalues = np.fft.fft2((1 + r) * np.exp(-r)).real
    if eigenvalues.min() < -1e-9 * eigenvalues.max():
        raise ValueError(f"no circulant embedding on twice the square for a lengthscale of {lengthscale}; take less.")
    noise = rng.standard_normal((2, *r.shape))
    f = np.fft.fft2(np.sqrt(eigenvalues.clip(0) / r.size) * (noise[0] + 1j * noise[1])).real[:cells, :cells]
    chosen = rng.choice(cells**2, size, replace=False)
    rows, columns = np.divmod(chosen, cells)
    return (np.stack([rows, columns], -1) + 0.5) / cells, f[rows, columns]


def data_of_field(field: Field, size: int, size_of_test: int, lengthscale: float, seed: int) -> Data:
    """Return observations at `size` inputs and at `size_of_test` others."""
    x, unit = random_field(size + size_of_test, lengthscale, seed)
    f = field.mean + field.variance**0.5 * unit
    y = field.family.draw(np.random.default_rng([seed, 1]), f, f).astype(float)
    return Data(x[:size], y[:size], x[size:], y[size:])


def california(size: int, size_of_test: int = 5640) -> Data:
    """Return longitude and latitude in degrees, and whether the value of the houses is above the median.

    Up to 15,000 data are to train on, of the other 5640 the first `size_of_test` to test.
    """
    table = raw_table("california")
    columns = [0, 1] if table.features[0, 0] < 0 else [7, 6]  # of the original by scikit-learn, at the end
    x, y = table.features[:, columns], (table.targets > np.median(table.targets)).astype(float)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).numpy()
    train, test = order[:size], order[15000 : 15000 + size_of_test]
    return Data(x[train], y[train], x[test], y[test])


def _bernoulli(rng: np.random.Generator, f: Array, g: Array) -> Array:
    return rng.uniform(size=len(f)) < special.expit(f)


def _bernoulli_log_prob(y: Array, f: Array, p: dict[str, float]) -> Array:
    return special.log_expit((2 * y - 1) * f)


def _bernoulli_mean(mean: Array, variance: Array, p: dict[str, float]) -> Array:
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    return weights / weights.sum() @ special.expit(mean + np.sqrt(variance) * nodes[:, None])


def _our_bernoulli(y: Array) -> tuple[Any, Tensor, Callable[[], dict[str, float]]]:
    return likelihoods.BernoulliLogitLikelihood().double(), torch.from_numpy(y), dict


def _poisson(rng: np.random.Generator, f: Array, g: Array) -> Array:
    return rng.poisson(np.exp(f))


def _poisson_log_prob(y: Array, f: Array, p: dict[str, float]) -> Array:
    return stats.poisson.logpmf(y, np.exp(f))


def _our_poisson(y: Array) -> tuple[Any, Tensor, Callable[[], dict[str, float]]]:
    return likelihoods.PoissonLikelihood().double(), torch.from_numpy(y), dict


def _student_t(rng: np.random.Generator, f: Array, g: Array) -> Array:
    return f + 0.3 * rng.standard_t(4, len(f))


def _student_t_log_prob(y: Array, f: Array, p: dict[str, float]) -> Array:
    return stats.t.logpdf(y, p["df"], f, p["scale"])


def _student_t_mean(mean: Array, variance: Array, p: dict[str, float]) -> Array:
    return mean


def _our_student_t(y: Array) -> tuple[Any, Tensor, Callable[[], dict[str, float]]]:
    likelihood = likelihoods.StudentTLikelihood().double()

    def read() -> dict[str, float]:
        return {"df": likelihood.deg_free.item(), "scale": likelihood.noise.sqrt().item()}

    return likelihood, torch.from_numpy(y), read


def _gamma(rng: np.random.Generator, f: Array, g: Array) -> Array:
    return rng.gamma(2, np.exp(f) / 2)


def _gamma_log_prob(y: Array, f: Array, p: dict[str, float]) -> Array:
    return stats.gamma.logpdf(y, p["shape"], scale=np.exp(f) / p["shape"])


def _our_gamma(y: Array) -> tuple[Any, Tensor, Callable[[], dict[str, float]]]:
    likelihood = likelihoods.GammaLikelihood().double()
    return likelihood, torch.from_numpy(y), lambda: {"shape": likelihood.shape.item()}


FIELDS = {
    "Bernoulli": Field(
        Family(_bernoulli, _bernoulli_log_prob, _bernoulli_mean, _our_bernoulli, ("bernoulli_logit",), "vecchia"),
        0.0,
        4.0,
        {},
    ),
    "Poisson": Field(
        Family(_poisson, _poisson_log_prob, log_normal_mean, _our_poisson, ("poisson",), "vecchia"), 1.0, 1.0, {}
    ),
    "Student-t": Field(
        Family(_student_t, _student_t_log_prob, _student_t_mean, _our_student_t, ("t",), "vecchia"),
        0.0,
        1.0,
        {"deg_free": 4.0, "noise": 0.09},
    ),
    "gamma": Field(
        Family(_gamma, _gamma_log_prob, log_normal_mean, _our_gamma, ("gamma",), "vecchia"), 0.0, 1.0, {"shape": 2.0}
    ),
}
