"""Kernel matrices that are not stored, against stored ones; gpytorch's kernels; linear_operator's own suite."""

import unittest

import gpytorch
import linear_operator
import pytest
import torch
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase

from gpext.kernels import keops
from gpext.operators import KernelOperator, compiled_tiles, kernel_operator, tiles
from gpext.operators.profiles import FACTORS

F64 = torch.float64


def made(*profiles, square=True, n=600, m=300, batch=(), dtype=F64, seed=0, backend="tiles"):
    """An operator of n (or n x m) random inputs, its tensors requiring gradients."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*batch, *shape, generator=generator, dtype=F64).to(dtype)

    tensors = [randn(1, 1).exp()]
    for profile in profiles:
        tensors += [randn(n, 3)] if square else [randn(n, 3), randn(m, 3)]
        tensors += [randn(1, 1).exp()] if profile == "rq" else []
    return KernelOperator(*(t.requires_grad_() for t in tensors), profiles=profiles, square=square, backend=backend)


def vectors(op, columns=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(*op.batch_shape, size, columns, generator=generator, dtype=F64).to(op.dtype)
        for size in op.matrix_shape
    )


@pytest.fixture(params=["program", "torch"])
def route(request, monkeypatch):
    """Tiles by the compiled program, or by torch where there is none."""
    if request.param == "torch":
        monkeypatch.setattr(compiled_tiles, "serves", lambda factors: False)


CASES = [(name,) for name in FACTORS] + [("rbf", "matern32"), ("rq", "matern12", "rbf")]


@pytest.mark.slow
@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("profiles", CASES, ids="-".join)
def test_products_and_derivatives_are_those_of_the_stored_matrix(profiles, square):
    op = made(*profiles, square=square)
    u, v = vectors(op)
    dense = op.to_dense()
    torch.testing.assert_close(op @ v, dense @ v, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(op.mT @ u, dense.mT @ u, rtol=1e-10, atol=1e-10)
    ours = torch.autograd.grad((u * (op @ v)).sum(), op._args)
    theirs = torch.autograd.grad((u * (dense @ v)).sum(), op._args)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("profiles", CASES, ids="-".join)
def test_float32(profiles):
    op = made(*profiles, dtype=torch.float32)
    exact = KernelOperator(*(t.detach().double() for t in op._args), profiles=profiles, square=True, backend="tiles")
    _, v = vectors(op)
    size = exact.to_dense().abs() @ v.double().abs()
    found = (op @ v).detach().double()
    assert float((found - exact @ v.double()).div(size).abs().max()) < 1e-5


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("square", [True, False])
def test_batches_are_loops(square):
    op = made("matern52", "rq", square=square, n=40, m=30, batch=(2, 3))
    u, v = vectors(op)
    torch.testing.assert_close(op @ v, op.to_dense() @ v, rtol=1e-10, atol=1e-10)
    shared = v[0, 0]
    torch.testing.assert_close(op @ shared, op.to_dense() @ shared, rtol=1e-10, atol=1e-10)
    ours = torch.autograd.grad((u * (op @ v)).sum(), op._args)
    theirs = torch.autograd.grad((u * (op.to_dense() @ v)).sum(), op._args)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("profile", ["rbf", "matern32"])
def test_inputs_far_apart_keep_their_digits(profile, dtype):
    """Pairs of neighbours, hundreds of thousands of length scales from each other."""
    centres = torch.tensor([[-3e5, 0.0], [2e5, 1e5]], dtype=F64).repeat_interleave(2, 0)
    x = (centres + torch.tensor([[0.0, 0.0], [1.0, 0.5]], dtype=F64).repeat(2, 1)).to(dtype)
    op = KernelOperator(torch.ones(1, 1, dtype=dtype), x, profiles=(profile,), square=True, backend="tiles")
    found = (op @ torch.eye(4, dtype=dtype)).double()
    expected = KernelOperator(torch.ones(1, 1, dtype=F64), x.double(), profiles=(profile,), square=True).to_dense()
    torch.testing.assert_close(found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-10, atol=1e-10)


@pytest.mark.usefixtures("route")
def test_duplicate_inputs_have_correlation_one():
    x = torch.randn(300, 5, generator=torch.Generator().manual_seed(0), dtype=F64)
    x[150:] = x[:150]
    for profile in FACTORS:
        own = [torch.full((1, 1), 0.7, dtype=F64)] if profile == "rq" else []
        op = KernelOperator(torch.ones(1, 1, dtype=F64), x, *own, profiles=(profile,), square=True, backend="tiles")
        eye = torch.eye(300, dtype=F64)
        torch.testing.assert_close(op @ eye, op.to_dense(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("profiles", CASES, ids="-".join)
def test_a_small_matrix_is_stored_at_its_first_product(profiles, square, batch, monkeypatch):
    op = made(*profiles, square=square, n=300, m=270, batch=batch, backend="auto")
    u, v = vectors(op)
    dense = op.to_dense()
    torch.testing.assert_close(op.detach() @ v, dense @ v, rtol=1e-10, atol=1e-10)
    ours = torch.autograd.grad((u * (op @ v)).sum(), op._args)
    theirs = torch.autograd.grad((u * (dense @ v)).sum(), op._args)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    kept = op.detach()
    first = kept @ v
    monkeypatch.setattr(tiles, "_Ready", None)  # nothing is evaluated from now on
    assert torch.equal(kept @ v, first)
    monkeypatch.undo()
    monkeypatch.setattr(kernel_operator, "_MOST_STORED", op.numel() - 1)
    large = op.detach()
    torch.testing.assert_close(large @ v, first, rtol=1e-10, atol=1e-10)
    assert "_stored" not in vars(large)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("backend", ["auto", "tiles"])
@pytest.mark.parametrize("profiles", CASES, ids="-".join)
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_a_block_is_that_of_the_matrix_to_rounding_beside_its_diagonal(profiles, backend, dtype):
    """In single precision except for squared distances, which would lose digits, as they do in a float32 matrix."""
    op = made(*profiles, square=True, n=300, m=300, backend=backend, dtype=dtype).detach()
    scale = 0.5 + torch.rand(300, generator=torch.Generator().manual_seed(1), dtype=F64)
    expected = scale.unsqueeze(-1) * op.to_dense() * scale
    rounding = (2 if dtype == F64 else 30) * torch.finfo(torch.float32).eps * float(expected.diagonal().max())
    for rows, columns in ((slice(0, 300), slice(0, 300)), (slice(40, 90), slice(40, 300)), (slice(299, 300),) * 2):
        found = op.block(rows, columns, scale)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected[rows, columns], rtol=0, atol=rounding)
    assert ("_stored" in vars(op)) == (backend == "auto")


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("profiles", CASES, ids="-".join)
def test_columns_are_those_of_the_matrix(profiles, square, batch):
    op = made(*profiles, square=square, n=90, m=100, batch=batch)
    index = torch.tensor([7, 80, 3])
    found = op.columns(index)
    torch.testing.assert_close(found, op.to_dense()[..., index], rtol=1e-13, atol=1e-13)
    assert not found.requires_grad


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("profiles", CASES, ids="-".join)
def test_a_bilinear_form_and_its_derivatives_come_from_one_pass(profiles, square, batch, monkeypatch):
    op = made(*profiles, square=square, n=60, m=50, batch=batch)
    u, v = (t.requires_grad_() for t in vectors(op))
    expected = (u * (op.to_dense() @ v)).sum((-2, -1))
    theirs = torch.autograd.grad(expected.square().sum(), [*op._args, u, v])
    monkeypatch.setattr(compiled_tiles, "product", None)
    monkeypatch.setattr(tiles, "product", None)
    found = op.bilinear_form(u.detach(), v.detach())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    ours = torch.autograd.grad(found.square().sum(), op._args)
    monkeypatch.undo()
    ours += torch.autograd.grad(op.bilinear_form(u, v).square().sum(), [u, v])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 511, 512, 513, 1600])
def test_tiles_cover_the_matrix_once_whatever_the_threads(threads, n, monkeypatch):
    monkeypatch.setattr(tiles, "_FEW", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    op = made("matern32", n=n)
    u, v = vectors(op)
    torch.testing.assert_close(op @ v, op.to_dense() @ v, rtol=1e-10, atol=1e-10)
    ours = torch.autograd.grad((u * (op @ v)).sum(), op._args)
    theirs = torch.autograd.grad((u * (op.to_dense() @ v)).sum(), op._args)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("profiles", [("matern32",), ("matern12", "rbf")], ids="-".join)
def test_blocks_and_columns_are_whole_whatever_the_threads(threads, profiles, monkeypatch):
    monkeypatch.setattr(tiles, "_FEW", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    op = made(*profiles, n=1100).detach()
    dense, scale = op.to_dense(), torch.linspace(0.5, 1.5, 1100, dtype=F64)
    index = torch.randperm(1100, generator=torch.Generator().manual_seed(0))[:50]
    torch.testing.assert_close(op.columns(index), dense[:, index], rtol=1e-13, atol=1e-13)
    rounding = 4 * torch.finfo(torch.float32).eps * float(dense.diagonal().max())
    for rows, columns in ((slice(0, 300), slice(0, 1100)), (slice(257, 514), slice(257, 1100))):
        expected = scale[rows].unsqueeze(-1) * dense[rows, columns] * scale[columns]
        torch.testing.assert_close(op.block(rows, columns, scale).double(), expected, rtol=0, atol=rounding)


@pytest.mark.parametrize("number", [2, 3, 7])
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize(("route", "profiles"), [(tiles, ("matern32", "rq")), (compiled_tiles, ("matern32", "rbf"))])
def test_parts_add_up(route, profiles, square, number):
    op = made(*profiles, n=1100, square=square).detach()
    u, v = vectors(op)
    parts = [(k, number) for k in range(number)]
    total = sum(route.product(op.factors, v, part) for part in parts)
    torch.testing.assert_close(total, route.product(op.factors, v), rtol=1e-12, atol=1e-12)
    whole = route.derivatives(op.factors, u, v)
    found = [route.derivatives(op.factors, u, v, part) for part in parts]
    torch.testing.assert_close(sum(f.value for f in found), whole.value, rtol=1e-12, atol=1e-12)
    for name in ("x", "y", "alpha"):
        for j, expected in enumerate(getattr(whole, name)):
            if expected is not None:
                torch.testing.assert_close(sum(getattr(f, name)[j] for f in found), expected, rtol=1e-10, atol=1e-10)


def test_bad_tensors_are_refused():
    x = torch.zeros(5, 2)
    with pytest.raises(ValueError, match="expected profiles among"):
        KernelOperator(torch.ones(1, 1), x, profiles=("cauchy",), square=True)
    with pytest.raises(ValueError, match="2 tensors"):
        KernelOperator(torch.ones(1, 1), x, profiles=("rbf",), square=False)
    with pytest.raises(ValueError, match="equally many"):
        KernelOperator(torch.ones(1, 1), x, x[:3], profiles=("rbf", "rbf"), square=True)


# ---- kernels -------------------------------------------------------------------------------------------------------

KERNELS = {
    "rbf": lambda k: k.RBFKernel(ard_num_dims=3),
    "rbf isotropic": lambda k: k.RBFKernel(),
    "matern12": lambda k: k.MaternKernel(nu=0.5, ard_num_dims=3),
    "matern32": lambda k: k.MaternKernel(nu=1.5),
    "matern52": lambda k: k.MaternKernel(nu=2.5, ard_num_dims=3),
    "rq": lambda k: k.RQKernel(ard_num_dims=3),
    "periodic": lambda k: k.PeriodicKernel(ard_num_dims=3),
    "active": lambda k: k.RBFKernel(active_dims=(0, 2)),
    "scaled": lambda k: gpytorch.kernels.ScaleKernel(k.MaternKernel(nu=2.5)),
    "sum": lambda k: gpytorch.kernels.ScaleKernel(k.RBFKernel()) + k.MaternKernel(nu=1.5),
    "product": lambda k: k.RBFKernel(ard_num_dims=3) * k.PeriodicKernel(),
    "scaled product": lambda k: gpytorch.kernels.ScaleKernel(k.RBFKernel() * k.MaternKernel(nu=0.5) * k.RQKernel()),
}


@pytest.mark.parametrize("other", [None, 150])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_agree_with_those_of_gpytorch(name, other):
    torch.manual_seed(0)
    ours, theirs = KERNELS[name](keops).double(), KERNELS[name](gpytorch.kernels).double()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, 0.3, 0.3)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(400, 3, dtype=F64)
    y = x if other is None else torch.randn(other, 3, dtype=F64)
    v, u = torch.randn(len(y), 2, dtype=F64), torch.randn(len(x), 2, dtype=F64)
    with gpytorch.settings.max_cholesky_size(100):
        lazy = ours(x, y)
        found = lazy @ v
        (u * found).sum().backward()
    stored = theirs(x, y).to_dense()
    expected = stored @ v
    (u * expected).sum().backward()
    tolerance = 1e-5 if "matern12" in name or "scaled product" in name else 1e-7  # gpytorch's own distances err
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance)


def test_kernels_stay_lazy_and_small_matrices_dense():
    kernel = keops.RBFKernel() * keops.MaternKernel(nu=1.5)
    x = torch.randn(900, 2)
    assert isinstance(kernel(x).evaluate_kernel(), KernelOperator)
    assert isinstance(kernel(x, x[:20]).evaluate_kernel(), KernelOperator)  # a small other side
    assert not isinstance(kernel(x[:500]).evaluate_kernel(), KernelOperator)


def test_gradients_reach_inputs_on_either_side():
    kernel = keops.MaternKernel(nu=2.5).double()
    x, y = torch.randn(40, 2, dtype=F64, requires_grad=True), torch.randn(30, 2, dtype=F64, requires_grad=True)
    with gpytorch.settings.max_cholesky_size(10):
        ours = torch.autograd.grad((kernel(x, y) @ torch.ones(30, 1, dtype=F64)).sum(), [x, y])
        both = torch.autograd.grad((kernel(x, x) @ torch.ones(40, 1, dtype=F64)).sum(), [x])
    dense = gpytorch.kernels.MaternKernel(nu=2.5).double()
    for a, b in zip(ours, torch.autograd.grad(dense(x, y).to_dense().sum(), [x, y]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(both[0], torch.autograd.grad(dense(x, x).to_dense().sum(), [x])[0], rtol=1e-7, atol=1e-7)


# ---- linear_operator's own suite -----------------------------------------------------------------------------------


class TestSquare(LinearOperatorTestCase, unittest.TestCase):
    seed = 0

    def create_linear_op(self):
        x = torch.tensor([[0.0], [1.7], [3.1], [4.9], [7.5]]).requires_grad_()
        return KernelOperator(torch.tensor([[1.5]]).requires_grad_(), x, profiles=("rbf",), square=True)

    def evaluate_linear_op(self, linear_op):
        return linear_op.to_dense()


class TestSquareTiles(TestSquare):
    def create_linear_op(self):
        x = torch.tensor([[0.0], [1.7], [3.1], [4.9], [7.5]]).requires_grad_()
        scale = torch.tensor([[1.5]]).requires_grad_()
        return KernelOperator(scale, x, profiles=("rbf",), square=True, backend="tiles")


class TestSquareBatch(TestSquare):
    def create_linear_op(self):
        scales = torch.tensor([1.0, 1.2, 0.9]).view(3, 1, 1)
        x = torch.tensor([[0.0], [1.7], [3.1], [4.9], [7.5]]).repeat(3, 1, 1) * scales
        alpha = torch.tensor([1.0, 2.0, 0.5]).view(3, 1, 1).requires_grad_()
        scale = torch.tensor([1.5, 1.0, 2.0]).view(3, 1, 1).requires_grad_()
        return KernelOperator(scale, x.requires_grad_(), alpha, profiles=("rq",), square=True)


class TestRectangular(RectangularLinearOperatorTestCase, unittest.TestCase):
    seed = 0

    def create_linear_op(self):
        x, y = torch.randn(5, 2).requires_grad_(), torch.randn(6, 2).requires_grad_()
        return KernelOperator(torch.tensor([[1.5]]).requires_grad_(), x, y, profiles=("matern52",), square=False)

    def evaluate_linear_op(self, linear_op):
        return linear_op.to_dense()


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("profiles", [("rbf",), ("rq", "matern12")], ids="-".join)
def test_vectors_of_another_size_or_dtype_are_refused(profiles):
    """The program would misread them, and read beyond their memory."""
    op = made(*profiles, n=300, m=200, square=False).detach()
    u, v = vectors(op)
    for wrong in (v.float(), v.long(), v[:5], torch.cat([v, v])):
        with pytest.raises(ValueError, match=r"expected vectors \(..., 200, R\) of torch.float64"):
            op._matmul(wrong)
        with pytest.raises(ValueError, match=r"expected vectors \(..., 200, R\) of torch.float64"):
            op.bilinear_form(u, wrong)
    with pytest.raises(ValueError, match=r"expected vectors \(..., 300, R\) of torch.float64"):
        op.bilinear_form(u.float(), v)
    with pytest.raises(ValueError, match=r"of torch\.float32"):
        op @ v[:, 0].float()


def test_tensors_of_several_dtypes_are_refused():
    x = torch.rand(300, 2)
    with pytest.raises(ValueError, match=r"expected tensors of one dtype; got torch\.float32 and torch\.float64"):
        KernelOperator(torch.ones(1, 1), x, x.double(), profiles=("rbf", "rbf"), square=True)
    kernel = keops.RBFKernel(backend="tiles").double()
    with linear_operator.settings.debug(False):
        mixed = KernelOperator(torch.ones(1, 1), x, x.double(), profiles=("rbf", "rbf"), square=True, backend="tiles")
        with pytest.raises(ValueError, match=r"of torch\.float32 and torch\.float64"):
            mixed @ torch.ones(300, 1)
    promoted = kernel(x).evaluate_kernel()  # float32 inputs, float64 parameters
    assert promoted.dtype == F64
    torch.testing.assert_close(promoted @ torch.ones(300, 1, dtype=F64), promoted.to_dense().sum(-1, keepdim=True))
