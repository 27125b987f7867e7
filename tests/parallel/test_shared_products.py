"""Products whose tiles are shared out over ranks, and what is built on them, are those of one process."""

import gpytorch
import pytest
import torch

from gpext.kernels import keops
from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.operators import UnbiasedSolver
from gpext.optim import SGLD
from gpext.parallel import Ranks
from gpext.samplers import SGLDSampler
from gpext.solvers import conjugate_gradients
from tests.members import F64
from tests.parallel.processes import run

N = 300


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        smooth = gpytorch.kernels.ScaleKernel(keops.RBFKernel(ard_num_dims=2, backend="tiles"))
        self.covar_module = smooth + keops.MaternKernel(nu=1.5, backend="tiles")
        self.to(F64)
        self.likelihood.noise = 0.2

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def shared_sampler(ranks=None, n=60):
    """SGLD whose gradients are made of products of lazy kernels, also at this size."""
    with gpytorch.settings.max_cholesky_size(10):
        made = SGLDSampler(_mll(n, ranks), ["likelihood.noise_covar.noise", "covar_module.kernels.0.outputscale"])
    gradient = made.target.gradient

    def lazily(*args, **kwargs):
        with gpytorch.settings.max_cholesky_size(10):
            return gradient(*args, **kwargs)

    made.target.gradient = lazily
    return made


def results(ranks=None):
    """Products, a solve, a stochastic gradient and draws, lazily also at this size."""
    with gpytorch.settings.max_cholesky_size(10):
        return _results(ranks)


def _mll(n, ranks):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 2, generator=generator, dtype=F64)
    y = torch.sin(4 * x.sum(-1)) + 0.3 * torch.randn(n, generator=generator, dtype=F64)
    model = Model(x, y)
    if ranks is not None:
        keops.share_products(model, ranks)
    solver = UnbiasedSolver(generator=torch.Generator().manual_seed(1))
    return UnbiasedMarginalLogLikelihood(model.likelihood, model, solver=solver)


def _results(ranks):
    mll = _mll(N, ranks)
    model = mll.model
    (x,), y = model.train_inputs, model.train_targets
    kernel = model.covar_module
    before = 0 if ranks is None else ranks.traffic.numbers
    K = kernel(x).evaluate_kernel()
    with torch.no_grad():
        product = K @ y
        per_product = (ranks.traffic.numbers - before if ranks is not None else 0, 2 * (N + 5))  # two kernels
        solution = conjugate_gradients(lambda v: K._matmul(v) + 0.2 * v, y, tolerance=1e-10).solution
    (-mll(model(x), y)).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    optimizer = SGLD(list(model.parameters()), lr=1e-3, generator=torch.Generator().manual_seed(2))
    for _ in range(5):
        optimizer.zero_grad()
        (-N * mll(model(x), y)).backward()
        optimizer.step()
    draws = torch.cat([p.detach().flatten() for p in model.parameters()])
    return [product, solution, gradient, draws], per_product


def _of_rank(rank):
    return results(Ranks())


@pytest.mark.parametrize("size", [2, 4])
def test_everything_is_as_in_one_process(size):
    expected, _ = results()
    for (found, (numbers, bound)), error in run(_of_rank, size):
        assert error is None
        assert numbers <= bound
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
