"""Evidences under noise so narrow that the sites' factors are huge, against 40 digits: no digit is lost."""

import mpmath
import pytest
import torch
from gpytorch.constraints import Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator.operators import DiagLinearOperator, LowRankRootLinearOperator

from gpext.inference import CAVI, EP, KL, Laplace, Status
from gpext.likelihoods import StudentTLikelihood
from tests.members import F64

N = 8
RULES = [EP(), EP(power=0.5), KL(), Laplace()]
X = torch.linspace(0, 3, N, dtype=F64)
Y = torch.sin(2 * X) + torch.linspace(-1, 1, N, dtype=F64).square()


def dense():
    return MultivariateNormal(0.3 + torch.zeros_like(X), torch.exp(-(X[:, None] - X).abs()))


def low_rank():
    root = torch.exp(-0.5 * (X[:, None] - X[::3]).square())
    covariance = LowRankRootLinearOperator(root) + DiagLinearOperator(0.1 + X)
    return MultivariateNormal(0.3 + torch.zeros_like(X), covariance)


def evidence(prior, noise):
    """log N(y | mu, K + noise I), in 40 digits."""
    with mpmath.workdps(40):
        K = mpmath.matrix(prior.covariance_matrix.tolist()) + mpmath.mpf(noise) * mpmath.eye(N)
        b = mpmath.matrix((Y - prior.mean).tolist())
        quadratic = (b.T * mpmath.lu_solve(K, b))[0]
        return float(-quadratic / 2 - mpmath.log(mpmath.det(K)) / 2 - N * mpmath.log(2 * mpmath.pi) / 2)


@pytest.mark.parametrize("noise", [1e-6, 1e-12, 1e-15])
@pytest.mark.parametrize("prior", [dense, low_rank])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_gaussian_noise_of_any_width_has_its_exact_evidence(rule, prior, noise):
    likelihood = GaussianLikelihood(noise_constraint=Positive()).double()
    likelihood.noise = torch.tensor(noise, dtype=F64)
    result = rule.infer(prior(), likelihood, Y)
    assert result.status is Status.CONVERGED
    assert float(result.log_evidence.detach()) == pytest.approx(evidence(prior(), likelihood.noise.item()), abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [EP(), KL(), CAVI(), Laplace()], ids=repr)
def test_evidences_of_a_student_t_end_where_its_width_no_longer_matters(rule):
    """A site far narrower than the prior contributes the same factor, whatever its width."""
    values = []
    for noise in (1e-8, 1e-12, 1e-15):
        likelihood = StudentTLikelihood(noise_constraint=Positive()).double()
        likelihood.noise = torch.tensor(noise, dtype=F64)
        result = rule.infer(dense(), likelihood, Y)
        assert result.status is Status.CONVERGED
        values.append(float(result.log_evidence.detach()))
    assert values == pytest.approx([values[-1]] * 3, abs=2e-5)
    assert values[1:] == pytest.approx([values[-1]] * 2, abs=1e-8)
