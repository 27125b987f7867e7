"""Kernels whose lengthscales are far shorter than the range of the inputs."""

import math

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

from gpext.inference import Laplace
from gpext.kernels import accurate, dense_covariance, direct_covariance
from gpext.kernels.by_differences import KernelByDifferences
from gpext.likelihoods import BernoulliLogitLikelihood, PoissonLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models import LatentGP

F64 = torch.float64
KERNELS = {
    "squared exponential": RBFKernel,
    "Matern-1/2": lambda **options: MaternKernel(0.5, **options),
    "Matern-3/2": lambda **options: MaternKernel(1.5, **options),
    "Matern-5/2": lambda **options: MaternKernel(2.5, **options),
}
SHORT = 1e-9


def inputs(size, seed=0):
    """One column of three values, which a short lengthscale tells apart, and one of many."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(3, (size, 1), generator=generator) / 3
    return torch.cat([groups.double(), torch.randn(size, 1, generator=generator, dtype=F64)], -1)


def kernel(name, *, batch=(), scaled=True):
    shape = torch.Size(batch)
    base = KERNELS[name](ard_num_dims=2, batch_shape=shape)
    k = (ScaleKernel(base, batch_shape=shape) if scaled else base).to(F64)
    base.lengthscale = torch.tensor([SHORT, 0.8], dtype=F64)
    if scaled:
        k.outputscale = 100.0
    return k


def by_groups(name, x1, x2, *, scaled=True):
    """What the kernel is where a lengthscale is zero: none between groups."""
    base = KERNELS[name]().to(F64)
    base.lengthscale = torch.tensor(0.8, dtype=F64)
    same = (x1[..., :1] == x2[..., :1].mT).to(F64)
    return (100.0 if scaled else 1.0) * same * base(x1[..., 1:], x2[..., 1:]).to_dense()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("scaled", [True, False])
def test_data_alike_in_a_column_are_at_no_distance_there(name, batch, scaled):
    x, other = inputs(60), inputs(20, seed=1)
    k = kernel(name, batch=batch, scaled=scaled)
    expected = by_groups(name, x, x, scaled=scaled).expand(*batch, -1, -1)
    torch.testing.assert_close(dense_covariance(k(x)), expected, rtol=1e-12, atol=1e-12)
    cross = accurate(k(torch.cat([x, other])))[..., :60, 60:]
    torch.testing.assert_close(
        cross.to_dense(), by_groups(name, x, other, scaled=scaled).expand(*batch, -1, -1), rtol=1e-12, atol=1e-12
    )
    variance = accurate(k(x)).diagonal(dim1=-1, dim2=-2)
    torch.testing.assert_close(variance, expected.diagonal(dim1=-1, dim2=-2))
    assert torch.linalg.eigvalsh(dense_covariance(k(x))).min() > -1e-10
    with torch.no_grad():  # gpytorch's matrix is another, or there would be no need
        assert (k(x).to_dense() - expected).abs().max() > 0.1 * expected.max()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("short", [1e-3, 1e-7])
def test_derivatives_are_those_of_differences(name, short):
    x1, x2 = inputs(15), inputs(10, seed=1)
    x1[:, 0] += 2 * short * torch.rand(15, dtype=F64, generator=torch.Generator().manual_seed(2))
    base = KERNELS[name](ard_num_dims=2)
    k = ScaleKernel(base).to(F64)
    base.lengthscale = torch.tensor([short, 0.8], dtype=F64)
    weights = torch.randn(15, 10, dtype=F64, generator=torch.Generator().manual_seed(3))
    leaves = [x1.requires_grad_(), x2.requires_grad_(), *k.parameters()]
    unit = 1.0 if name == "squared exponential" else math.sqrt(2 * base.nu)

    def plain():
        squares = (unit * (x1.unsqueeze(-2) - x2.unsqueeze(-3)) / base.lengthscale).square().sum(-1)
        t = squares.clamp_min(1e-300).sqrt()
        rest = {0.5: 1, 1.5: 1 + t, 2.5: 1 + t + squares / 3}
        value = (-squares / 2).exp() if unit == 1.0 and isinstance(base, RBFKernel) else rest[base.nu] * (-t).exp()
        return k.outputscale * value

    found = KernelByDifferences(k).forward(x1, x2)
    torch.testing.assert_close(found, plain(), rtol=0, atol=10 * torch.finfo(F64).eps / short)  # |z| eps, not |z|^2 eps
    ours = torch.autograd.grad((found * weights).sum(), leaves)
    reference = torch.autograd.grad((plain() * weights).sum(), leaves)
    for mine, theirs in zip(ours, reference, strict=True):
        assert (mine - theirs).abs().max() < 1e-7 * theirs.abs().max()


def test_a_kernel_whose_squares_have_digits_stays_as_it_is():
    x = inputs(10)
    usual = ScaleKernel(RBFKernel()).to(F64)(x)
    assert accurate(usual) is usual
    of_others = (gpytorch.kernels.RQKernel() + RBFKernel()).to(F64)(x)
    assert accurate(of_others) is of_others
    dense = kernel("Matern-3/2")(x).evaluate_kernel()
    assert accurate(dense) is dense


@pytest.mark.parametrize("name", KERNELS)
def test_terms_of_sums_and_products_take_their_own_columns(name):
    x, new = inputs(50), inputs(20, seed=1)
    smooth, linear = RBFKernel(active_dims=[1]).to(F64), gpytorch.kernels.LinearKernel(active_dims=[1]).to(F64)
    alone = KERNELS[name](active_dims=[0]).to(F64)
    alone.lengthscale = torch.tensor(SHORT, dtype=F64)
    found = accurate((ScaleKernel(alone).to(F64) * smooth + linear)(torch.cat([x, new])))[..., :50, 50:].to_dense()
    same = math.log(2) * (x[:, :1] == new[:, :1].mT)
    torch.testing.assert_close(found, same * smooth(x, new).to_dense() + linear(x, new).to_dense())


class Model(LatentGP):
    def __init__(self, x, y, likelihood, covariance):
        super().__init__(x, y, likelihood, Laplace())
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = covariance
        self.double()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Groups(gpytorch.kernels.Kernel):
    def forward(self, x1, x2, diag=False, **params):
        return (x1 == x2).squeeze(-1).double() if diag else (x1 == x2.mT).double()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("likelihood", [BernoulliLogitLikelihood, PoissonLikelihood])
@pytest.mark.parametrize("added", [False, True])
def test_evidence_and_predictions_are_those_of_a_kernel_by_groups(name, likelihood, added):
    x, new = inputs(80), inputs(30, seed=1)
    y = (x[:, 1] + x[:, 0] > 0.3).double()
    short = kernel(name)
    short.outputscale = 3.0
    alone = KERNELS[name](active_dims=[1]).to(F64)
    alone.lengthscale = torch.tensor(0.8, dtype=F64)
    limit = ScaleKernel(Groups(active_dims=[0]) * alone).to(F64)
    limit.outputscale = 3.0
    found = []
    for covariance in (short, limit):
        covariance = covariance + RBFKernel(active_dims=[1]) if added else covariance
        model = Model(x, y, likelihood(), covariance)
        value = LatentMarginalLogLikelihood(model.likelihood, model)(model.train()(x), y)
        q = model.eval()(new)
        found.append((value, q.mean, q.variance, q.covariance_matrix))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)


def test_both_ways_agree_where_both_have_digits():
    x = inputs(40)
    for short in (2e-3, 1e-4):  # on both sides of the limit
        k = kernel("squared exponential")
        k.base_kernel.lengthscale = torch.tensor([short, 0.8], dtype=F64)
        torch.testing.assert_close(
            direct_covariance(k, x, x)[0], by_groups("squared exponential", x, x), rtol=1e-7, atol=1e-7
        )
