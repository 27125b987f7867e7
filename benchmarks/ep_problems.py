r"""Problems on which expectation propagation has a hard time: Student-t noise, and data that contradict each other.

Two families of random ones, and the two one-dimensional examples of Jylanki, Vanhatalo & Vehtari (2011), Figure 1, made
from its description (the data are not published): two outliers at +-3 in a gap of the inputs; in the second the
function is strongly nonlinear at x < 0, so that the lengthscale is short, and the outliers are closer to each other.
Kernel: m^2 exp(-|x - x'|^2 / (2 l^2)), zero mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpytorch.constraints import Positive
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

from gpext.inference import InferenceResult
from gpext.likelihoods import StudentTLikelihood

FAMILIES = ("regular", "hard")
_SEED = {"regular": 3_000_000, "hard": 7_000_000}  # none that the defaults of EP were chosen on


@dataclass(frozen=True)
class StudentTProblem:
    """A Gaussian process prior, Student-t noise, and targets."""

    inputs: Tensor  # (N, d)
    covariance: Tensor  # K (N, N)
    targets: Tensor  # (N,)
    deg_free: float
    scale: float
    about: dict[str, Any]

    @property
    def prior(self) -> MultivariateNormal:
        """p(f) at the inputs."""
        return MultivariateNormal(torch.zeros_like(self.targets), to_linear_operator(self.covariance))

    @property
    def likelihood(self) -> StudentTLikelihood:
        """The noise, with any positive degrees of freedom."""
        return student_t(self.deg_free, self.scale)


def student_t(deg_free: float, scale: float) -> StudentTLikelihood:
    """Return Student-t noise; gpytorch's own constraint has more than 2 degrees of freedom."""
    likelihood = StudentTLikelihood(deg_free_constraint=Positive()).double()
    tensor = partial(torch.tensor, dtype=torch.float64)
    likelihood.initialize(deg_free=tensor(deg_free), noise=tensor(scale**2))
    return likelihood.requires_grad_(False)


def squared_exponential(x: Tensor, other: Tensor, lengthscale: float, magnitude: float) -> Tensor:
    """m^2 exp(-|x - x'|^2 / (2 l^2))."""
    return magnitude**2 * torch.exp(-0.5 * torch.cdist(x, other).square() / lengthscale**2)


def random_problem(family: str, seed: int) -> StudentTProblem:
    """Return one problem of a family: 20 to 200 data, scale log-uniform in [1e-3, 1], up to 40 % outliers.

    * regular: one input on [0, 10], evenly spaced or not; a sine, or a draw of the prior; lengthscale in [0.5, 2],
      magnitude 1, nu uniform in [1, 20]; outliers off by N(0, 10^2) or uniformly within 10.
    * hard: 1 to 3 inputs on [0, 3], a draw of the prior; lengthscale log-uniform in [0.1, 3], magnitude in [0.3, 3], nu
      in [1, 20] likewise; outliers off by N(0, 3^2), less clear.
    """
    generator = torch.Generator().manual_seed(_SEED[family] + seed)
    make = _regular if family == "regular" else _hard
    return make(seed, generator)


def large_problem(count: int, deg_free: float) -> StudentTProblem:
    """Return a smooth function of two inputs with one target in ten off by N(0, 3^2), scale 0.1, at its own setting."""
    _, normal = _random(generator := torch.Generator().manual_seed(0))
    x = 6 * torch.rand(count, 2, generator=generator, dtype=torch.float64)
    K = squared_exponential(x, x, 1.0, 1.0) + 1e-8 * torch.eye(count, dtype=torch.float64)
    far = torch.rand(count, generator=generator, dtype=torch.float64) < 0.1
    y = x[:, 0].sin() * x[:, 1].cos() + 0.1 * normal(count) + far * 3 * normal(count)
    return StudentTProblem(x, K, y, deg_free, 0.1, {"n": count})


def stated_power(result: InferenceResult) -> float:
    """Return the power that a result of EP says that it has ended at."""
    stated = re.match(r"EP\(power=([^)]+)\)", result.message)
    assert stated is not None
    return float(stated[1])


def _regular(seed: int, generator: torch.Generator) -> StudentTProblem:
    uniform, normal = _random(generator)
    n = int(uniform(20, 201))
    spaced = torch.linspace(0, 10, n, dtype=torch.float64).unsqueeze(-1)
    x = spaced if seed % 2 else 10 * torch.rand(n, 1, generator=generator, dtype=torch.float64)
    lengthscale, scale, deg_free, share = uniform(0.5, 2), 10 ** uniform(-3, 0), uniform(1, 20), uniform(0, 0.4)
    K = squared_exponential(x, x, lengthscale, 1.0) + 1e-6 * torch.eye(n, dtype=torch.float64)
    f = x[:, 0].sin() if seed % 4 < 2 else torch.linalg.cholesky(K) @ normal(n)
    far = torch.rand(n, generator=generator, dtype=torch.float64) < share
    off = 10 * normal(n) if seed % 3 else 20 * torch.rand(n, generator=generator, dtype=torch.float64) - 10
    y = f + scale * normal(n) + far * off
    about = {"n": n, "inputs": 1, "lengthscale": lengthscale, "magnitude": 1.0, "outliers": share}
    return StudentTProblem(x, K, y, deg_free, scale, about)


def _hard(seed: int, generator: torch.Generator) -> StudentTProblem:
    uniform, normal = _random(generator)
    n, d = int(uniform(20, 201)), 1 + seed % 3
    x = 3 * torch.rand(n, d, generator=generator, dtype=torch.float64)
    lengthscale, magnitude = (10 ** uniform(math.log10(low), math.log10(3)) for low in (0.1, 0.3))
    scale, deg_free, share = 10 ** uniform(-3, 0), 20 ** uniform(0, 1), uniform(0, 0.4)
    K = squared_exponential(x, x, lengthscale, magnitude)
    K = K + 1e-8 * magnitude**2 * torch.eye(n, dtype=torch.float64)
    far = torch.rand(n, generator=generator, dtype=torch.float64) < share
    y = torch.linalg.cholesky(K) @ normal(n) + scale * normal(n) + far * 3 * normal(n)
    about = {"n": n, "inputs": d, "lengthscale": lengthscale, "magnitude": magnitude, "outliers": share}
    return StudentTProblem(x, K, y, deg_free, scale, about)


def _random(generator: torch.Generator) -> tuple[Callable[[float, float], float], Callable[[int], Tensor]]:
    def uniform(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()

    return uniform, partial(torch.randn, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Example:
    """One of the two examples; its data 0 and 1 are the outliers, 2 and 3 their neighbours on either side.

    Attributes:
        function: f(x) behind the regular data.
        outliers: inputs of the two outliers.
        deg_free: nu.
        lengthscale: of the best evidence by EP, about; the region of the map is centred here.
        magnitude: likewise.
    """

    function: Callable[[Tensor], Tensor]
    outliers: tuple[float, float]
    deg_free: float
    lengthscale: float
    magnitude: float
    scale: float = 0.1

    def data(self) -> tuple[Tensor, Tensor]:
        """Return 29 inputs (N, 1) and their targets (N,)."""
        left, right = (torch.linspace(*ends, dtype=torch.float64) for ends in ((-5, 1, 18), (3, 5, 9)))
        regular = torch.cat([left[-1:], right[:1], left[:-1], right[1:]])
        generator = torch.Generator().manual_seed(1)
        noise = 0.1 * torch.randn(len(regular), generator=generator, dtype=torch.float64)
        x = torch.cat([torch.tensor(self.outliers, dtype=torch.float64), regular])
        y = torch.cat([torch.tensor([3.0, -3.0], dtype=torch.float64), self.function(regular) + noise])
        return x.unsqueeze(-1), y

    def problem(self, lengthscale: float | None = None, magnitude: float | None = None) -> StudentTProblem:
        """Return the example at a setting, by default that of the best evidence."""
        lengthscale, magnitude = lengthscale or self.lengthscale, magnitude or self.magnitude
        x, y = self.data()
        K = squared_exponential(x, x, lengthscale, magnitude)
        K = K + 1e-8 * magnitude**2 * torch.eye(len(y), dtype=torch.float64)
        about = {"lengthscale": lengthscale, "magnitude": magnitude}
        return StudentTProblem(x, K, y, self.deg_free, self.scale, about)


def _strongly_nonlinear(x: Tensor) -> Tensor:
    return 0.5 * x.sin() - 10 * (x + 2.5) * torch.exp(-0.8 * (x + 2.5).square())


EXAMPLES = {
    1: Example(torch.sin, (1.9, 2.1), deg_free=2.1, lengthscale=1.8, magnitude=0.9),
    2: Example(_strongly_nonlinear, (1.95, 2.05), deg_free=2.0, lengthscale=0.88, magnitude=3.0),
}
