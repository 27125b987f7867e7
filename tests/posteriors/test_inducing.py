"""Posteriors with inducing points, against the joint Gaussian densely."""

import pytest
import torch

from gpext.posteriors import (
    condition_dense,
    condition_inducing,
    factorise,
    prior_gradients,
    project,
)
from gpext.sites import GaussianSites
from tests.members import F64

M, N = 4, 9


def random_problem(batch=(), seed=0):
    """A joint prior over M inducing values and N data, and sites."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*batch, *shape, generator=generator, dtype=F64)

    factor = randn(M + N, M + N)
    return randn(N), factor @ factor.mT, GaussianSites(randn(N), randn(N).abs())


def pieces(K):
    chol = factorise(K[..., :M, :M])
    whitened = torch.linalg.solve_triangular(chol, K[..., :M, M:], upper=False)
    return chol, whitened, K[..., M:, M:].diagonal(dim1=-2, dim2=-1) - whitened.square().sum(-2)


def optimum(mu, K, sites):
    _, whitened, _ = pieces(K)
    vector, gram = project(whitened, mu, sites)
    return condition_inducing(vector, gram + torch.eye(M, dtype=F64))


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_optimum_conditions_the_nystrom_prior_densely(batch):
    """The optimal q(u) is the exact posterior of g ~ N(mu, Q), Q = K_xz K_zz^-1 K_zx; f adds k - q to its variance."""
    mu, K, sites = random_problem(batch)
    Q = K[..., M:, :M] @ torch.linalg.inv(K[..., :M, :M]) @ K[..., :M, M:]
    dense = condition_dense(mu, Q, sites)
    _, whitened, conditional = pieces(K)
    mean, marginal = optimum(mu, K, sites).marginals(whitened, mu, conditional)
    torch.testing.assert_close(mean, dense.mean, rtol=1e-9, atol=1e-9)
    expected = dense.variance + (K[..., M:, M:] - Q).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(marginal, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_marginals_are_those_of_the_joint_gaussian(batch):
    """u = L v with v ~ q pushed through p(f | u) by explicit inverses."""
    mu, K, sites = random_problem(batch)
    chol, whitened, conditional = pieces(K)
    posterior = optimum(mu, K, sites)
    S = chol @ torch.linalg.inv(posterior.chol_precision @ posterior.chol_precision.mT) @ chol.mT
    kappa = K[..., M:, :M] @ torch.linalg.inv(K[..., :M, :M])
    covariance = K[..., M:, M:] - kappa @ K[..., :M, M:] + kappa @ S @ kappa.mT
    mean, marginal = posterior.marginals(whitened, mu, conditional)
    expected = mu + (kappa @ chol @ posterior.mean.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(mean, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(marginal, covariance.diagonal(dim1=-2, dim2=-1), rtol=1e-9, atol=1e-9)


def test_divergence_from_prior_is_torchs():
    posterior = optimum(*random_problem())
    q = torch.distributions.MultivariateNormal(posterior.mean, posterior.covariance)
    prior = torch.distributions.MultivariateNormal(torch.zeros(M, dtype=F64), torch.eye(M, dtype=F64))
    expected = torch.distributions.kl_divergence(q, prior)
    torch.testing.assert_close(posterior.divergence_from_prior, expected, rtol=1e-11, atol=1e-11)


def test_projections_of_a_partition_add_up():
    mu, K, sites = random_problem()
    _, whitened, _ = pieces(K)
    parts = [
        project(whitened[:, s], mu[s], GaussianSites(sites.shift[s], sites.precision[s]))
        for s in (slice(0, 2), slice(2, 7), slice(7, N))
    ]
    for total, whole in zip(map(sum, zip(*parts, strict=True)), project(whitened, mu, sites), strict=True):
        torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)


def test_a_datum_of_some_weight_counts_so_many_times():
    mu, K, sites = random_problem()
    _, whitened, _ = pieces(K)
    once, thrice = project(whitened, mu, sites), project(whitened, mu, sites, weight=3.0)
    for one, three in zip(once, thrice, strict=True):
        torch.testing.assert_close(three, 3 * one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [N, 3])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradients_in_the_prior_agree_with_autograd(batch, size):
    mu, K, sites = random_problem(batch)
    mu, K = mu[..., :size], K[..., : M + size, : M + size]
    sites = GaussianSites(sites.shift[..., :size], sites.precision[..., :size])
    posterior = optimum(*random_problem(batch, seed=1))  # any q(v), held fixed
    inducing = K[..., :M, :M].clone().requires_grad_(True)
    cross = K[..., :M, M:].clone().requires_grad_(True)
    chol = torch.linalg.cholesky(inducing)
    whitened = torch.linalg.solve_triangular(chol, cross, upper=False)
    mean = mu + (whitened.mT @ posterior.mean.unsqueeze(-1)).squeeze(-1)
    complement = torch.eye(M, dtype=F64) - posterior.covariance
    marginal = K[..., M:, M:].diagonal(dim1=-2, dim2=-1) - (whitened * (complement @ whitened)).sum(-2)
    total = (sites.shift * mean - 0.5 * sites.precision * marginal + (mean - 1).cos()).sum()
    expected_inducing, expected_cross = torch.autograd.grad(total, (inducing, cross))
    g = (sites.shift - (mean - 1).sin()).detach()
    chol, whitened = chol.detach(), whitened.detach()
    actual, actual_cross = prior_gradients(chol, posterior, whitened, g, sites.precision)
    torch.testing.assert_close(actual_cross, expected_cross, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(actual, actual.mT, rtol=1e-12, atol=1e-12)
    symmetric = 0.5 * (expected_inducing + expected_inducing.mT)
    torch.testing.assert_close(actual, symmetric, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
def test_gradients_in_a_shared_prior_are_sums_over_latents(batch):
    _, K, _ = random_problem()
    mu, _, sites = random_problem(batch)
    chol, whitened, _ = pieces(K)
    vector, gram = project(whitened, mu, GaussianSites(sites.shift, sites.precision.abs()))
    posterior = condition_inducing(vector, gram + torch.eye(M, dtype=F64))
    together = chol.expand(*batch, M, M), posterior, whitened.expand(*batch, *whitened.shape)
    g, tau = sites.shift, sites.precision
    shared = prior_gradients(chol, posterior, whitened, g, tau)
    for one, each in zip(shared, prior_gradients(*together, g, tau), strict=True):
        torch.testing.assert_close(one, each.flatten(0, -3).sum(0), rtol=1e-9, atol=1e-9)


def test_duplicate_inducing_points_are_refused_with_the_remedy():
    K = torch.ones(3, 3, dtype=F64)
    with pytest.raises(torch.linalg.LinAlgError, match=r"3 inducing points .*leading minor 2.*jitter_val"):
        factorise(K)


def test_an_indefinite_precision_is_refused_with_the_remedy():
    with pytest.raises(torch.linalg.LinAlgError, match=r"precision of q\(u\).*Lower the rate"):
        condition_inducing(torch.zeros(2, dtype=F64), -torch.eye(2, dtype=F64))


def test_a_precision_that_float32_cannot_factorise_is_factorised_in_float64():
    """[[5, b], [b, c]], c the next whole number above b^2 / 5: its numbers are exact in float32, its factor is not."""
    failures = 0
    for b in range(8000, 9000):
        precision = torch.tensor([[5.0, b], [b, b * b // 5 + 1]])
        failures += int(torch.linalg.cholesky_ex(precision).info > 0)  # otherwise the fallback is not tested
        eta = precision @ torch.ones(2)
        chosen, whole = (condition_inducing(eta, precision, dtype=d) for d in (torch.float32, F64))
        if chosen.chol_precision.dtype == F64:
            torch.testing.assert_close(chosen.chol_precision, whole.chol_precision, rtol=0.0, atol=0.0)
            torch.testing.assert_close(chosen.mean, whole.mean, rtol=0.0, atol=0.0)
    assert failures > 0


def test_marginals_in_float32_follow_float64():
    mu, K, sites = random_problem()
    _, whitened, conditional = pieces(K)
    vector, gram = project(whitened, mu, sites)
    natural = vector.float(), (gram + torch.eye(M, dtype=F64)).float()
    expected = condition_inducing(*natural).marginals(whitened, mu, conditional)
    posterior = condition_inducing(*natural, dtype=torch.float32)
    assert posterior.chol_precision.dtype == torch.float32
    for a, b in zip(posterior.marginals(whitened.float(), mu.float(), conditional.float()), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_marginals_that_have_lost_their_digits_are_refused_with_the_remedy():
    mu, K, sites = random_problem()
    _, whitened, conditional = pieces(K)
    posterior = optimum(mu, K, sites)
    with pytest.raises(torch.linalg.LinAlgError, match=r"lost their digits in torch.float64.*jitter_val"):
        posterior.marginals(whitened, mu, conditional - 1e6)
