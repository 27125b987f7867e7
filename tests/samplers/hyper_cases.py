"""A tiny GP with two hyperparameters, whose posterior fits on a grid, and its density written by hand."""

import gpytorch
import numpy as np
import scipy.stats
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import GammaPrior, LogNormalPrior

from gpext.samplers import LogPosterior

F64 = torch.float64
N = 12


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
        self.covar_module.register_prior("lengthscale_prior", LogNormalPrior(0.0, 0.5), "lengthscale")
        likelihood.register_prior("noise_prior", GammaPrior(2.0, 4.0), "noise")

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def problem(dtype=F64, size=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 5 * torch.rand(size, 1, dtype=F64, generator=generator)
    y = x[:, 0].sin() + 0.4 * torch.randn(size, dtype=F64, generator=generator)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Model(x, y, likelihood).to(dtype)
    model.set_train_data(x.to(dtype), y.to(dtype), strict=False)
    return ExactMarginalLogLikelihood(likelihood, model)


class QuickLogPosterior(LogPosterior):
    """The same density in few lines: some ten times as fast as through gpytorch."""

    def _log_density(self, raw):
        self.moved.write(raw)
        (noise, lengthscale) = (slot.parameter for slot in self.moved.slots)
        noise, lengthscale = softplus(noise.squeeze()) + 1e-4, softplus(lengthscale.squeeze())
        x, y = self.model.train_inputs[0], self.model.train_targets
        matrix = (-0.5 * ((x - x.mT) / lengthscale).square()).exp() + noise * torch.eye(len(y), dtype=F64)
        root, info = torch.linalg.cholesky_ex(matrix)
        if int(info):
            return raw.new_tensor(-torch.inf)
        white = torch.linalg.solve_triangular(root, y.unsqueeze(-1), upper=False)
        value = -0.5 * white.square().sum() - root.diagonal().log().sum()
        value = value - lengthscale.log() - 0.5 * (lengthscale.log() / 0.5).square() + noise.log() - 4 * noise
        for slot in self.moved.slots:
            value = value - torch.nn.functional.softplus(-slot.parameter).sum()
        return value


def quick(sampler_class, **options):
    """A sampler of the density above."""
    sampler = sampler_class(problem(**options))
    sampler.target = QuickLogPosterior(sampler.target.mll)
    return sampler


def softplus(raw):
    return torch.nn.functional.softplus(raw) if isinstance(raw, torch.Tensor) else np.logaddexp(0.0, raw)


def constrained(raw):
    """noise, length scale of raw values (..., 2); gpytorch's noise is above 1e-4, of single precision."""
    return softplus(raw[..., 0]) + float(np.float32(1e-4)), softplus(raw[..., 1])


def covariance(x, other, lengthscale):
    return np.exp(-0.5 * ((x - other.T) / lengthscale) ** 2)


def log_density(raw, x, y):
    """log p(y | theta) + log p(theta) + log |dtheta / draw| at raw values (2,), without gpytorch."""
    noise, lengthscale = constrained(np.asarray(raw))
    matrix = covariance(x, x, lengthscale) + noise * np.eye(len(y))
    value = scipy.stats.multivariate_normal.logpdf(y, np.zeros(len(y)), matrix)
    value += scipy.stats.lognorm.logpdf(lengthscale, 0.5) + scipy.stats.gamma.logpdf(noise, 2.0, scale=1 / 4.0)
    return value - np.log1p(np.exp(-np.asarray(raw))).sum()  # the slope of a softplus is a sigmoid


def grid_moments(x, y):
    """Means and standard deviations of the raw values by a grid that extends far beyond the mass."""
    axes = np.linspace(-14, 5, 120), np.linspace(-6, 12, 120)
    points = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
    noise, lengthscale = constrained(points)
    matrices = covariance(x, x, lengthscale[:, None, None]) + noise[:, None, None] * np.eye(len(y))
    quadratic = (np.linalg.solve(matrices, y[:, None])[..., 0] * y).sum(-1)
    values = -0.5 * (quadratic + np.linalg.slogdet(matrices)[1])
    values += scipy.stats.lognorm.logpdf(lengthscale, 0.5) + scipy.stats.gamma.logpdf(noise, 2.0, scale=1 / 4.0)
    values -= np.log1p(np.exp(-points)).sum(-1)
    weights = np.exp(values - values.max())
    weights /= weights.sum()
    mean = weights @ points
    return mean, np.sqrt(weights @ (points - mean) ** 2)
