"""Regression of angles: von Mises Gaussian processes and alternatives.

A method maps training and test data to predicted directions and, if it has one, the log density of the test angles.
All Gaussian processes of a comparison have the same kernel, one for both coordinates where there are two, and maximise
their evidence by the same L-BFGS from the same starts, of which the best is used.

* von Mises: Laplace's or Taylor's inference; the direction is the predictive circular mean.
* GP on the angle: relative to the circular mean of the training angles; its predictive is a wrapped normal.
* GP on (cos, sin): the angle of a pair of Gaussian processes; its predictive is a projected normal.
* GP, quadratic constraint [Cha13 Sec. 4.2]: (cos, sin) only up to sign, from their products, which are affine in the
  cosine and sine of the double angle; of the two possible angles the one nearer to the nearest neighbour's.
* nearest neighbour, and least squares where angles are rotations of the inputs, points in the plane.
* constant: one von Mises density for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from torch import Tensor

import gpext
from benchmarks.datasets import Dataset
from gpext.distributions import VonMises
from gpext.distributions.circular.compound_von_mises import concentration_of
from gpext.inference import Laplace, Taylor
from gpext.likelihoods import VonMisesLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.training import FitStatus

KernelOf = Callable[[int], gpytorch.kernels.Kernel]
Starts = Sequence[KernelOf]
_WRAPS = 12  # whole turns to either side


@dataclass(frozen=True)
class Prediction:
    """The predictions of a method at the test inputs."""

    direction: Tensor  # (N*,)
    log_density: Tensor | None = None  # of the test angles (N*,)
    converged: bool = True
    seconds: float = 0.0  # of training


def linear(_: int) -> gpytorch.kernels.Kernel:
    """Return a linear kernel with one variance."""
    return gpytorch.kernels.LinearKernel()


def rbf(num_features: int) -> gpytorch.kernels.Kernel:
    """Return a squared exponential kernel with one length scale, initially the root of the number of features."""
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    kernel.base_kernel.lengthscale = math.sqrt(num_features)
    return kernel


def matern(num_features: int, length: float = 1.0) -> gpytorch.kernels.Kernel:
    """Return a Matern-3/2 kernel with a length scale per feature, initially `length` times the root of their number."""
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=num_features))
    kernel.base_kernel.lengthscale = length * math.sqrt(num_features)
    return kernel


class VonMisesGP(gpext.models.LatentGP):
    """Two latents with one kernel, their means zero or constants to be learnt."""

    def __init__(self, x: Tensor, y: Tensor, rule: Laplace | Taylor, kernel: KernelOf, has_mean: bool) -> None:
        super().__init__(x, y, VonMisesLikelihood(), rule)
        batch = torch.Size([2])
        self.mean_module = (
            gpytorch.means.ConstantMean(batch_shape=batch) if has_mean else gpytorch.means.ZeroMean(batch_shape=batch)
        )
        self.covar_module = kernel(x.size(-1))
        self.to(x)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at x, a batch of two."""
        covariance = self.covar_module(x)
        return MultivariateNormal(self.mean_module(x), covariance.expand(2, *covariance.shape))


class GaussianGP(gpytorch.models.ExactGP):
    """Targets (N,), or coordinates (2, N) that share kernel and noise, at inputs (..., N, d); constant means."""

    def __init__(self, x: Tensor, y: Tensor, kernel: KernelOf) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=y.shape[:-1])
        self.covar_module = kernel(x.size(-1))
        self.to(x)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def von_mises(data: Dataset, starts: Starts, *, rule: Laplace | Taylor, has_mean: bool = False) -> Prediction:
    """Predict by a von Mises Gaussian process."""
    x, y = data.train_x, data.train_y
    models = [VonMisesGP(x, y, rule, kernel, has_mean) for kernel in starts]
    best, *how = _best([LatentMarginalLogLikelihood(model.likelihood, model) for model in models], x, y)
    with torch.no_grad():
        predicted = best.likelihood(best.model(data.test_x))
        return Prediction(predicted.mean, predicted.log_prob(data.test_y), *how)


def on_the_angle(data: Dataset, starts: Starts) -> Prediction:
    """Predict by a Gaussian process on the angle."""
    centre = _angle(_direction(data.train_y).mean(-1))
    normal, converged, seconds = _gaussian(data.train_x, _wrapped(data.train_y - centre), data.test_x, starts)
    density = wrapped_normal_log_density(data.test_y - centre, normal.mean, normal.variance)
    return Prediction(_wrapped(normal.mean + centre), density, converged, seconds)


def on_the_coordinates(data: Dataset, starts: Starts) -> Prediction:
    """Predict by a Gaussian process on cosine and sine."""
    normal, converged, seconds = _planar(data, _direction(data.train_y), starts)
    density = projected_normal_log_density(data.test_y, normal.mean, normal.variance)
    return Prediction(_angle(normal.mean), density, converged, seconds)


def on_the_products(data: Dataset, starts: Starts) -> Prediction:
    """Predict by a Gaussian process on the products of cosine and sine."""
    normal, converged, seconds = _planar(data, _direction(2 * data.train_y), starts)
    half = 0.5 * _angle(normal.mean)
    is_near = absolute_error(half, nearest_neighbour(data).direction) < math.pi / 2
    return Prediction(torch.where(is_near, half, _wrapped(half + math.pi)), None, converged, seconds)


def nearest_neighbour(data: Dataset) -> Prediction:
    """Predict the angle of the nearest training input."""
    return Prediction(data.train_y[torch.cdist(data.test_x, data.train_x).argmin(-1)])


def least_squares(data: Dataset) -> Prediction:
    """Fit the shape whose points, rotated by the angle, are the inputs (N, 2 P), then the angles, by least squares."""
    train, test = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (data.train_x, data.test_x))
    shape = (train * torch.polar(torch.ones_like(data.train_y), -data.train_y).unsqueeze(-1)).mean(0)
    return Prediction((test @ shape.conj()).angle())


def constant(data: Dataset) -> Prediction:
    """Predict by the von Mises density that maximises the likelihood of the training angles."""
    resultant = _direction(data.train_y).mean(-1)
    density = VonMises(_angle(resultant), concentration_of(resultant.norm()))
    return Prediction(density.loc.expand_as(data.test_y), density.log_prob(data.test_y))


def absolute_error(direction: Tensor, y: Tensor) -> Tensor:
    """Return the angle between two directions, in [0, pi]."""
    return _wrapped(direction - y).abs()


def wrapped_normal_log_density(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return log sum_k N(y + 2 pi k | mean, variance): it integrates to one over the circle."""
    turns = 2 * math.pi * torch.arange(-_WRAPS, _WRAPS + 1, dtype=y.dtype).unsqueeze(-1)
    gap = _wrapped(y - mean) + turns
    return (-0.5 * (gap.square() / variance + variance.log() + math.log(2 * math.pi))).logsumexp(0)


def projected_normal_log_density(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return the log density of the angle of N(mean, diag(variance)) in the plane, both (2, N).

    With u = (cos y, sin y), a = |u|^2, b = u'm and x = b / sqrt(a) in the metric of the variances

        p(y) = exp(-|m|^2 / 2) [1 + x Phi(x) / N(x)] / (2 pi a sqrt(v_1 v_2))
    """
    u = _direction(y)
    a = (u.square() / variance).sum(0)
    x = (u * mean / variance).sum(0) * a.rsqrt()
    ratio = math.sqrt(math.pi / 2) * torch.special.erfcx(-x.clamp_max(0) / math.sqrt(2))  # Phi / N, x negative
    towards = torch.logaddexp(
        torch.zeros_like(x),
        x.clamp_min(1e-300).log() + torch.special.log_ndtr(x) + 0.5 * x.square() + 0.5 * math.log(2 * math.pi),
    )
    bracket = torch.where(x > 0, towards, torch.log1p(x.clamp_max(0) * ratio))
    bracket = torch.where(x < -1e3, -2 * (-x).clamp_min(1).log(), bracket)  # 1 and x Phi / N cancel
    scale = a.log() + 0.5 * variance.log().sum(0) + math.log(2 * math.pi)
    return bracket - scale - 0.5 * (mean.square() / variance).sum(0)


def _planar(data: Dataset, targets: Tensor, starts: Starts) -> tuple[MultivariateNormal, bool, float]:
    return _gaussian(data.train_x.expand(2, -1, -1), targets, data.test_x.expand(2, -1, -1), starts)


def _gaussian(x: Tensor, y: Tensor, test_x: Tensor, starts: Starts) -> tuple[MultivariateNormal, bool, float]:
    """Return the predictive of targets, whether training converged, and its seconds."""
    models = [GaussianGP(x, y, kernel) for kernel in starts]
    best, *how = _best([ExactMarginalLogLikelihood(model.likelihood, model) for model in models], x, y)
    with torch.no_grad():
        return best.likelihood(best.model(test_x)), *how


def _best(mlls: Sequence[MarginalLogLikelihood], x: Tensor, y: Tensor) -> tuple[MarginalLogLikelihood, bool, float]:
    """Train all; return the one with the greatest evidence, whether its training converged, and the total seconds."""
    results = [gpext.fit(mll, x, y, progress=False) for mll in mlls]
    best = max(range(len(mlls)), key=lambda i: results[i].objective)
    return mlls[best], results[best].status is FitStatus.CONVERGED, sum(result.seconds for result in results)


def _direction(y: Tensor) -> Tensor:
    """Return (cos y, sin y) (2, N)."""
    return torch.stack([y.cos(), y.sin()])


def _angle(vector: Tensor) -> Tensor:
    return torch.atan2(vector[1], vector[0])


def _wrapped(y: Tensor) -> Tensor:
    """Return y in [-pi, pi)."""
    return torch.remainder(y + math.pi, 2 * math.pi) - math.pi


Method = Callable[[Dataset, Starts], Prediction]
BY_KERNEL: dict[str, Method] = {
    "VM Laplace": partial(von_mises, rule=Laplace()),
    "VM Taylor": partial(von_mises, rule=Taylor()),
    "GP angle": on_the_angle,
    "GP products": on_the_products,
    "GP (cos, sin)": on_the_coordinates,
}
WITHOUT_KERNEL: dict[str, Callable[[Dataset], Prediction]] = {"NN": nearest_neighbour, "NLS": least_squares}
