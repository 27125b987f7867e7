"""Intensities against draws and quadrature; intervals of simulated log-Gaussian Cox processes cover the truth."""

import math

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from scipy import stats

import gpext
from gpext.distributions import LatentNormal
from gpext.likelihoods import Offset, PoissonLikelihood
from gpext.point_process import Grid, Intensity, intensity
from tests.statistics import frequency_is, misfit, misfit_of_gaussians


def posterior(dtype=torch.float64):
    grid = Grid.regular([(0, 3), (0, 1)], (3, 2), mask=torch.tensor([[1, 1], [0.5, 0], [1, 1]]), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    root = 0.4 * torch.randn(5, 5, generator=generator, dtype=dtype)
    mean = torch.randn(5, generator=generator, dtype=dtype)
    return Intensity(grid, MultivariateNormal(mean, root @ root.mT))


def test_draws_are_joint():
    found = posterior()
    f = found.log_intensity
    draws = found.draws(4000, generator=torch.Generator().manual_seed(1))
    assert misfit_of_gaussians(draws.log(), f.mean, f.covariance_matrix) < 1
    assert torch.equal(draws, found.draws(4000, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("share", [None, [1, 0, 1, 0, 0], [0.0, 0.2, 0.4, 0.9, 1.0]])
def test_moments_of_a_region_by_those_of_log_normal_products(share):
    """E[e^f e^g] = exp of mean plus half the variance of f + g, cell by cell."""
    found = posterior()
    m, V = found.log_intensity.mean.tolist(), found.log_intensity.covariance_matrix.tolist()
    area = [0.5, 0.5, 0.25, 0.5, 0.5]
    weights = area if share is None else [a * s for a, s in zip(area, share, strict=True)]
    cells = range(5)
    mean = sum(weights[i] * math.exp(m[i] + V[i][i] / 2) for i in cells)
    square = sum(
        weights[i] * weights[j] * math.exp(m[i] + m[j] + (V[i][i] + V[j][j]) / 2 + V[i][j])
        for i in cells
        for j in cells
    )
    expected = found.expected_count(None if share is None else torch.tensor(share))
    assert float(expected.mean) == pytest.approx(mean)
    assert float(expected.intensity_variance) == pytest.approx(square - mean**2)
    assert float(expected.variance) == pytest.approx(square - mean**2 + mean)


def test_closed_forms():
    found = posterior()
    m, v = found.log_intensity.mean, found.log_intensity.variance
    law = stats.lognorm(s=v.sqrt().numpy(), scale=m.exp().numpy())
    for value, expected in (
        (found.mean, law.mean()),
        (found.stddev, law.std()),
        (found.quantile(0.05), law.ppf(0.05)),
        (found.exceedance(2.0), law.sf(2.0)),
        (found.exceedance(1e4), law.sf(1e4)),
        (found.exceedance(torch.arange(5.0).double()), law.sf([0, 1, 2, 3, 4])),
    ):
        torch.testing.assert_close(value, torch.from_numpy(expected))
    torch.testing.assert_close(found.expected_count().mean, (found.mean * found.grid.exposure).sum())
    parts = torch.eye(5).double()
    torch.testing.assert_close(sum(found.expected_count(part).mean for part in parts), found.expected_count().mean)


def test_a_known_intensity_is_a_poisson_process():
    grid = Grid.regular([(0, 2)], (2,))
    found = Intensity(grid, LatentNormal(torch.zeros(2), DiagLinearOperator(torch.zeros(2))))
    expected = found.expected_count()
    assert (float(expected.mean), float(expected.variance), float(expected.intensity_variance)) == (2, 2, 0)
    assert found.exceedance(0.9).tolist() == [1, 1]
    assert torch.equal(found.draws(3), torch.ones(3, 2))


class LogIntensity(gpext.models.LatentGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood, gpext.inference.KL())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5))
        self.mean_module.constant.data.fill_(3.0)
        self.covar_module.base_kernel.lengthscale = 0.4
        self.to(x)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.slow
def test_intervals_cover_the_intensities_of_simulated_processes():
    """Intensities from the prior, points by thinning within the window; the model has the true hyperparameters.

    The 90 % interval of a cell is that of a draw from the posterior: over processes it covers the truth in 90 % of
    them. One cell of each process is tested, so that trials are independent. A variational posterior is an
    approximation, whose coverage may be a little off: 0.87 to 0.93 is allowed for besides chance.
    """
    generator = torch.Generator().manual_seed(4)
    triangle = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    grid = Grid.regular([(0, 1), (0, 1)], (5, 5), polygon=triangle, dtype=torch.float64)
    likelihood = Offset(PoissonLikelihood(), grid.exposure.log())
    model = LogIntensity(grid.inputs, torch.zeros_like(grid.exposure), likelihood)
    with torch.no_grad():
        prior = model.forward(grid.inputs)
        root = torch.linalg.cholesky(prior.covariance_matrix)
    trials, covered, totals = 150, 0, []
    for trial in range(trials):
        f = prior.mean.detach() + root @ torch.randn(len(root), generator=generator, dtype=torch.float64)
        highest = float(f.exp().max())
        number = int(torch.poisson(torch.tensor(highest).double(), generator=generator))
        points = torch.rand(number, 2, generator=generator, dtype=torch.float64)
        points = points[points.sum(-1) <= 1]
        cell = (points * 5).floor().long().clamp_max(4)
        rate = grid.place(f.exp())[cell[:, 0], cell[:, 1]]
        kept = torch.rand(len(points), generator=generator, dtype=torch.float64) * highest < rate
        counts = grid.count(points[kept])
        assert counts.sum() == kept.sum()
        model.set_train_data(targets=counts)
        found = intensity(model.eval(), grid)
        one = trial % len(f)
        covered += bool(found.quantile(0.05)[one] < f[one].exp() < found.quantile(0.95)[one])
        expected = found.expected_count()
        truth = (f.exp() * grid.exposure).sum()
        totals.append((truth - expected.mean) / expected.intensity_variance.sqrt())
        model.train()
    assert any(frequency_is(share, covered, trials) for share in (0.87, 0.9, 0.93))
    totals = torch.stack(totals).unsqueeze(-1)
    assert misfit(totals, torch.zeros(1, dtype=torch.float64), rounding=0.1) < 1


def test_intensity_of_a_model_at_other_inputs():
    grid, fine = Grid.regular([(0, 1)], (4,)), Grid.regular([(0, 1)], (16,))
    likelihood = Offset(PoissonLikelihood(), grid.exposure.log())
    model = LogIntensity(grid.inputs, torch.tensor([1.0, 0.0, 3.0, 8.0]), likelihood)
    with pytest.raises(RuntimeError, match="train mode"):
        intensity(model, grid)
    model.eval()
    found = intensity(model, fine)
    with torch.no_grad():
        torch.testing.assert_close(found.log_intensity.mean, model(fine.inputs).mean)
    assert found.mean.shape == (16,)
    assert found.expected_count().mean.dtype == torch.float32
    assert intensity(model, fine, 0.5 * fine.inputs).mean[-1] < found.mean[-1]


def test_bad_requests_are_refused():
    found = posterior()
    with pytest.raises(ValueError, match="probability must be between 0 and 1; got 5"):
        found.quantile(5)
    with pytest.raises(ValueError, match="threshold must not be negative, an intensity; got -1"):
        found.exceedance(-1)
    with pytest.raises(ValueError, match=r"expected a region \(5,\), one value of each cell; got \(3, 2\)"):
        found.expected_count(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"expected a log intensity in each of 5 cells; got shape \(6,\)"):
        Intensity(found.grid, MultivariateNormal(torch.zeros(6), torch.eye(6)))
    with pytest.raises(TypeError, match="expected a MultivariateNormal of f"):
        Intensity(found.grid, torch.zeros(5))
