"""Conjugate gradients: solutions against direct solves, and the status of solves that fail."""

import pytest
import torch

from gpext.solvers import SolveStatus, conjugate_gradients

F64 = torch.float64


def system(n=80, columns=3, *, noise=0.1, batch=(), seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(*batch, n, 2, generator=generator, dtype=F64)
    A = torch.exp(-2 * torch.cdist(x, x).square()) + noise * torch.eye(n, dtype=F64)
    b = torch.randn(*batch, n, columns, generator=generator, dtype=F64)
    return A.to(dtype), b.to(dtype)


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("tolerance", [1e-4, 1e-10])
def test_solves_to_the_tolerance_it_says(batch, tolerance):
    A, b = system(batch=batch)
    found = conjugate_gradients(lambda v: A @ v, b, tolerance=tolerance)
    assert found.status is SolveStatus.CONVERGED
    true = (b - A @ found.solution).norm(dim=-2) / b.norm(dim=-2)
    torch.testing.assert_close(found.residual_norm, true, rtol=1e-6, atol=1e-15)
    assert bool((true <= tolerance).all())


def test_a_vector_a_zero_and_a_start():
    A, b = system()
    exact = torch.linalg.solve(A, b)
    found = conjugate_gradients(lambda v: A @ v, b[:, 0], tolerance=1e-12)
    torch.testing.assert_close(found.solution, exact[:, 0], rtol=1e-9, atol=1e-9)
    assert conjugate_gradients(lambda v: A @ v, 0 * b).num_steps == 0
    near = conjugate_gradients(lambda v: A @ v, b, start=exact + 1e-6 * b, tolerance=1e-10)
    cold = conjugate_gradients(lambda v: A @ v, b, tolerance=1e-10)
    assert near.num_steps < cold.num_steps
    torch.testing.assert_close(near.solution, exact, rtol=1e-7, atol=1e-7)


def test_a_preconditioner_saves_steps():
    A, b = system(noise=1e-3)
    values, axes = torch.linalg.eigh(A)
    large = values > 0.1  # all but the smallest eigenvalues are known
    known = torch.where(large, values, values[~large].mean())
    inverse = axes @ torch.diag(1 / known) @ axes.mT
    plain = conjugate_gradients(lambda v: A @ v, b)
    found = conjugate_gradients(lambda v: A @ v, b, precondition=lambda r: inverse @ r)
    assert found.num_steps < plain.num_steps / 3
    torch.testing.assert_close(found.solution, torch.linalg.solve(A, b), rtol=1e-5, atol=1e-5)


def test_products_in_float32_reach_float64_by_refinement():
    A, b = system(noise=0.01)
    single = A.float()
    found = conjugate_gradients(
        lambda v: A @ v, b, cheap_matvec=lambda v: (single @ v.float()).double(), tolerance=1e-11
    )
    assert found.status is SolveStatus.CONVERGED
    torch.testing.assert_close(found.solution, torch.linalg.solve(A, b), rtol=1e-7, atol=1e-7)
    alone = conjugate_gradients(lambda v: (single @ v.float()).double(), b, tolerance=1e-11)
    assert float((b - A @ alone.solution).norm() / b.norm()) > 1e-9  # without correction, it solves another system


def test_what_cannot_be_reached_is_said():
    A, b = system(noise=1e-7)
    stalled = conjugate_gradients(lambda v: A @ v, b, tolerance=1e-17, max_steps=100_000)
    assert stalled.status is SolveStatus.STALLED
    assert float(stalled.residual_norm.max()) < 1e-6
    few = conjugate_gradients(lambda v: A @ v, b, max_steps=3)
    assert (few.status, few.num_steps) == (SolveStatus.MAX_STEPS, 3)
    indefinite = conjugate_gradients(lambda v: A @ v - 0.5 * v, b)
    assert indefinite.status is SolveStatus.NOT_POSITIVE_DEFINITE
    assert bool(indefinite.solution.isfinite().all())
    calls = []

    def breaks(v):
        calls.append(1)
        return A @ v * (torch.nan if len(calls) == 5 else 1)

    broken = conjugate_gradients(breaks, b)
    assert bool(broken.solution.isfinite().all())
    with pytest.raises(ValueError, match=r"b must be finite; got nan at index \(4, 1\)"):
        conjugate_gradients(
            lambda v: A @ v, b.index_put((torch.tensor(4), torch.tensor(1)), torch.tensor(torch.nan).double())
        )
    with pytest.raises(ValueError, match="shape of b"):
        conjugate_gradients(lambda v: A @ v, b, start=b[:, :1])
    with pytest.raises(TypeError, match="matvec must be a function"):
        conjugate_gradients(A, b)
    with pytest.raises(ValueError, match="max_steps"):
        conjugate_gradients(lambda v: A @ v, b, max_steps=-1)


def test_float32():
    A, b = system(noise=1.0, dtype=torch.float32)
    found = conjugate_gradients(lambda v: A @ v, b, tolerance=1e-5)
    assert found.status is SolveStatus.CONVERGED
    assert found.solution.dtype == torch.float32
