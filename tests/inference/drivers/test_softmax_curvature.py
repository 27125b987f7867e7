"""The substitute for the curvature of E[log softmax] against the properties that both must share."""

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel

from gpext.inference import KL, Status
from gpext.inference.drivers import fixed_point
from gpext.inference.drivers.softmax_curvature import matching_softmax
from gpext.likelihoods import MultinomialLogitLikelihood
from gpext.quadrature import expected_log_sum_exp
from tests.members import F64


def curvature(mean, variance):
    """E[diag(pi) - pi pi'] (N, K, K), by differences of E[pi]."""
    step, num_classes = 1e-4, len(mean)

    def softmax(m):
        m = m.clone().requires_grad_()
        return torch.autograd.grad(expected_log_sum_exp(m, variance).sum(), m)[0]

    columns = []
    for k in range(num_classes):
        shift = torch.zeros_like(mean)
        shift[k] = step
        columns.append((softmax(mean + shift) - softmax(mean - shift)) / (2 * step))
    return torch.stack(columns, -1).transpose(0, 1)


def stand_in(diagonal):
    size, q = matching_softmax(diagonal)
    return torch.diag_embed((size * q).mT) - (size * q).mT.unsqueeze(-1) * q.mT.unsqueeze(-2)


@pytest.mark.parametrize("num_classes", [2, 3, 7])
def test_shares_diagonal_rows_and_sign_with_the_curvature(num_classes):
    generator = torch.Generator().manual_seed(num_classes)
    mean = 2 * torch.randn(num_classes, 50, generator=generator, dtype=F64)
    variance = 10 * torch.rand(num_classes, 50, generator=generator, dtype=F64)
    exact = curvature(mean, variance)
    found = stand_in(exact.diagonal(dim1=-2, dim2=-1).mT)
    torch.testing.assert_close(
        found.diagonal(dim1=-2, dim2=-1), exact.diagonal(dim1=-2, dim2=-1), rtol=1e-5, atol=1e-12
    )
    torch.testing.assert_close(found.sum(-1), torch.zeros_like(found.sum(-1)), rtol=0, atol=1e-9)
    assert bool((torch.linalg.eigvalsh(found) > -1e-9).all())
    if num_classes == 2:
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-7)
    averaged = torch.diag_embed(exact.diagonal(dim1=-2, dim2=-1))
    assert (found - exact).norm() < 0.2 * (averaged - exact).norm()


def test_what_no_softmax_has_gives_something_finite():
    for diagonal in (
        [1.0, 0.1, 0.1],
        [1.0, 1e-300, 1e-300],
        [1e-300, 1e-300, 1e-300],
        [1e6, 1e6, 1e-9],
        [1.0, 1.0, 1.0],
    ):
        found = stand_in(torch.tensor(diagonal, dtype=F64).unsqueeze(-1))
        assert bool(found.isfinite().all())
        assert bool((torch.linalg.eigvalsh(found) > -1e-8 * max(diagonal)).all())


def test_a_rejected_step_takes_no_other_newton_step_for_the_means(monkeypatch):
    """Where labels are random and functions large, Anderson's mixing and full steps lead astray a few times."""
    real, seen = fixed_point.coupled_target, []

    def target(problem, iterate, curvature):
        seen.append(iterate)
        return real(problem, iterate, curvature)

    monkeypatch.setattr(fixed_point, "coupled_target", target)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(60, 2, dtype=F64, generator=generator)
    y = torch.randint(0, 4, (60,), generator=generator)
    with torch.no_grad():
        covariance = 1e4 * MaternKernel(2.5).double()(x).to_dense()
    prior = MultivariateNormal(torch.zeros(4, 60, dtype=F64), covariance.expand(4, 60, 60))
    result = KL().infer(prior, MultinomialLogitLikelihood(4), y)
    assert result.status is Status.CONVERGED
    assert len({id(iterate) for iterate in seen}) == len(seen)
    assert len(seen) < len(result.trace) - 2
