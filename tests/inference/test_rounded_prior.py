"""A covariance in float32 that rounding has made too indefinite for the sites of a sharp likelihood."""

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

from gpext.inference import CAVI, EP, KL, Laplace, Status
from gpext.likelihoods import StudentTLikelihood
from tests.members import F64

X = torch.linspace(0, 1, 40, dtype=F64)
K = 1e6 * torch.exp(-0.5 * (X - X.unsqueeze(-1)).square())
Y = 1e3 * torch.sin(3 * X)


def infer(rule, dtype, jitter=0.0):
    likelihood = StudentTLikelihood().double()
    likelihood.initialize(deg_free=torch.tensor(4.0, dtype=F64), noise=torch.tensor(1e-2, dtype=F64))
    prior = MultivariateNormal(torch.zeros(40, dtype=dtype), to_linear_operator(K.to(dtype)))
    return rule(jitter=jitter).infer(prior, likelihood.to(dtype), Y.to(dtype))


@pytest.mark.parametrize("rule", [KL, CAVI, Laplace, EP])
def test_every_rule_finds_the_posterior_and_reports_the_jitter(rule):
    assert float(torch.linalg.eigvalsh(K.float().double())[0]) < -1e-2
    result = infer(rule, torch.float32)
    assert result.status is Status.CONVERGED
    assert "jitter" in result.message
    error = (result.posterior.mean - Y.float()).abs().max()
    assert float(error) < 1.0  # a thousandth of the targets' size


def test_a_jitter_that_was_asked_for_stays_what_it_is():
    assert "jitter 3." in infer(KL, torch.float32, jitter=3.0).message


def test_float64_takes_none():
    assert "jitter" not in infer(KL, F64).message


def test_what_is_indefinite_beyond_rounding_is_not_made_definite():
    prior = MultivariateNormal(torch.zeros(2), to_linear_operator(torch.tensor([[1.0, 3.0], [3.0, 1.0]])))
    result = Laplace().infer(prior, StudentTLikelihood(), torch.tensor([0.0, 1.0]))
    assert "jitter 1" not in result.message


def test_inputs_that_occur_twice_need_none():
    y = torch.tensor([1e3, 1e3 + 1, 1e3 - 1], dtype=F64)
    found = []
    for dtype in (torch.float32, F64):
        prior = MultivariateNormal(
            torch.zeros(3, dtype=dtype), to_linear_operator(torch.full((3, 3), 1e6, dtype=dtype))
        )
        likelihood = StudentTLikelihood().to(dtype)
        found.append(Laplace().infer(prior, likelihood, y.to(dtype)))
    rounded, exact = found
    assert "jitter" not in rounded.message
    assert rounded.log_evidence.item() == pytest.approx(exact.log_evidence.item(), rel=1e-6)
