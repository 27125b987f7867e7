"""Derivatives of the evidence at fixed sites, against autograd."""

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from gpext.posteriors import FixedSites, condition_inducing, project
from gpext.sites import GaussianSites
from tests.members import F64
from tests.posteriors.test_inducing import M, random_problem


def bound(inducing, cross, variance, mu, sites):
    """sum_i F_i(m_i, v_i) - KL for some smooth F_i at the q that the sites define, by autograd alone."""
    chol = torch.linalg.cholesky(inducing)
    whitened = torch.linalg.solve_triangular(chol, cross, upper=False)
    identity = torch.eye(M, dtype=F64)
    covariance = torch.linalg.inv(identity + (whitened * sites.precision.unsqueeze(-2)) @ whitened.mT)
    covariance = 0.5 * (covariance + covariance.mT)
    eta = whitened @ (sites.shift - sites.precision * mu).unsqueeze(-1)
    m_v = (covariance @ eta).squeeze(-1)
    mean = mu + (whitened.mT @ m_v.unsqueeze(-1)).squeeze(-1)
    spread = variance - (whitened * ((identity - covariance) @ whitened)).sum(-2)
    local = (mean - 1).cos() - 0.5 * spread * (1 + 0.3 * mean)
    prior = MultivariateNormal(torch.zeros(M, dtype=F64), identity)
    return (local.sum(-1) - kl_divergence(MultivariateNormal(m_v, covariance), prior)).sum(), mean, spread


@pytest.mark.parametrize("batch", [(), (2,)])
def test_derivatives_in_the_prior_agree_with_autograd(batch):
    mu, K, sites = random_problem(batch)
    sites = GaussianSites(sites.shift, sites.precision.abs())
    inputs = [K[..., :M, :M], K[..., :M, M:], K[..., M:, M:].diagonal(dim1=-2, dim2=-1), mu]
    inputs = [tensor.clone().requires_grad_(True) for tensor in inputs]
    total, mean, spread = bound(*inputs, sites)
    by_inducing, by_cross, _, by_mean = torch.autograd.grad(total, inputs)
    mean, spread = mean.detach(), spread.detach()
    g, t = -(mean - 1).sin() - 0.15 * spread, 1 + 0.3 * mean
    inducing, cross, _, mu = (tensor.detach() for tensor in inputs)
    chol = torch.linalg.cholesky(inducing)
    whitened = torch.linalg.solve_triangular(chol, cross, upper=False)
    vector, gram = project(whitened, mu, sites)
    posterior = condition_inducing(vector, gram + torch.eye(M, dtype=F64))
    adjoint = FixedSites(chol, posterior, gram, *project(whitened, mu, GaussianSites(g + t * mean, t)))
    actual_cross, actual_mean = adjoint.cross(whitened, mean, sites, g, t)
    torch.testing.assert_close(actual_cross, by_cross, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(actual_mean, by_mean, rtol=1e-9, atol=1e-9)
    symmetric = 0.5 * (by_inducing + by_inducing.mT)
    torch.testing.assert_close(adjoint.inducing(), symmetric, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
def test_derivatives_in_a_shared_prior_are_sums_over_latents(batch):
    _, K, _ = random_problem()
    mu, _, sites = random_problem(batch)
    sites = GaussianSites(sites.shift, sites.precision.abs())
    chol = torch.linalg.cholesky(K[:M, :M])
    whitened = torch.linalg.solve_triangular(chol, K[:M, M:], upper=False)
    vector, gram = project(whitened, mu, sites)
    posterior = condition_inducing(vector, gram + torch.eye(M, dtype=F64))
    g, t = sites.shift.sin(), sites.precision + 0.3
    mean = mu + (posterior.mean.unsqueeze(-2) @ whitened).squeeze(-2)
    best = project(whitened, mu, GaussianSites(g + t * mean, t))
    shared = FixedSites(chol, posterior, gram, *best)
    each = FixedSites(chol.expand(*batch, M, M), posterior, gram, *best)
    by_cross, by_mean = shared.cross(whitened, mean, sites, g, t)
    by_each_cross, by_each_mean = each.cross(whitened.expand(*batch, *whitened.shape), mean, sites, g, t)
    torch.testing.assert_close(by_mean, by_each_mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(by_cross, by_each_cross.flatten(0, -3).sum(0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(shared.inducing(), each.inducing().flatten(0, -3).sum(0), rtol=1e-9, atol=1e-9)
