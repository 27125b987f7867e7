"""Figures of models: the artists contain the models' predictions."""

import gpytorch
import numpy as np
import pytest
import torch

import gpext
from gpext import plots
from gpext.inference import EP, KL, Laplace
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    DirichletLikelihood,
    HeteroscedasticGaussianLikelihood,
    HeteroscedasticStudentTLikelihood,
    MultinomialLogitLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
    VonMisesLikelihood,
)

F64 = torch.float64
X = torch.linspace(0, 3, 12, dtype=F64)
PLANE = torch.rand(12, 2, generator=torch.Generator().manual_seed(0), dtype=F64)


class Model(gpext.models.LatentGP):
    def __init__(self, x, y, likelihood, inference=None):
        super().__init__(x, y, likelihood, inference)
        batch = torch.Size(() if (D := getattr(likelihood, "num_latents", None)) is None else (D,))
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(batch_shape=batch), batch_shape=batch
        )
        self.double()

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Exact(gpytorch.models.ExactGP):
    def __init__(self, x, y):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
        self.double()

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def band(ax):
    vertices = ax.collections[0].get_paths()[0].vertices
    return vertices[:, 1].min(), vertices[:, 1].max()


@pytest.mark.parametrize("likelihood", [StudentTLikelihood, PoissonLikelihood])
def test_a_curve_is_the_median_and_the_band_holds_its_share(likelihood, labels):
    model = Model(X, (2 + torch.sin(X)).round(), likelihood())
    ax = plots.fitted(model, level=0.8, num_points=7)
    assert model.training  # unchanged
    model.eval()
    grid = torch.as_tensor(ax.lines[0].get_xdata())
    with torch.no_grad():
        predictive = model.likelihood.eval()(model(grid))
    np.testing.assert_allclose(ax.lines[0].get_ydata(), predictive.quantile(0.5))
    low, high = band(ax)
    np.testing.assert_allclose(low, predictive.quantile(0.1).min())
    np.testing.assert_allclose(high, predictive.quantile(0.9).max())
    assert labels(ax) == ["80 % of new observations", "predictive median", "observations"]


def test_gpytorchs_own_exact_model_is_drawn(labels):
    model = Exact(X, torch.sin(X))
    ax = plots.fitted(model, num_points=5)
    model.eval()
    with torch.no_grad():
        predictive = model.likelihood.eval()(model(torch.as_tensor(ax.lines[0].get_xdata())))
    low, high = (predictive.mean - 1.959964 * predictive.stddev).min(), (predictive.mean + 1.959964 * predictive.stddev)
    np.testing.assert_allclose(band(ax), [low, high.max()], rtol=1e-5)
    assert len(labels(ax)) == 3


def test_classes_and_angles_have_figures_of_their_own(labels):
    three = Model(X, X.long().clamp(max=2), MultinomialLogitLikelihood(3))
    assert labels(plots.fitted(three, num_points=5)) == ["class 0", "class 1", "class 2"]
    two = Model(X, (X > 1.5).double(), BernoulliLogitLikelihood())
    assert labels(plots.fitted(two, num_points=5)) == ["class 0", "class 1"]
    angles = Model(X, 2 * X, VonMisesLikelihood(), Laplace())
    ax = plots.fitted(angles, num_points=5)
    assert labels(ax) == ["95 % of new angles", "predicted direction", "observations"]
    assert np.abs(ax.lines[-1].get_ydata()).max() <= np.pi


def test_two_inputs_are_a_map(labels):
    numbers = plots.fitted(Model(PLANE, PLANE.sum(-1), StudentTLikelihood()), num_points=5)
    assert [axes.get_ylabel() for axes in numbers.figure.axes] == ["$x_2$", "predictive mean"]
    classes = plots.fitted(Model(PLANE, (PLANE[:, 0] > 0.5).double(), BernoulliLogitLikelihood()), num_points=5)
    assert labels(classes) == ["class 0", "class 1"]
    assert len(classes.images) == 1


def test_the_outlier_report_of_a_model_is_drawn_over_its_input():
    y = torch.sin(X)
    y[5] += 9
    model = Model(X, y, StudentTLikelihood(), EP())
    ax = plots.fitted_outliers(model, num_named=1)
    assert [text.get_text() for text in ax.texts] == ["5"]
    assert ax.get_xlabel() == "x"
    with pytest.raises(TypeError, match="expected a LatentGP"):
        plots.fitted_outliers(Exact(X, y))


@pytest.mark.parametrize("rule", [KL(), EP()], ids=["kl", "ep"])  # independent latents, and coupled ones
@pytest.mark.parametrize("likelihood", [HeteroscedasticGaussianLikelihood, HeteroscedasticStudentTLikelihood])
def test_the_noise_is_drawn_with_the_log_normal_quantiles_of_its_scale(likelihood, rule, labels):
    model = Model(X, torch.sin(X) + 0.1 * X * torch.cos(40 * X), likelihood(), rule)
    ax = plots.fitted_noise(model, level=0.8, num_points=7)
    assert model.training  # unchanged
    assert ax.get_ylabel() == "scale of the noise"
    assert labels(ax) == ["80 % interval of the scale", "median of the scale"]
    grid = torch.as_tensor(ax.lines[0].get_xdata())
    with torch.no_grad():
        mean, covariance = model.likelihood._blocks(model.eval()(grid))
    scale = torch.distributions.LogNormal(mean[1], covariance[1, 1].sqrt())
    lower, center, upper = (scale.icdf(mean.new_tensor(q)).numpy() for q in (0.1, 0.5, 0.9))
    np.testing.assert_allclose(ax.lines[0].get_ydata(), center)
    corners = ax.collections[0].get_paths()[0].vertices
    for edge in (lower, upper):
        gaps = np.abs(corners[:, None] - np.stack([grid, edge], -1)).max(-1)
        assert gaps.min(0).max() < 1e-9
    of_data = plots.fitted(model, level=0.8, num_points=7)
    assert labels(of_data) == ["80 % of new observations", "predictive median", "observations"]


def test_noise_of_one_scale_has_no_such_figure():
    with pytest.raises(TypeError, match="expected a HeteroscedasticGaussianLikelihood"):
        plots.fitted_noise(Model(X, X, StudentTLikelihood()))
    noisy = Model(X, X, HeteroscedasticGaussianLikelihood(), KL())
    with pytest.raises(ValueError, match="level must be between 0 and 1"):
        plots.fitted_noise(noisy, level=1.0)
    plane = Model(PLANE, PLANE.sum(-1), HeteroscedasticGaussianLikelihood(), KL())
    with pytest.raises(ValueError, match=r"expected inputs \(N, 1\)"):
        plots.fitted_noise(plane)


def test_what_has_no_figure_is_said():
    with pytest.raises(TypeError, match="expected a LatentGP or an ExactGP"):
        plots.fitted(StudentTLikelihood())
    with pytest.raises(ValueError, match="level must be between 0 and 1"):
        plots.fitted(Exact(X, X), level=95)
    with pytest.raises(ValueError, match=r"inputs \(N, 1\) or \(N, 2\)"):
        plots.fitted(Exact(torch.rand(5, 3, dtype=F64), torch.rand(5, dtype=F64)))
    shares = torch.full((12, 3), 1 / 3, dtype=F64)
    with pytest.raises(TypeError, match="no such figure"):
        plots.fitted(Model(X, shares, DirichletLikelihood(3), Laplace()), num_points=3)
