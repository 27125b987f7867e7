"""Stochastic Lanczos quadrature against log determinants: by z-scores, and where it is exact."""

import pytest
import torch

from gpext.solvers import LowRankPreconditioner, lanczos_log_det, partial_cholesky, trace_probes
from tests.solvers.test_conjugate_gradients import system
from tests.statistics import misfit, t_threshold

F64 = torch.float64


def estimate(A, **options):
    settings = {"num_probes": 10, "num_steps": 30, "generator": torch.Generator().manual_seed(0), **options}
    return lanczos_log_det(lambda v: A @ v, A.size(-1), like=A, batch_shape=A.shape[:-2], **settings)


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("steps", [20, 60])  # 60 = n: the quadrature is certainly exact
def test_it_is_within_its_standard_error(steps, batch):
    A, _ = system(60, noise=0.1, batch=batch)
    found, error = estimate(A, num_probes=40, num_steps=steps)
    assert found.shape == error.shape == batch
    t = (found - torch.logdet(A)) / error
    assert float(t.abs().max()) < t_threshold(39, t.numel())


@pytest.mark.slow
def test_its_standard_error_is_the_one_of_repetitions():
    A, _ = system(60, noise=0.1)
    generator = torch.Generator().manual_seed(1)
    draws = [estimate(A, num_probes=5, generator=generator) for _ in range(400)]
    values, errors = (torch.stack(each) for each in zip(*draws, strict=True))
    assert misfit(values.unsqueeze(-1), torch.logdet(A)) < 1
    assert float(errors.square().mean() / values.var()) == pytest.approx(1, abs=0.35)  # 4.5 times sqrt(2.4 / 400)


def test_as_many_probes_as_the_size_are_exact():
    for n in (1, 2, 40):
        A, _ = system(n, noise=0.1)
        found, error = estimate(A, num_probes=n + 3, num_steps=n)
        torch.testing.assert_close(found, torch.logdet(A), rtol=1e-10, atol=1e-10)
        assert error == 0


def test_few_distinct_eigenvalues_need_few_steps_and_more_do_no_harm():
    axes = torch.linalg.qr(torch.randn(50, 50, generator=torch.Generator().manual_seed(0), dtype=F64)).Q
    values = torch.tensor([0.5, 2.0, 300.0], dtype=F64).repeat(17)[:50]
    A = axes @ torch.diag(values) @ axes.mT
    for steps in (3, 4, 50):  # the Krylov space is exhausted after three
        found, _ = estimate(A, num_probes=50, num_steps=steps)
        torch.testing.assert_close(found, values.log().sum(), rtol=1e-9, atol=1e-9)
    identity, error = estimate(3 * torch.eye(50, dtype=F64))
    torch.testing.assert_close(identity, 50 * torch.tensor(3.0, dtype=F64).log(), rtol=1e-12, atol=1e-12)
    assert error < 1e-12


def test_badly_conditioned_matrices_keep_their_basis_orthogonal():
    """Condition number 1e9, with eigenvalues that recursions without orthogonalisation find repeatedly."""
    values = torch.logspace(-7, 2, 80, dtype=F64)
    axes = torch.linalg.qr(torch.randn(80, 80, generator=torch.Generator().manual_seed(0), dtype=F64)).Q
    A = axes @ torch.diag(values) @ axes.mT
    found, _ = estimate(A, num_probes=80, num_steps=80)
    torch.testing.assert_close(found, values.log().sum(), rtol=0, atol=1e-5)


def test_a_preconditioner_leaves_less_to_estimate():
    A, _ = system(200, noise=1e-2)
    K = A - 1e-2 * torch.eye(200, dtype=F64)
    L = partial_cholesky(lambda i: K[:, i], K.diagonal(), rank=20, generator=torch.Generator().manual_seed(0))
    P = LowRankPreconditioner.of(L, torch.full((200,), 1e-2, dtype=F64))
    whitened = P.whitened(lambda v: A @ v)(torch.eye(200, dtype=F64))
    torch.testing.assert_close(torch.logdet(whitened) + P.log_det, torch.logdet(A), rtol=1e-9, atol=1e-7)
    near_one = P.whitened(lambda v: L @ (L.mT @ v) + 1e-2 * v)(torch.eye(200, dtype=F64))
    torch.testing.assert_close(near_one, torch.eye(200, dtype=F64), rtol=1e-9, atol=1e-9)
    plain, rest = estimate(A), estimate(whitened)
    assert rest[1] < plain[1] / 3


def test_float32():
    A, _ = system(60, noise=0.5, dtype=torch.float32)
    found, error = estimate(A, num_probes=60, num_steps=60)
    assert found.dtype == error.dtype == torch.float32
    torch.testing.assert_close(found, torch.logdet(A.double()).float(), rtol=1e-4, atol=1e-4)


def test_probes_have_the_identity_as_their_second_moment():
    like = torch.empty(0, dtype=F64)
    assert torch.equal(trace_probes(3, 7, like=like), 3**0.5 * torch.eye(3, dtype=F64))
    signs = trace_probes(5, 4, like=like, generator=torch.Generator().manual_seed(0))
    assert signs.shape == (5, 4)
    assert torch.equal(signs.abs(), torch.ones(5, 4, dtype=F64))


def test_bad_input_is_refused():
    A, _ = system(20)
    for bad in ({"num_probes": 0}, {"num_steps": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            estimate(A, **bad)
    with pytest.raises(ValueError, match=r"positive definite.*Raise the noise"):
        estimate(A - 0.5 * torch.eye(20, dtype=F64))
    assert bool(estimate(A, num_probes=1)[1].isnan())
