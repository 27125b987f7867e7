"""Products by KeOps on the CPU against stored matrices, and the choice of a backend.

A formula takes seconds to compile, so only a few are compiled; the formula of each profile is checked in Python.
"""

import math
import pickle

import gpytorch
import pykeops
import pytest
import torch

from gpext.kernels import keops
from gpext.operators import KeOpsUnavailableWarning, KernelOperator, keops_products, tiles
from gpext.operators.profiles import FACTORS, smooth_value
from tests.operators.test_kernel_operator import CASES, made, vectors

F64 = torch.float64


def with_backend(op, backend):
    return KernelOperator(*op._args, profiles=op.profiles, square=op.square, backend=backend)


def check_against_dense(op, columns, tolerance):
    u, v = vectors(op, columns)
    ours, dense = with_backend(op, "keops"), op.to_dense()
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(ours @ v, dense @ v, **close)
    found = torch.autograd.grad((u * (ours @ v)).sum(), op._args)
    expected = torch.autograd.grad((u * (dense @ v)).sum(), op._args)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("square", [True, False])
def test_products_and_derivatives(square):
    """The one profile without a slope at zero, which is on the diagonal."""
    check_against_dense(made("matern12", square=square, n=40, m=30), 2 if square else 3, 1e-10)


@pytest.mark.slow
def test_a_product_of_factors_in_float32():
    op = with_backend(made("rbf", "rq", n=40, m=30, dtype=torch.float32), "keops").detach()
    _, v = vectors(op, 4)
    torch.testing.assert_close(op @ v, op.to_dense() @ v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("profile", FACTORS)
def test_what_keops_is_told_is_the_profile(profile):
    words = {"Exp": math.exp, "Log": math.log, "Sqrt": math.sqrt, "Square": lambda t: t * t, "IntCst": float}
    alpha = torch.tensor(0.7, dtype=F64) if profile == "rq" else None
    for q in (0.0, 1e-3, 0.5, 7.0):
        told = eval(keops_products._radial(profile, "q", "alpha"), {**words, "q": q, "alpha": 0.7})
        expected = smooth_value(profile, torch.tensor(q, dtype=F64), alpha)
        assert told == pytest.approx(float(expected), rel=1e-13)


@pytest.fixture
def widths(monkeypatch):
    """The widths requested, with differentiable products of stored matrices in place of KeOps' compiled ones."""
    asked = []

    def stand_in(factors, width):
        def apply(*tensors, backend):
            *waiting, v = tensors
            assert v.size(-1) == width
            waiting, K = iter(waiting), 1.0
            for profile, dimension in factors:
                x, y = next(waiting), next(waiting)
                assert x.size(-1) == y.size(-1) == dimension
                q = (x.unsqueeze(-2) - y).square().sum(-1)
                K = K * smooth_value(profile, q, next(waiting) if profile == "rq" else None)
            asked.append(width)
            return K @ v

        return apply

    monkeypatch.setattr(keops_products, "_compiled", stand_in)
    return asked


def test_any_number_of_columns_uses_the_same_few_formulas(widths):
    op = with_backend(made("rbf", "rq", n=20, m=30, square=False), "keops").detach()
    for columns in (0, 1, 2, 4, 5, 16, 17, 37):
        _, v = vectors(op, columns)
        torch.testing.assert_close(op @ v, op.to_dense() @ v, rtol=1e-10, atol=1e-10)
    assert set(widths) == {1, 4, 16}


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("profiles", CASES, ids="-".join)
def test_all_derivatives_are_put_together_right(profiles, square, widths):
    check_against_dense(made(*profiles, square=square, n=20, m=10, batch=(2,)), 2, 1e-10)
    assert widths


@pytest.mark.parametrize("square", [True, False])
def test_parts_add_up(square, widths):
    op = made("rbf", "rq", square=square, n=40, m=30).detach()
    u, v = vectors(op)
    whole = keops_products.derivatives(op.factors, u, v)
    found = [keops_products.derivatives(op.factors, u, v, (k, 3)) for k in range(3)]
    total = sum(keops_products.product(op.factors, v, (k, 3)) for k in range(3))
    torch.testing.assert_close(total, keops_products.product(op.factors, v), rtol=1e-12, atol=1e-12)
    for name in ("x", "y", "alpha"):
        for j, expected in enumerate(getattr(whole, name)):
            if expected is not None:
                torch.testing.assert_close(sum(getattr(f, name)[j] for f in found), expected, rtol=1e-10, atol=1e-10)


def test_auto_is_tiles_on_the_cpu_and_keops_on_cuda(monkeypatch):
    op = made("rbf", n=5, backend="auto")
    assert op._route is tiles
    assert with_backend(op, "keops")._route is keops_products
    assert with_backend(op, "tiles")._route is tiles
    monkeypatch.setattr(KernelOperator, "device", torch.device("cuda"))
    monkeypatch.setattr(pykeops.config, "gpu_available", True)
    keops_products.is_available.cache_clear()
    try:
        assert op._route is keops_products
        assert with_backend(op, "tiles")._route is tiles
    finally:
        keops_products.is_available.cache_clear()


@pytest.mark.parametrize("backend", ["auto", "keops"])
def test_where_keops_has_no_cuda_tiles_serve_on_cuda_alone(monkeypatch, backend):
    monkeypatch.setattr(pykeops.config, "gpu_available", False)
    keops_products.is_available.cache_clear()
    try:
        op = made("rbf", n=5, backend="keops")
        assert op._route is keops_products
        monkeypatch.setattr(KernelOperator, "device", torch.device("cuda"))
        with pytest.warns(KeOpsUnavailableWarning, match="found no CUDA; install the CUDA toolkit"):
            assert with_backend(op, backend)._route is tiles
    finally:
        keops_products.is_available.cache_clear()


@pytest.mark.parametrize("square", [True, False])
def test_dense_agrees_too(square):
    op = made("matern52", "rq", square=square, n=40, m=30, batch=(2,))
    u, v = vectors(op)
    dense = with_backend(op, "dense")
    torch.testing.assert_close(dense @ v, op @ v, rtol=1e-10, atol=1e-10)
    for a, b in zip(dense._bilinear_derivative(u, v), op._bilinear_derivative(u, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_without_a_compiler_tiles_serve_and_it_is_said_once(monkeypatch, recwarn):
    monkeypatch.setenv("CXX", "no-such-compiler")
    keops_products.is_available.cache_clear()
    try:
        op = with_backend(made("rbf", n=5), "keops")
        with pytest.warns(KeOpsUnavailableWarning, match="no-such-compiler.*set CXX"):
            assert op._route is tiles
        recwarn.clear()
        assert op._route is tiles
        assert not recwarn
    finally:
        keops_products.is_available.cache_clear()


def test_without_pykeops_too(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pykeops.torch", None)
    keops_products.is_available.cache_clear()
    try:
        with pytest.warns(KeOpsUnavailableWarning, match="pip install pykeops"):
            assert not keops_products.is_available()
    finally:
        keops_products.is_available.cache_clear()


def test_a_backend_stays_with_what_is_made_of_the_operator():
    op = with_backend(made("rbf", n=6), "keops")
    assert (2 * op).backend == op.mT.backend == op[:3].backend == op.expand(2, 6, 6).backend == "keops"
    assert pickle.loads(pickle.dumps(op.detach())).backend == "keops"
    assert (op * made("matern32", n=6, backend="auto")).backend == "keops"
    with pytest.raises(ValueError, match=r"one backend.*'dense', 'keops'"):
        op * with_backend(made("matern32", n=6), "dense")
    with pytest.raises(ValueError, match=r"backend among.*'cuda'"):
        with_backend(op, "cuda")


def test_kernels_hand_their_backend_on():
    x = torch.randn(30, 2)
    with gpytorch.settings.max_cholesky_size(10):
        for backend in ("auto", "tiles", "keops"):
            kernel = keops.RBFKernel(backend=backend) * keops.MaternKernel(nu=1.5, backend=backend)
            assert kernel(x).evaluate_kernel().backend == backend
        assert not isinstance(keops.RBFKernel(backend="dense")(x).evaluate_kernel(), KernelOperator)
    with pytest.raises(ValueError, match=r"backend among.*'gpu'"):
        keops.PeriodicKernel(backend="gpu")
