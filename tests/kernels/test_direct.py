"""The kernels with derivatives in closed form, against gpytorch's."""

import math

import gpytorch
import pytest
import torch

from gpext.kernels import dense_covariance, direct_covariance, matern52, squared_exponential

F64 = torch.float64
KERNELS = {"squared exponential": gpytorch.kernels.RBFKernel, "Matern-5/2": gpytorch.kernels.MaternKernel}
FUNCTIONS = pytest.mark.parametrize("function", [squared_exponential, matern52])


def kernel(name, ard, scaled=True):
    base = KERNELS[name](ard_num_dims=ard).to(F64)
    base.lengthscale = torch.linspace(0.5, 1.5, ard or 1, dtype=F64)
    if not scaled:
        return base
    scale = gpytorch.kernels.ScaleKernel(base).to(F64)
    scale.outputscale = 2.3
    return scale


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("ard", [None, 3])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_values_and_first_derivatives_are_gpytorchs(name, ard, scaled, same):
    torch.manual_seed(0)
    k = kernel(name, ard, scaled)
    x1 = torch.randn(7, 3, dtype=F64, requires_grad=True)
    x2 = x1 if same else torch.randn(9, 3, dtype=F64, requires_grad=True)
    inputs = [x1, *k.parameters()] if same else [x1, x2, *k.parameters()]
    ours, variance = direct_covariance(k, x1, x2)
    theirs = k(x1, x2).to_dense()
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(variance, k(x2, diag=True), rtol=1e-13, atol=1e-13)
    weights = torch.randn_like(ours)
    with torch.no_grad():
        torch.testing.assert_close(direct_covariance(k, x1, x2)[0], ours, rtol=0, atol=0)
    mine = torch.autograd.grad((ours * weights).sum(), inputs)
    reference = torch.autograd.grad((theirs * weights).sum(), inputs)
    for a, b in zip(mine, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("batch", [(4,), (2, 3)])
@pytest.mark.parametrize("scale", [None, (), "own"])
@pytest.mark.parametrize("same", [True, False])
def test_so_are_those_of_a_batch_of_kernels(name, batch, scale, same):
    """With an outputscale for each, one for all, or none."""
    generator = torch.Generator().manual_seed(0)
    k = KERNELS[name](ard_num_dims=3, batch_shape=torch.Size(batch))
    if scale is not None:
        k = gpytorch.kernels.ScaleKernel(k, batch_shape=torch.Size(batch if scale == "own" else scale))
    k.to(F64)
    for parameter in k.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64))
    x1 = torch.randn(7, 3, dtype=F64, generator=generator, requires_grad=True)
    x2 = x1 if same else torch.randn(9, 3, dtype=F64, generator=generator, requires_grad=True)
    ours, variance = direct_covariance(k, x1, x2)
    theirs = k(x1, x2).to_dense()
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(variance, k(x2, diag=True), rtol=1e-13, atol=1e-13)
    weights = torch.randn(ours.shape, generator=generator, dtype=F64)
    inputs = [x1, *k.parameters()] if same else [x1, x2, *k.parameters()]
    mine = torch.autograd.grad((ours * weights).sum(), inputs)
    reference = torch.autograd.grad((theirs * weights).sum(), inputs)
    for a, b in zip(mine, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_a_batch_with_a_member_beyond_this_arithmetic_comes_from_differences():
    k = gpytorch.kernels.RBFKernel(batch_shape=torch.Size([3])).to(F64)
    k.raw_lengthscale_constraint = gpytorch.constraints.Positive(torch.exp)
    k.raw_lengthscale.data = torch.tensor([0.0, -30.0, 0.0], dtype=F64).view(3, 1, 1)
    x = torch.rand(5, 2, dtype=F64)
    ours, variance = direct_covariance(k, x, x)
    torch.testing.assert_close(ours, k(x).to_dense(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(ours[1], torch.eye(5, dtype=F64), rtol=0, atol=0)
    torch.testing.assert_close(variance, torch.ones(3, 5, dtype=F64))


@pytest.mark.filterwarnings("ignore:The last_dim_is_batch argument:DeprecationWarning")
def test_a_kernel_for_each_column_is_left_to_gpytorch():
    k, x = gpytorch.kernels.RBFKernel().to(F64), torch.randn(6, 3, dtype=F64)
    of_columns = k(x, last_dim_is_batch=True)
    torch.testing.assert_close(dense_covariance(of_columns), of_columns.to_dense())


@FUNCTIONS
def test_inputs_far_from_the_origin_keep_their_digits(function):
    x = torch.linspace(0, 1, 6, dtype=F64).unsqueeze(-1)
    one = torch.ones(1, 1, dtype=F64)
    near = function(x, x, one, one)
    far = function(x + 1e6, x + 1e6, one, one)
    torch.testing.assert_close(far, near, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(("lengthscale", "outputscale"), [(1.0, 0.0), (1.0, 1e-200), (1e-30, 1e-200)])
def test_outputscales_beyond_this_arithmetic_are_left_to_gpytorch(dtype, lengthscale, outputscale):
    k = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).to(dtype)
    k.base_kernel.raw_lengthscale_constraint = k.raw_outputscale_constraint = gpytorch.constraints.Positive(torch.exp)
    k.base_kernel.raw_lengthscale.data.fill_(math.log(lengthscale))
    k.raw_outputscale.data.fill_(math.log(outputscale) if outputscale else -1e9)
    x = torch.rand(5, 2, dtype=dtype)
    assert direct_covariance(k, x, x) is None


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("far", ["first", "second"])
def test_inputs_too_far_apart_for_their_squares_come_from_differences(dtype, name, far):
    """On both sides of the limit entries have six tenths of a dtype's digits."""
    k = KERNELS[name]().to(dtype)
    k.lengthscale = 1.0
    reach = (2 * torch.finfo(dtype).eps ** -0.4) ** 0.5 / (1.0 if name == "squared exponential" else math.sqrt(5))
    for factor in (0.9, 1.1):
        wide = torch.tensor([[0.0], [-1.0], [1.0]], dtype=dtype) * reach * factor
        near = torch.tensor([[0.0], [0.3], [-0.3]], dtype=dtype)
        inputs = (wide, wide + near) if far == "first" else (near, wide)
        found, _ = direct_covariance(k, *inputs)
        exact = k.to(F64)(*(each.double() for each in inputs)).to_dense()
        k.to(dtype)
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=2 * torch.finfo(dtype).eps ** 0.6)


@FUNCTIONS
def test_a_second_derivative_is_refused_not_wrong(function):
    x = torch.randn(4, 2, dtype=F64, requires_grad=True)
    one = torch.ones(1, 1, dtype=F64)
    (first,) = torch.autograd.grad(function(x, x, one, one).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"does not require grad|once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize(
    "other",
    [
        gpytorch.kernels.MaternKernel(1.5),
        gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(), batch_shape=torch.Size([2])),
        gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(0.5)),
        gpytorch.kernels.RBFKernel() + gpytorch.kernels.RBFKernel(),
    ],
)
def test_other_kernels_are_left_to_gpytorch(other):
    x = torch.randn(4, 2)
    assert direct_covariance(other, x, x) is None


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("scaled", [True, False])
def test_a_whole_matrix_of_some_columns_is_gpytorchs(name, scaled):
    torch.manual_seed(0)
    base = KERNELS[name](ard_num_dims=2, active_dims=[2, 0]).to(F64)
    base.lengthscale = torch.tensor([0.4, 1.3], dtype=F64)
    k = gpytorch.kernels.ScaleKernel(base).to(F64) if scaled else base
    x = torch.randn(8, 3, dtype=F64)
    torch.testing.assert_close(dense_covariance(k(x)), k(x).to_dense(), rtol=1e-13, atol=1e-13)
    weights, parameters = torch.randn(8, 8, dtype=F64), list(k.parameters())
    mine = torch.autograd.grad((dense_covariance(k(x)) * weights).sum(), parameters)
    reference = torch.autograd.grad((k(x).to_dense() * weights).sum(), parameters)
    for a, b in zip(mine, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_equal_rows_have_the_variance_of_one_and_finite_derivatives():
    x = torch.tensor([[1e3, -2.0], [1e3, -2.0], [0.3, 0.0]], dtype=F64)
    lengthscale = torch.tensor([[0.1, 0.2]], dtype=F64, requires_grad=True)
    found = matern52(x, x, lengthscale, torch.tensor(2.0, dtype=F64))
    torch.testing.assert_close(found[:2, :2], torch.full((2, 2), 2.0, dtype=F64), rtol=1e-9, atol=0)
    (slope,) = torch.autograd.grad(found.sum(), lengthscale)
    assert slope.isfinite().all()
