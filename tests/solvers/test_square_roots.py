"""Square roots by matrix products, against those by eigenvectors."""

import pytest
import torch

from gpext.solvers import square_root_times

F64 = torch.float64


def problem(n, lengthscale, dtype=F64, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 1, dtype=F64, generator=generator).mul(10)
    A = scale * torch.exp(-torch.cdist(x, x) / lengthscale)
    values, axes = torch.linalg.eigh(A)
    z = torch.randn(n, dtype=F64, generator=generator)
    exact = axes @ (values.clamp_min(0).sqrt() * (axes.mT @ z))
    return A.to(dtype), z.to(dtype), exact


@pytest.mark.parametrize("lengthscale", [0.05, 1.0, 50.0])
@pytest.mark.parametrize("tolerance", [1.0, 0.1])
def test_the_error_is_about_what_it_says_and_below_the_tolerance(lengthscale, tolerance):
    A, z, exact = problem(300, lengthscale)
    found = square_root_times(lambda v: A @ v, z, tolerance=tolerance)
    true = float((found.value - exact).norm())
    assert true <= 1.3 * found.error <= 1.3 * tolerance
    assert found.num_steps < 300


def test_all_steps_leave_rounding():
    A, z, exact = problem(60, 1.0)
    found = square_root_times(lambda v: A @ v, z, tolerance=0.0)
    assert (found.num_steps, found.error) == (60, 0.0)
    torch.testing.assert_close(found.value, exact, rtol=0, atol=1e-9)


def test_stops_where_it_is_told():
    A, z, _ = problem(300, 1.0)
    found = square_root_times(lambda v: A @ v, z, tolerance=1e-6, max_steps=20)
    assert found.num_steps == 20
    assert found.error > 1e-6


@pytest.mark.parametrize("make", [torch.zeros, lambda n, m, dtype: torch.eye(n, dtype=dtype)])
def test_matrices_of_one_eigenvalue_take_one_step(make):
    A, z = make(40, 40, dtype=F64), torch.ones(40, dtype=F64)
    found = square_root_times(lambda v: A @ v, z, tolerance=1e-12)
    torch.testing.assert_close(found.value, A @ z)
    assert float(square_root_times(lambda v: A @ v, 0 * z, tolerance=0.0).value.norm()) == 0


def test_single_precision_follows_double():
    A, z, exact = problem(200, 1.0, torch.float32)
    found = square_root_times(lambda v: A @ v, z, tolerance=0.1)
    assert found.value.dtype == torch.float32
    assert float((found.value.double() - exact).norm()) < 0.2
