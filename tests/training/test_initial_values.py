"""Initial lengthscales from the data: scaled with them in any units, and never replacing a value that was set."""

import copy
import math
import warnings

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel

import gpext
from gpext.inference import Laplace
from gpext.likelihoods import StudentTLikelihood
from gpext.mlls import AugmentedELBO, LatentMarginalLogLikelihood
from gpext.training import initialise_from_data
from tests.members import F64
from tests.sparse_models import SparseGP


def inputs(columns, n=300, seed=0):
    return torch.randn(n, columns, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize("columns", [1, 3, 18])
@pytest.mark.parametrize("ard", [False, True])
def test_typical_inputs_are_about_a_lengthscale_apart_in_any_units(columns, ard):
    x = inputs(columns)
    units = 10.0 ** torch.linspace(-3, 3, columns, dtype=F64) if ard else 1e3
    kernel = RBFKernel(ard_num_dims=columns if ard else None).double()
    (value,) = initialise_from_data(kernel, units * x).values()
    assert value is not None
    assert value.shape == kernel.lengthscale.shape
    scaled = units * x / value.squeeze(0)
    assert 0.7 < float(torch.pdist(scaled).median()) < 1.6
    torch.testing.assert_close(
        initialise_from_data(RBFKernel().double(), x + 5.0), initialise_from_data(RBFKernel().double(), x)
    )


def test_only_what_is_as_gpytorch_makes_it_is_set():
    x = inputs(4)
    given = RBFKernel(ard_num_dims=4).double()
    given.lengthscale = 0.8
    frozen = RBFKernel().double()
    frozen.raw_lengthscale.requires_grad_(False)
    chosen = RBFKernel(lengthscale_constraint=gpytorch.constraints.Positive(initial_value=0.5)).double()
    narrow = RBFKernel(lengthscale_constraint=gpytorch.constraints.Interval(0.1, 1.0)).double()
    for kernel in (given, frozen, chosen, narrow, PeriodicKernel().double()):
        before = kernel.lengthscale.clone()
        assert initialise_from_data(ScaleKernel(kernel), x) == {}
        assert torch.equal(kernel.lengthscale, before)


def test_kernels_see_their_own_columns_and_a_constant_one_stays():
    x = inputs(5) * torch.tensor([1.0, 10.0, 100.0, 1e3, 1e4], dtype=F64)
    x[:, 2] = 7.0
    inner = MaternKernel(active_dims=[4], batch_shape=torch.Size([2])).double()
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2, active_dims=[0, 2])) + ScaleKernel(inner)
    found = initialise_from_data(kernel.double(), x)
    assert list(found) == ["kernels.0.base_kernel.lengthscale", "kernels.1.base_kernel.lengthscale"]
    first, second = found.values()
    assert 0.5 < float(first[0, 0]) < 3
    assert float(first[0, 1]) == pytest.approx(math.log(2))
    assert second.shape == (2, 1, 1)
    assert bool((second > 3e3).all() & (second < 3e4).all())


class Curve(gpext.models.LatentGP):
    def __init__(self, x, y):
        super().__init__(x, y, StudentTLikelihood(), Laplace())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=x.size(-1)))
        self.to(x)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Offset(Curve):
    """A mean that is known for each row of training."""

    def __init__(self, x, y, offset):
        super().__init__(x, y)
        self.offset = offset

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x) + self.offset, self.covar_module(x))


def test_models_that_hold_numbers_of_all_rows_are_called_with_all():
    x = inputs(3, 700)
    model = Offset(x, x[:, 0], torch.arange(700.0).double())
    torch.testing.assert_close(
        initialise_from_data(model, x)["covar_module.base_kernel.lengthscale"],
        initialise_from_data(RBFKernel(ard_num_dims=3).double(), x)["lengthscale"],
    )


def test_a_prior_without_variance_somewhere_is_no_reason_to_warn():
    x = inputs(2, 50)
    x[7] = 0.0
    model = Curve(x, x[:, 0])
    model.covar_module = (gpytorch.kernels.LinearKernel() * RBFKernel(ard_num_dims=2)).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(initialise_from_data(model, x)) == ["covar_module.kernels.1.lengthscale"]


def test_repeated_values_count_by_where_they_differ():
    x = torch.zeros(100, 1, dtype=F64)
    x[:10] = 2.0
    assert float(*initialise_from_data(RBFKernel().double(), x).values()) == pytest.approx(2.0)


class Features(gpytorch.models.ExactGP):
    """A kernel of two features of the inputs, normalised over the batch or scaled by a constant."""

    def __init__(self, x, y, *layers):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.map = torch.nn.Sequential(*layers)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=2))
        self.to(x)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(1e-3 * self.map(x)))


def test_a_kernel_of_features_is_told_their_size():
    """The map is called as in training, and has learned nothing from it."""
    x = 1e4 * inputs(18, 100)
    model = Features(x, x[:, 0], torch.nn.Linear(18, 2), torch.nn.BatchNorm1d(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (value,) = initialise_from_data(model, x).values()
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["covar_module.base_kernel.raw_lengthscale"]
    features = 1e-3 * model.map(x)
    (expected,) = initialise_from_data(RBFKernel(ard_num_dims=2).double(), features).values()
    torch.testing.assert_close(value, expected)
    assert float(value.max()) < 3e-3


def test_fit_starts_there_and_says_so():
    """At log 2 no two of 60 inputs of 18 columns are correlated, and nothing is learned."""
    x = inputs(18, 60)
    y = x[:, 0] + 0.1 * inputs(1, 60, seed=1)[:, 0]
    model = Curve(x, y)
    expected = copy.deepcopy(model)
    values = initialise_from_data(expected, x)
    result = gpext.fit(LatentMarginalLogLikelihood(model.likelihood, model), x, y, max_steps=20, progress=False)
    low, high = (f"{float(v):.3g}" for v in values["covar_module.base_kernel.lengthscale"].aminmax())
    assert f"started from the data: model.covar_module.base_kernel.lengthscale at {low} to {high}" in result.message
    from_default = Curve(x, y)
    mll = LatentMarginalLogLikelihood(from_default.likelihood, from_default)
    given = gpext.fit(mll, x, y, initial="given", max_steps=20, progress=False)
    assert "from the data" not in given.message
    assert result.objective > given.objective + 0.3
    again = gpext.fit(mll, x, y, max_steps=1, progress=False)
    assert "from the data" not in again.message


def test_what_was_set_stays_under_minibatches_too():
    x = inputs(1, 60)
    mll = AugmentedELBO(StudentTLikelihood().double(), SparseGP(x[:5].clone()), num_data=60)
    with pytest.raises(ValueError, match="initial must be 'given', 'data', 'subset' or 'curvature'; got 'dada'"):
        gpext.fit(mll, x, x[:, 0], initial="dada", progress=False)
    result = gpext.fit(mll, x, x[:, 0], batch_size=20, max_steps=2, progress=False)
    assert "from the data" not in result.message
