"""Lazy kernels against gpytorch's own, below and above the size up to which those are stored."""

import gpytorch
import pytest
import torch

from gpext.kernels import keops
from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.operators import KernelOperator

F64 = torch.float64


@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_backend_that_was_asked_for_serves_small_matrices_too(batch):
    options = {"nu": 1.5, "ard_num_dims": 2, "batch_shape": torch.Size(batch)}
    lazy, stock = (
        kernels.MaternKernel(**options, **own).double()
        for kernels, own in ((keops, {"backend": "tiles"}), (gpytorch.kernels, {}))
    )
    x, z = torch.rand(*batch, 9, 2, dtype=F64), torch.rand(*batch, 4, 2, dtype=F64)
    v = torch.rand(*batch, 9, 3, dtype=F64)
    assert isinstance(lazy(x).evaluate_kernel(), KernelOperator)
    torch.testing.assert_close(lazy(z, x) @ v, stock(z, x).to_dense() @ v)
    noisy, dense = lazy(x).add_jitter(0.1), stock(x).to_dense() + 0.1 * torch.eye(9, dtype=F64)
    torch.testing.assert_close(noisy.solve(v), torch.linalg.solve(dense, v))
    slopes = [
        torch.autograd.grad(value.sum(), kernel.raw_lengthscale)[0]
        for value, kernel in ((noisy.logdet(), lazy), (torch.logdet(dense), stock))
    ]
    torch.testing.assert_close(*slopes)
    for backend in ("auto", "dense"):
        assert not isinstance(keops.RBFKernel(backend=backend)(x).evaluate_kernel(), KernelOperator)


def test_an_input_that_is_no_number_is_told():
    x, z = torch.rand(9, 2, dtype=F64), torch.rand(4, 2, dtype=F64)
    bad = x.index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(torch.nan, dtype=F64))
    kernel = keops.RBFKernel(backend="tiles").double()
    for pair in ((bad,), (z, bad), (bad, z)):
        with pytest.raises(ValueError, match=r"inputs must be finite; got nan at index \(3, 1\)"):
            kernel(*pair).evaluate_kernel()


PRODUCTS = {
    "of a sum": lambda k, s: (k.RBFKernel() + k.MaternKernel(nu=0.5)) * k.PeriodicKernel(),
    "by a sum": lambda k, s: k.PeriodicKernel() * (k.RBFKernel() + k.MaternKernel(nu=0.5)),
    "of sums": lambda k, s: (k.RBFKernel() + k.RQKernel()) * (k.MaternKernel(nu=0.5) + s.ScaleKernel(k.RBFKernel())),
    "of a scaled sum": lambda k, s: s.ScaleKernel(k.RBFKernel() + k.MaternKernel(nu=0.5)) * k.MaternKernel(),
    "with a stored one": lambda k, s: k.MaternKernel(nu=0.5) * gpytorch.kernels.LinearKernel(),
    "by a lazy one": lambda k, s: s.ScaleKernel(gpytorch.kernels.LinearKernel()) * k.MaternKernel(nu=0.5),
    "by columns": lambda k, s: k.RBFKernel(active_dims=(0,)) * k.MaternKernel(active_dims=(1,)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_kernels_are_exact(name):
    """Also beyond the size up to which gpytorch's are exact; other inputs may share a column with the first ones."""
    torch.manual_seed(0)
    ours, theirs = (PRODUCTS[name](k, s).double() for k, s in ((keops, keops), (gpytorch.kernels,) * 2))
    for p in theirs.parameters():
        torch.nn.init.normal_(p, 0.0, 0.5)
    ours.load_state_dict(theirs.state_dict())
    x, z = torch.rand(150, 2, dtype=F64), torch.rand(150, 2, dtype=F64)
    z[:, 0] = x[:, 0]
    for pair in ((x, x), (x, z), (x[:40], x)):
        stored = theirs(*pair).to_dense()
        with gpytorch.settings.max_cholesky_size(20):
            found = ours(*pair)
            torch.testing.assert_close(found.to_dense(), stored, rtol=1e-7, atol=1e-7)  # gpytorch's distances err
            u, v = torch.rand(len(pair[0]), 2, dtype=F64), torch.rand(len(pair[1]), 2, dtype=F64)
            slopes = torch.autograd.grad((u * (found @ v)).sum(), list(ours.parameters()))
        expected = torch.autograd.grad((u * (stored @ v)).sum(), list(theirs.parameters()))
        for a, b in zip(slopes, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_an_objective_refuses_a_product_that_is_approximated():
    class Model(gpytorch.models.ExactGP):
        def __init__(self, x, kernel):
            super().__init__(x, x.sum(-1), gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernel

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    x = torch.rand(60, 2)
    pair = keops.RBFKernel() + keops.MaternKernel(), keops.RBFKernel()
    approximate = Model(x, gpytorch.kernels.ScaleKernel(gpytorch.kernels.ProductKernel(*pair)))
    exact = Model(x, gpytorch.kernels.ScaleKernel(keops.ProductKernel(*pair)))
    with gpytorch.settings.max_cholesky_size(20):
        UnbiasedMarginalLogLikelihood(exact.likelihood, exact)(exact(x), x.sum(-1))
        mll = UnbiasedMarginalLogLikelihood(approximate.likelihood, approximate)
        with pytest.raises(ValueError, match="ProductKernel multiplies matrices that are not stored by roots"):
            mll(approximate(x), x.sum(-1))
