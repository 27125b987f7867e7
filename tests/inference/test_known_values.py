"""Latent values with a prior variance of zero, as under a linear kernel at the origin, keep their known value."""

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

from gpext.inference import CAVI, EP, KL, Laplace
from gpext.quadrature import student_t_tilted_moments
from tests.latent_cases import CASES
from tests.members import F64, MEMBERS

N = 7


def linear_prior(x, batch):
    covariance = to_linear_operator((x[:, None] * x).expand(*batch, len(x), len(x)))
    return MultivariateNormal(torch.zeros(*batch, len(x), dtype=F64), covariance)


@pytest.mark.parametrize(
    "rule", [KL(tolerance=1e-8), EP(tolerance=1e-8), Laplace(), CAVI()], ids=lambda r: type(r).__name__
)
@pytest.mark.parametrize("name", ["student_t", "bernoulli_logit", "negative_binomial", "poisson", "multinomial"])
def test_its_datum_adds_its_own_log_density(name, rule):
    likelihood, _, y = CASES[name].problem(N)
    likelihood.requires_grad_(False)
    latents = likelihood.num_latents
    if (isinstance(rule, CAVI) and name not in MEMBERS) or (isinstance(rule, EP) and latents):
        pytest.skip("the rule does not serve it")
    batch = [] if latents is None else [latents]
    x = torch.linspace(-1.5, 1.5, N, dtype=F64).index_fill(0, torch.tensor(3), 0.0)
    rest = torch.tensor([0, 1, 2, 4, 5, 6])
    result = rule.infer(linear_prior(x, batch), likelihood, y)
    without = rule.infer(linear_prior(x[rest], batch), likelihood, likelihood.take(y, rest))
    own = likelihood.log_prob(likelihood.take(y, torch.tensor([3])), torch.zeros(*batch, 1, dtype=F64))
    assert result.status.name == "CONVERGED", result.message
    torch.testing.assert_close(result.log_evidence, without.log_evidence + own.sum(), rtol=0, atol=1e-7)
    torch.testing.assert_close(result.log_loo[3], own.sum(), rtol=0, atol=1e-7)
    if latents is None:
        assert abs(float(result.posterior.mean[3])) < 1e-20


@pytest.mark.parametrize("variance", [1e-12, 1e-20, 1e-33])
def test_tilted_moments_of_nearly_known_values(variance):
    """At a tiny variance the Student-t is a constant: the moments stay those of the Gaussian."""
    v = torch.tensor([variance], dtype=F64)
    moments = student_t_tilted_moments(torch.full_like(v, 0.3), v, torch.tensor(7.0), torch.tensor(0.7), 1.0)
    torch.testing.assert_close(moments.variance, v, rtol=1e-10, atol=0)
    torch.testing.assert_close(moments.fourth, 3 * v.square(), rtol=1e-10, atol=0)
