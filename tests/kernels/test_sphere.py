"""Points of places on a sphere."""

import math

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

import gpext
from gpext.inference import Laplace
from gpext.kernels import sphere_points
from gpext.likelihoods import PoissonLikelihood
from tests.members import F64


def places(n, seed=0):
    u = torch.rand(n, 2, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return torch.stack([360 * u[:, 0] - 180, (2 * u[:, 1] - 1).asin() * 180 / math.pi], -1)


def angles(x):
    """Great-circle angles between places, by the haversine formula."""
    longitude, latitude = (math.pi / 180 * x).unbind(-1)
    h = (0.5 * (latitude.unsqueeze(-1) - latitude)).sin().square()
    h = h + latitude.cos().unsqueeze(-1) * latitude.cos() * (0.5 * (longitude.unsqueeze(-1) - longitude)).sin().square()
    return 2 * h.sqrt().clamp(max=1).asin()


def test_distances_are_chords():
    x = places(50)
    chords = torch.cdist(sphere_points(x, radius=3.0), sphere_points(x, radius=3.0))
    torch.testing.assert_close(chords, 6 * (0.5 * angles(x)).sin(), rtol=1e-7, atol=1e-7)


class Model(gpext.models.LatentGP):
    def __init__(self, x, y):
        super().__init__(x, y, PoissonLikelihood(), Laplace(), neighbours=8)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5)).double()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_the_date_line_is_a_line_like_any_other():
    x, new = places(150), places(20, seed=1)
    y = torch.poisson(torch.full((150,), 3.0, dtype=F64), generator=torch.Generator().manual_seed(0))
    turn = torch.tensor([77.0, 0.0], dtype=F64)
    found = [Model(sphere_points(x + by), y).eval()(sphere_points(new + by)) for by in (0 * turn, turn)]
    torch.testing.assert_close(found[0].mean, found[1].mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[0].variance, found[1].variance, rtol=1e-6, atol=1e-6)


def test_bad_input():
    with pytest.raises(ValueError, match="longitude and latitude"):
        sphere_points(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="latitude is at most 90"):
        sphere_points(torch.tensor([[10.0, 120.0]]))
    with pytest.raises(ValueError, match="finite"):
        sphere_points(torch.tensor([[torch.nan, 0.0]]))
    with pytest.raises(TypeError, match="floating point"):
        sphere_points(torch.zeros(3, 2, dtype=torch.long))
