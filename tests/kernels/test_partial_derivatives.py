"""Values and partial derivatives of f: covariances by autograd, conditioning by dense algebra, signs of slopes."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Matern52KernelGrad, PolynomialKernelGrad, RBFKernelGrad, ScaleKernel

import gpext
from gpext import designs
from gpext.inference import EP, KL, Laplace
from gpext.kernels import PartialDerivativeKernel
from gpext.likelihoods import BernoulliLogitLikelihood, MixedLikelihood
from gpext.models import LatentGP
from gpext.variational import CollapsedBound, SiteVariationalStrategy
from tests.members import F64

GENERATOR = torch.Generator().manual_seed(0)
X = torch.cat(
    [2 * torch.rand(9, 2, dtype=F64, generator=GENERATOR), torch.tensor([0.0, 1, 2, 0, 1, 2, 0, 0, 2])[:, None]], -1
).double()
NEW = torch.tensor([[0.5, 0.5, 0], [0.5, 0.5, 1], [1.5, 0.2, 2]], dtype=F64)
KERNELS = {
    "rbf": (RBFKernelGrad, lambda d: torch.exp(-0.5 * d.square().sum(-1))),
    "matern": (
        Matern52KernelGrad,
        lambda d: (1 + _length(d) + _length(d).square() / 3) * torch.exp(-_length(d)),
    ),
}


def _length(d):
    return (5 * d.square().sum(-1) + 1e-30).sqrt()


def by_autograd(function, lengthscale, a, b):
    """The covariance of the components of two rows of inputs."""
    x, z = (row[:-1].clone().requires_grad_() for row in (a, b))
    value = function((x - z) / lengthscale)
    for row, place in ((a, x), (b, z)):
        if row[-1] > 0:
            (slope,) = torch.autograd.grad(value, place, create_graph=True)
            value = slope[int(row[-1]) - 1]
    return value.item()


@pytest.mark.parametrize("name", KERNELS)
def test_covariances_are_derivatives_of_the_kernel(name):
    make, function = KERNELS[name]
    kernel = PartialDerivativeKernel(make(ard_num_dims=2)).double()
    kernel.base_kernel.lengthscale = torch.tensor([[0.7, 1.2]])
    lengthscale = kernel.base_kernel.lengthscale.detach()[0]
    found = kernel(X[:4], NEW).to_dense()
    for i, a in enumerate(X[:4]):
        for j, b in enumerate(NEW):
            assert found[i, j].item() == pytest.approx(by_autograd(function, lengthscale, a, b), rel=1e-6, abs=1e-9)
    whole = kernel(X).to_dense()
    torch.testing.assert_close(kernel(X, diag=True), whole.diagonal(), rtol=1e-9, atol=1e-9)
    assert bool((torch.linalg.eigvalsh(whole) > 0).all())


@pytest.mark.parametrize("make", [RBFKernelGrad, Matern52KernelGrad, lambda: PolynomialKernelGrad(2)])
def test_all_components_are_the_base_kernel(make):
    base = ScaleKernel(make()).double()
    places, outputs = X[:4, :2], base.num_outputs_per_input(X[:4, :2], X[:4, :2])
    rows = torch.cat([places.repeat_interleave(outputs, 0), torch.arange(outputs).repeat(4)[:, None]], -1)
    kernel = PartialDerivativeKernel(base)
    torch.testing.assert_close(kernel(rows).to_dense(), base(places).to_dense())
    torch.testing.assert_close(kernel(rows.expand(2, -1, -1)).to_dense()[1], base(places).to_dense())
    torch.testing.assert_close(kernel(rows)[1:3, 4:9].to_dense(), base(places).to_dense()[1:3, 4:9])


def test_a_batch_of_kernels():
    base = ScaleKernel(RBFKernelGrad(batch_shape=torch.Size([2])), batch_shape=torch.Size([2])).double()
    base.base_kernel.lengthscale = torch.tensor([0.5, 1.5]).view(2, 1, 1)
    kernel = PartialDerivativeKernel(base)
    assert kernel.batch_shape == (2,)
    found = kernel(X.expand(2, -1, -1)).to_dense()
    one = PartialDerivativeKernel(ScaleKernel(RBFKernelGrad())).double()
    one.base_kernel.base_kernel.lengthscale = 1.5
    torch.testing.assert_close(found[1], one(X).to_dense())


class Prior(gpytorch.Module):
    def __init__(self):
        super().__init__()
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = PartialDerivativeKernel(ScaleKernel(RBFKernelGrad(ard_num_dims=2)))
        self.double()
        self.mean_module.initialize(constant=0.4)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x) * (x[..., -1] == 0), self.covar_module(x))


class Model(LatentGP):
    def __init__(self, x, y, likelihood, rule, design=None):
        super().__init__(x, y, likelihood, rule, design=design)
        self.prior = Prior()

    def forward(self, x):
        return self.prior(x)


def noises(*values):
    found = [gpytorch.likelihoods.GaussianLikelihood().double() for _ in values]
    for likelihood, value in zip(found, values, strict=True):
        likelihood.noise = value
    return found


@pytest.mark.parametrize("rule", [EP(tolerance=1e-10), KL(tolerance=1e-10), Laplace(tolerance=1e-10)])
def test_gaussian_values_and_slopes_are_conjugate(rule):
    """Evidence, its gradient, and predictions of f and of its derivatives by dense algebra."""
    family = (X[:, 2] > 0).long()
    noise = torch.tensor([0.1, 0.3], dtype=F64)
    y = torch.randn(9, dtype=F64, generator=GENERATOR)
    model = Model(X, y, MixedLikelihood(noises(0.1, 0.3), family), rule)
    joint = model.prior(torch.cat([X, NEW]))
    mu, K = joint.mean, joint.covariance_matrix
    S = K[:9, :9] + noise[family].diag()
    exact = torch.distributions.MultivariateNormal(mu[:9], S).log_prob(y)
    value = gpext.mlls.LatentMarginalLogLikelihood(model.likelihood, model)(model(X), y)
    torch.testing.assert_close(9 * value, exact, rtol=1e-7, atol=1e-7)
    parameters = list(model.prior.parameters())
    expected = torch.autograd.grad(exact / 9, parameters, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(value, parameters), expected, rtol=1e-5, atol=1e-7)
    gain = torch.linalg.solve(S, K[:9, 9:]).mT
    with torch.no_grad():
        found = model.eval()(NEW)
        torch.testing.assert_close(found.mean, mu[9:] + gain @ (y - mu[:9]), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found.covariance_matrix, K[9:, 9:] - gain @ K[:9, 9:], rtol=1e-6, atol=1e-7)


def test_the_predicted_derivative_is_the_derivative_of_the_prediction():
    y = torch.randn(9, dtype=F64, generator=GENERATOR)
    model = Model(X, y, MixedLikelihood(noises(0.1, 0.3), (X[:, 2] > 0).long()), EP()).eval()
    step = 1e-5
    with torch.no_grad():
        for j in (0, 1):
            ends = torch.zeros(2, 3, dtype=F64) + NEW[0]
            ends[:, j] += torch.tensor([step, -step], dtype=F64)
            rise = model(ends).mean
            slope = model(PartialDerivativeKernel.inputs(NEW[:1, :2], j + 1)).mean
            assert slope.item() == pytest.approx(((rise[0] - rise[1]) / (2 * step)).item(), rel=1e-5)


def falling():
    """Noisy values of a rising curve that seem to fall, and slopes known to be positive along it."""
    places = torch.linspace(0, 2, 7, dtype=F64).unsqueeze(-1).expand(-1, 2)
    values = PartialDerivativeKernel.inputs(places[::3], 0)
    slopes = torch.cat([PartialDerivativeKernel.inputs(places, j) for j in (1, 2)])
    family = torch.cat([torch.zeros(3), torch.ones(14)]).long()
    y = torch.cat([torch.tensor([0.0, -0.4, 0.5]), torch.ones(14)]).double()
    return torch.cat([values, slopes]), y, family, slopes


@pytest.mark.parametrize("rule", [EP(), KL(), Laplace()])
def test_signs_of_slopes_make_the_curve_rise(rule):
    x, y, family, slopes = falling()
    likelihood = MixedLikelihood([*noises(0.05), BernoulliLogitLikelihood()], family)
    steepness = designs.rows_of((1 + 19 * family).double().diag())
    known = Model(x, y, likelihood, rule, steepness).eval()
    unknown = Model(x[:3], y[:3], noises(0.05)[0], rule).eval()
    with torch.no_grad():
        assert bool((unknown(slopes).mean < -0.1).any())
        assert bool((known(slopes).mean > 0).all())


class Sparse(gpytorch.models.ApproximateGP):
    def __init__(self, x):
        super().__init__(SiteVariationalStrategy(self, x.clone(), learn_inducing_locations=False, jitter_val=1e-9))
        self.prior = Prior()

    def forward(self, x):
        return self.prior(x)


def test_inducing_points_may_be_derivatives():
    x, y, family, slopes = falling()
    likelihood = MixedLikelihood([*noises(0.05), BernoulliLogitLikelihood()], family)
    full, sparse = Model(x, y, likelihood, KL(tolerance=1e-10)).eval(), Sparse(x)
    with torch.no_grad():
        bound = CollapsedBound(sparse.variational_strategy, likelihood, x, y, bound="exact")
        torch.testing.assert_close(bound.settle(tolerance=1e-12), full.result.log_evidence, rtol=1e-5, atol=1e-5)
        bound.commit()
        torch.testing.assert_close(sparse.eval()(slopes).mean, full(slopes).mean, rtol=1e-3, atol=1e-3)


def test_components_that_do_not_exist_are_refused():
    kernel = PartialDerivativeKernel(RBFKernelGrad()).double()
    for component in (3.0, -1.0, 0.5):
        with pytest.raises(ValueError, match=rf"up to 2; got {component:g} at index 0"):
            kernel(PartialDerivativeKernel.inputs(X[:2, :2], component)).to_dense()
