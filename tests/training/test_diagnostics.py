"""Parameters without an optimal value, or on which the data carry no information, are named in the message."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

import gpext
from gpext.inference import Laplace
from gpext.likelihoods import DirichletLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.training.diagnostics import constant_columns, diagnose, trained_parameters
from tests.members import F64, tensor
from tests.sparse_models import SparseGP

X = torch.linspace(0, 1, 10, dtype=F64).unsqueeze(-1)


class Shares(gpext.models.LatentGP):
    """Two latents with a kernel each."""

    def __init__(self, y):
        super().__init__(X, y, DirichletLikelihood(2), Laplace())
        batch = torch.Size([2])
        self.mean_module = gpytorch.means.ZeroMean(batch_shape=batch)
        base = gpytorch.kernels.RBFKernel(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(base, batch_shape=batch)
        self.to(X)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def fitted(y, *, prior=None):
    model = Shares(y)
    if prior is not None:
        model.covar_module.register_prior("scale_prior", prior, "outputscale")
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    return gpext.fit(mll, X, y, progress=False, max_steps=40)


EQUAL = tensor(0.3, 0.7).expand(10, 2)  # a density that can be as high as the kernels' scale allows


def test_a_scale_that_grows_without_bound_is_named():
    assert "model.covar_module.outputscale (all 2 entries) grew" in fitted(EQUAL).message


def test_otherwise_nothing_is_said():
    noise = torch.randn(10, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    assert "grew" not in fitted(noise.softmax(-1)).message
    assert "grew" not in fitted(EQUAL, prior=gpytorch.priors.GammaPrior(2.0, 0.02)).message


class Curve(gpext.models.LatentGP):
    def __init__(self, x, y, lengthscale):
        super().__init__(x, y, gpext.likelihoods.StudentTLikelihood(), Laplace())
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.to(x)
        self.covar_module.base_kernel.lengthscale = lengthscale

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def message(unit, *, lengthscale=1.0, batch_size=None):
    """The message of training on a noisy sine with inputs in some unit."""
    x = unit * torch.linspace(0, 6, 30, dtype=F64).unsqueeze(-1)
    y = (x[:, 0] / unit).sin() + 0.3 * torch.randn(30, dtype=F64, generator=torch.Generator().manual_seed(0))
    if batch_size is None:
        model = Curve(x, y, lengthscale)
        mll = LatentMarginalLogLikelihood(model.likelihood, model)
    else:
        model = SparseGP(x[::3].clone())
        mll = gpext.mlls.AugmentedELBO(gpext.likelihoods.StudentTLikelihood().to(x), model, num_data=30)
    return gpext.fit(mll, x, y, progress=False, max_steps=10, batch_size=batch_size).message


@pytest.mark.parametrize("batch_size", [None, 15])
def test_a_lengthscale_that_no_two_inputs_share_is_named(batch_size):
    """Inputs in metres and a lengthscale of one: the covariance stays diagonal, and training converges at once."""
    expected = "model.covar_module.base_kernel.lengthscale did not move, with a gradient of zero"
    assert expected in message(1e6, batch_size=batch_size)
    assert "did not move" not in message(1.0, batch_size=batch_size)
    if batch_size is None:
        assert "did not move" not in message(1e6, lengthscale=1e6)


def trained(x, y, **parameters):
    """The message of training a Student-t model with a kernel of one lengthscale per column."""
    model = Curve(x, y, 1.0)
    model.covar_module.base_kernel = gpytorch.kernels.RBFKernel(ard_num_dims=x.size(-1)).to(x)
    for name, value in parameters.items():
        model.likelihood.initialize(**{name: value})
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    return gpext.fit(mll, x, y, progress=False, max_steps=30)


def noisy_sine(columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(30, columns, generator=generator, dtype=F64)
    return x, x[:, 0].sin() + 0.3 * torch.randn(30, generator=generator, dtype=F64)


def test_noise_at_its_floor_is_a_status_and_named():
    """Equal targets: the density grows without bound as the noise narrows."""
    x = torch.linspace(0, 6, 30, dtype=F64).unsqueeze(-1)
    result = trained(x, torch.zeros(30, dtype=F64))
    assert result.status in (gpext.FitStatus.NOISE_FLOOR, gpext.FitStatus.MAX_STEPS)
    assert "likelihood.noise ended at its floor, 1.5e-08" in result.message
    assert "noise fell" not in result.message
    assert "floor" not in trained(*noisy_sine(1)).message


def test_noise_that_vanishes_without_a_floor_is_named():
    model = Curve(X, X[:, 0], 1.0)
    model.likelihood.register_constraint("raw_noise", gpytorch.constraints.GreaterThan(0.0))
    before, none = trained_parameters(model), torch.zeros(1, dtype=torch.bool)
    model.likelihood.noise = 1e-9
    assert "likelihood.noise fell 7e+08 times" in diagnose(model, before, none)


def test_a_lengthscale_of_a_constant_column_is_named_by_its_entry():
    x, y = noisy_sine(3)
    x[:, 1] = 4.0
    message = trained(x, y).message
    assert "lengthscale[0, 1] did not move: its input column is constant" in message
    assert "lengthscales apart" not in message
    assert "did not move" not in trained(*noisy_sine(3)).message


def test_columns_that_are_constant():
    x = torch.rand(2, 5, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    x[..., 2] = 1.0
    x[0, :, 1] = 1.0
    assert constant_columns(x).tolist() == [False, False, True]
    assert constant_columns(x[:, :1]).tolist() == [False, False, False]
    assert constant_columns(x[0, :, 0]).tolist() == [False]


def test_of_several_entries_those_that_went_far_are_named():
    model = Shares(EQUAL)
    before = trained_parameters(model)
    none = torch.zeros(1, dtype=torch.bool)
    with torch.no_grad():
        model.covar_module.outputscale = tensor(1.0, 1e-9)
    assert "covar_module.outputscale[1] fell 7e+08 times" in diagnose(model, before, none)
    with torch.no_grad():
        model.covar_module.outputscale = tensor(1e-9, 1e-9)
    assert "covar_module.outputscale (all 2 entries) fell" in diagnose(model, before, none)
    with torch.no_grad():
        model.covar_module.raw_outputscale.fill_(-800.0)
    assert "fell to zero" in diagnose(model, before, none)


def test_a_parameter_on_the_bound_of_its_constraint_is_named():
    model = Curve(X, X[:, 0], 1.0)
    model.covar_module.register_constraint("raw_outputscale", gpytorch.constraints.Interval(0.1, 10.0))
    before, none = trained_parameters(model), torch.zeros(1, dtype=torch.bool)
    assert diagnose(model, before, none) == ""
    with torch.no_grad():
        model.likelihood.deg_free, model.covar_module.outputscale = 2.000001, 9.99
    said = diagnose(model, before, none)
    assert "likelihood.deg_free ended so near to 2" in said
    assert "report quantiles" in said
    assert "covar_module.outputscale ended on the bound of its constraint, 10" in said
    assert diagnose(model, trained_parameters(model), none) == ""  # it was there at the start


def test_heavy_tails_are_named_by_fit_and_quantiles_are_there():
    x, y = noisy_sine(1)
    y[::5] += 300.0 * torch.randn(6, dtype=F64, generator=torch.Generator().manual_seed(1)).exp()
    model = Curve(x, y, 1.0)
    result = gpext.fit(LatentMarginalLogLikelihood(model.likelihood, model), x, y, progress=False)
    assert "likelihood.deg_free ended so near to 2" in result.message
    with torch.no_grad():
        predictive = model.likelihood(model(x))
        assert bool((predictive.icdf(tensor(0.9)) < 10 * predictive.variance.sqrt()).all())


def test_only_parameters_with_a_constraint_are_watched():
    model = Shares(EQUAL)
    assert list(trained_parameters(model)) == ["covar_module.outputscale", "covar_module.base_kernel.lengthscale"]


@pytest.mark.parametrize("kind", ["OrdinalLogitLikelihood", "OrdinalProbitLikelihood"])
def test_parameters_without_entries_are_not_remarked_on(kind):
    """Two ordered classes have one cutpoint and no gaps."""
    likelihood = getattr(gpext.likelihoods, kind)(2)
    assert diagnose(likelihood, trained_parameters(likelihood), constant_columns(torch.ones(3, 1))) == ""
