"""Derivatives of log phi where phi itself is about to underflow."""

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

from gpext.distributions.laplace_inversion.radial_transform import RadialTransform
from gpext.inference import Laplace, Status
from gpext.likelihoods import SuperGaussianLikelihood
from tests.members import F64


def log_phi(r):
    return 1 - torch.sqrt(1 + 6.7 * r)


def phi(r):
    return log_phi(r).exp()


@pytest.mark.parametrize("r", [1e-3, 1.0, 1e3, 1e4, 7e4])  # phi is 1e-296 at the last
def test_derivatives_of_log_phi_do_not_underflow_before_phi(r):
    values = []
    for transform in (RadialTransform(phi), RadialTransform(None, log_phi)):
        at = torch.tensor(r, dtype=F64, requires_grad=True)
        value = transform(at)
        for _ in range(4):
            values.append(value.detach())
            (value,) = torch.autograd.grad(value, at, create_graph=True)
    torch.testing.assert_close(torch.stack(values[:4]), torch.stack(values[4:]), rtol=1e-9, atol=0)


def test_the_gradient_of_laplaces_evidence_is_finite_where_phi_is_tiny():
    def evidence(variance):
        prior = MultivariateNormal(torch.zeros(1, dtype=F64), to_linear_operator(variance.view(1, 1)))
        return Laplace().infer(prior, SuperGaussianLikelihood(phi=phi), torch.tensor([100.0], dtype=F64))

    variance = torch.tensor(0.12, dtype=F64, requires_grad=True)
    result = evidence(variance)
    assert result.status is Status.CONVERGED
    (slope,) = torch.autograd.grad(result.log_evidence, variance)
    up, down = (evidence(variance.detach() + step).log_evidence.detach() for step in (1e-5, -1e-5))
    torch.testing.assert_close(slope, (up - down) / 2e-5, rtol=1e-6, atol=1e-6)
