"""Dense posteriors at sites of any sign, against explicit inverses."""

import math

import mpmath
import pytest
import torch

from gpext.linalg import triangles
from gpext.posteriors import condition_dense
from gpext.sites import GaussianSites
from tests.members import F64, tensor


def random_problem(n=6, *, batch=(), seed=0, negative=True, rank=None):
    """A random prior, of the given rank if any, and sites that leave V positive definite."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*batch, *shape, generator=generator, dtype=F64)

    factor = randn(n, rank or n)
    K = factor @ factor.mT
    precision = randn(n).abs()
    if negative:
        largest = torch.linalg.eigvalsh(K)[..., -1:]
        precision = torch.where(torch.arange(n) % 2 == 0, precision, -0.7 * precision.clamp_max(1) / largest)
    return randn(n), K, GaussianSites(randn(n), precision)


def by_inverse(mu, K, sites):
    """V = (I + K T)^-1 K: an explicit inverse for which K may be singular."""
    eye = torch.eye(K.size(-1), dtype=F64)
    inner = eye + K * sites.precision.unsqueeze(-2)
    V = torch.linalg.inv(inner) @ K
    m = mu + (V @ (sites.shift - sites.precision * mu).unsqueeze(-1)).squeeze(-1)
    return m, V, torch.logdet(inner)


PROBLEMS = {
    "positive": {"negative": False},
    "mixed": {},
    "singular": {"rank": 3},
    "singular_positive": {"rank": 2, "negative": False},
    "batch": {"batch": (2, 3)},
    "one": {"n": 1},
}


@pytest.fixture(params=PROBLEMS)
def problem(request):
    return random_problem(**PROBLEMS[request.param])


def test_moments_agree_with_the_explicit_inverse(problem):
    posterior = condition_dense(*problem)
    m, V, log_det = by_inverse(*problem)
    assert bool(posterior.positive_definite.all())
    torch.testing.assert_close(posterior.mean, m, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(posterior.covariance, V, rtol=1e-10, atol=1e-10)
    v = V.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(posterior.variance, v, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(posterior.cavity_share, 1 - problem[2].precision * v, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(posterior.log_det, log_det, rtol=1e-10, atol=1e-10)
    at_mean = (problem[2].shift * m - 0.5 * problem[2].precision * m.square()).sum(-1)
    torch.testing.assert_close(posterior.log_peak, posterior.log_normalizer - at_mean, rtol=1e-9, atol=1e-9)


def test_members_of_a_batch_have_negative_sites_of_their_own_number():
    mu, K, sites = random_problem(8, batch=(3,))
    precision = sites.precision.clone()
    precision[1] = precision[1].abs()
    precision[2, :6] = precision[2, :6].abs()
    sites = GaussianSites(sites.shift, precision)
    assert (precision < 0).sum(-1).tolist() == [4, 0, 1]
    posterior = condition_dense(mu, K, sites)
    m, V, _ = by_inverse(mu, K, sites)
    v = V.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(posterior.mean, m, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(posterior.variance, v, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(posterior.cavity_share, 1 - precision * v, rtol=1e-10, atol=1e-10)


def test_problems_do_have_negative_precisions():
    assert bool((random_problem()[2].precision < 0).any())
    assert condition_dense(*random_problem()).negative is not None


def test_log_normalizer_is_the_multivariate_gaussian_integral(problem):
    mu, K, sites = problem
    values, axes = torch.linalg.eigh(K)
    F = axes * values.clamp_min(0).sqrt().unsqueeze(-2)  # f = mu + F u, u ~ N(0, I), where K is singular, too
    # over u the integrand at its mode times the volume (2 pi)^(n/2) |A|^(-1/2)
    A = torch.eye(mu.size(-1), dtype=F64) + F.mT @ (sites.precision.unsqueeze(-1) * F)
    u = torch.linalg.solve(A, F.mT @ (sites.shift - sites.precision * mu).unsqueeze(-1)).squeeze(-1)
    f = mu + (F @ u.unsqueeze(-1)).squeeze(-1)
    exponent = (sites.shift * f - 0.5 * sites.precision * f.square()).sum(-1) - 0.5 * u.square().sum(-1)
    expected = exponent - 0.5 * torch.logdet(A)
    torch.testing.assert_close(condition_dense(mu, K, sites).log_normalizer, expected, rtol=1e-10, atol=1e-10)


def test_log_normalizer_of_a_gaussian_likelihood_is_its_log_marginal_likelihood():
    mu, K, _ = random_problem(5)
    y, noise = torch.linspace(-1, 1, 5, dtype=F64), torch.linspace(0.1, 2, 5, dtype=F64)
    constant = (-0.5 * y.square() / noise - 0.5 * (2 * math.pi * noise).log()).sum()
    posterior = condition_dense(mu, K, GaussianSites(y / noise, 1 / noise))
    expected = torch.distributions.MultivariateNormal(mu, K + noise.diag()).log_prob(y)
    torch.testing.assert_close(posterior.log_normalizer + constant, expected, rtol=1e-11, atol=1e-11)


def test_duplicate_inputs_share_their_posterior():
    _, K, sites = random_problem(4, negative=False)
    twice = torch.tensor([0, 1, 2, 3, 0, 1])
    mu, K = torch.zeros(6, dtype=F64), K[twice][:, twice]
    posterior = condition_dense(mu, K, GaussianSites(sites.shift[twice], sites.precision[twice]))
    torch.testing.assert_close(posterior.mean[4:], posterior.mean[:2], rtol=1e-12, atol=1e-12)
    merged = torch.where(torch.arange(4) < 2, 2.0, 1.0)
    alone = condition_dense(mu[:4], K[:4, :4], GaussianSites(merged * sites.shift, merged * sites.precision))
    torch.testing.assert_close(posterior.covariance[:4, :4], alone.covariance, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(posterior.log_normalizer, alone.log_normalizer, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_prediction_is_that_of_the_joint_prior(negative, batch):
    mu, K, sites = random_problem(7, batch=batch, negative=negative)
    zero = torch.zeros(*batch, 3, dtype=F64)
    joint = GaussianSites(torch.cat([sites.shift[..., :4], zero], -1), torch.cat([sites.precision[..., :4], zero], -1))
    m, V, _ = by_inverse(mu, K, joint)
    kept = GaussianSites(sites.shift[..., :4], sites.precision[..., :4])
    posterior = condition_dense(mu[..., :4], K[..., :4, :4], kept)
    assert bool(posterior.positive_definite.all())
    predicted = posterior.predict(mu[..., 4:], K[..., :4, 4:], K[..., 4:, 4:])
    torch.testing.assert_close(predicted.mean, m[..., 4:], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(predicted.covariance_matrix, V[..., 4:, 4:], rtol=1e-10, atol=1e-10)


def test_a_batch_is_a_loop():
    mu, K, sites = random_problem(5, batch=(2, 3))
    together = condition_dense(mu, K, sites)
    for i in range(2):
        for j in range(3):
            alone = condition_dense(mu[i, j], K[i, j], GaussianSites(sites.shift[i, j], sites.precision[i, j]))
            torch.testing.assert_close(together.mean[i, j], alone.mean, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(together.covariance[i, j], alone.covariance, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(together.log_normalizer[i, j], alone.log_normalizer, rtol=1e-13, atol=1e-13)


def test_batches_of_sites_and_priors_broadcast():
    mu, K, _ = random_problem(5)
    _, _, sites = random_problem(5, batch=(3,), negative=False)
    together = condition_dense(mu, K, sites)
    assert together.mean.shape == (3, 5)
    assert together.log_normalizer.shape == (3,)
    alone = condition_dense(mu, K, GaussianSites(sites.shift[1], sites.precision[1]))
    torch.testing.assert_close(together.mean[1], alone.mean)


def test_says_when_a_precision_is_too_negative():
    mu, K, sites = random_problem(5)
    largest = torch.linalg.eigvalsh(K)[-1]
    bad = GaussianSites(sites.shift, torch.full((5,), -1.01, dtype=F64) / largest)
    good = GaussianSites(sites.shift, torch.full((5,), -0.99, dtype=F64) / largest)
    assert not condition_dense(mu, K, bad).positive_definite
    assert condition_dense(mu, K, good).positive_definite


def test_one_bad_member_of_a_batch_is_enough():
    mu, K, sites = random_problem(4, batch=(2,))
    precision = sites.precision.clone()
    precision[1] = -100.0
    ok = condition_dense(mu, K, GaussianSites(sites.shift, precision)).positive_definite
    assert bool(ok.any())
    assert not bool(ok.all())


def test_says_when_the_prior_is_indefinite():
    K = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=F64)
    ones = torch.ones(2, dtype=F64)
    assert not condition_dense(0 * ones, K, GaussianSites(ones, 5 * ones)).positive_definite


@pytest.mark.parametrize("batch", [(), (3,)])
def test_says_so_too_where_the_sites_hide_it_from_a_factorisation(batch):
    """I + P K P is positive definite, with a pivot that no positive semidefinite K gives."""
    ones = torch.ones(*batch, 2, dtype=F64)
    for smallest, is_one in ((-0.17, False), (-1e-9, True), (0.0, True)):  # an eigenvalue, and whether it is rounding
        K = tensor([1.0, 1.0 - smallest], [1.0 - smallest, 1.0])
        posterior = condition_dense(0 * ones, K, GaussianSites(ones, 5 * ones))
        assert posterior.positive_definite.tolist() == torch.full(batch, is_one).tolist()


@pytest.mark.parametrize("negative", [False, True])
def test_derivatives_agree_with_finite_differences(negative):
    mu, K, sites = random_problem(3, negative=negative)
    factor = torch.linalg.cholesky(K)

    def outputs(mu, factor, shift, precision):
        posterior = condition_dense(mu, factor @ factor.mT, GaussianSites(shift, precision))
        return posterior.mean, posterior.covariance, posterior.log_normalizer, posterior.variance

    inputs = tuple(t.clone().requires_grad_(True) for t in (mu, factor, sites.shift, sites.precision))
    assert torch.autograd.gradcheck(outputs, inputs, eps=1e-6, atol=1e-6)


def test_float32_in_is_computed_in_float64():
    mu, K, sites = random_problem(5)
    posterior = condition_dense(mu.float(), K.float(), sites.to(torch.float32))
    assert posterior.mean.dtype == F64
    torch.testing.assert_close(posterior.mean, by_inverse(mu, K, sites)[0], rtol=1e-3, atol=1e-3)
    assert posterior.predict(mu.float(), K.float(), K.float()).mean.dtype == torch.float32


@pytest.mark.parametrize("smallest", [-2, -4, -8], ids=["all reliable", "a few not", "most not"])
@pytest.mark.parametrize("num_negative", [0, 7])
@pytest.mark.parametrize("prepared", [False, True], ids=["variances first", "response first"])
def test_variances_from_the_inverse_factor_are_those_of_the_solve(monkeypatch, smallest, num_negative, prepared):
    monkeypatch.setattr(triangles, "_LEAF", 32)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(150, 2, generator=generator, dtype=torch.float64)
    prior = 3 * torch.exp(-4 * torch.cdist(x, x).square()) * torch.tensor([1.0, 100.0]).double().view(2, 1, 1)
    precision = 10 ** (smallest + (3 - smallest) * torch.rand(2, 150, generator=generator, dtype=torch.float64))
    # Proper: with Q^2 the negative precisions, Q V1 Q is below Q K Q, whose trace is below 0.9.
    share = torch.rand(2, num_negative, generator=generator, dtype=torch.float64)
    precision[:, :num_negative] = (
        -0.9 * share / (max(num_negative, 1) * prior.diagonal(dim1=-2, dim2=-1)[:, :num_negative])
    )
    sites = GaussianSites(torch.randn(2, 150, generator=generator, dtype=torch.float64), precision)
    posterior = condition_dense(torch.zeros_like(precision), prior, sites)
    if prepared:
        posterior.prepare_gradient()
    assert bool(posterior.positive_definite.all())
    torch.testing.assert_close(
        posterior.variance, posterior.covariance.diagonal(dim1=-2, dim2=-1), rtol=1e-9, atol=1e-14 * 300
    )
    share = 1 - precision * posterior.covariance.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(posterior.cavity_share, share, rtol=1e-6, atol=1e-9)


def test_cavities_of_sharp_sites_keep_their_digits():
    """Far points: V_ii = k / (1 + k tau), so 1 - tau v is 1 / (1 + k tau), far below the rounding of v."""
    prior = 5 * torch.eye(3, dtype=torch.float64)
    precision = torch.tensor([1e12, 1e14, 0.3], dtype=torch.float64)
    sites = GaussianSites(torch.tensor([2e12, -1e14, 1.0], dtype=torch.float64), precision)
    posterior = condition_dense(torch.ones(3, dtype=torch.float64), prior, sites)
    torch.testing.assert_close(posterior.cavity_share, 1 / (1 + 5 * precision), rtol=1e-14, atol=0)
    mean, variance = posterior.leave_one_out
    torch.testing.assert_close(variance, torch.full((3,), 5.0, dtype=torch.float64), rtol=1e-13, atol=0)
    torch.testing.assert_close(mean, torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-2)


@pytest.mark.parametrize("prepared", [False, True], ids=["variances first", "response first"])
@pytest.mark.parametrize("share_of_weak", [0.0, 0.8], ids=["few weak", "most weak"])
@pytest.mark.parametrize("decades", [3, 6, 12, 20])
@pytest.mark.parametrize("scale", [1.0, 1e8])
def test_sites_of_very_different_precisions_keep_the_digits_of_every_marginal(scale, decades, share_of_weak, prepared):
    size = 12
    x = torch.linspace(0, 3, size, dtype=F64)
    K = scale * (torch.exp(-0.5 * (x.unsqueeze(-1) - x).square()) + 1e-3 * torch.eye(size, dtype=F64))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        precision = 10 ** (decades * (2 * torch.rand(size, dtype=F64, generator=generator) - 1))
        weak = torch.rand(size, generator=generator) < share_of_weak
        precision = torch.where(weak, precision.clamp(max=1e-4), precision) / scale
        posterior = condition_dense(torch.zeros_like(x), K, GaussianSites(precision, precision))
        if prepared:
            posterior.prepare_gradient()
        with mpmath.workdps(100):
            T, prior, eye = mpmath.diag(precision.tolist()), mpmath.matrix(K.tolist()), mpmath.eye(size)
            exact = (eye + prior * T) ** -1 * prior
            V = torch.tensor([float(entry) for entry in exact], dtype=F64).view(size, size)
            share = torch.tensor([float(1 - T[i, i] * exact[i, i]) for i in range(size)], dtype=F64)
        v = V.diagonal()
        torch.testing.assert_close(posterior.variance, v, rtol=1e-12, atol=0)
        torch.testing.assert_close(posterior.cavity_share, share, rtol=1e-12, atol=0)
        unit = v.rsqrt().unsqueeze(-1) * v.rsqrt()
        torch.testing.assert_close(unit * posterior.covariance, unit * V, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_positive", [0, 1, 5, 19, 20])
def test_sites_of_no_positive_precision_are_left_out_of_the_factor(num_positive):
    mu, K, sites = random_problem(20, negative=False)
    precision = sites.precision.clone()
    precision[num_positive:] = 0.0
    precision[num_positive + 1 :: 2] = -0.02 / torch.linalg.eigvalsh(K)[-1]
    sites = GaussianSites(sites.shift, precision)
    posterior = condition_dense(mu, K, sites)
    m, V, log_det = by_inverse(mu, K, sites)
    torch.testing.assert_close(posterior.mean, m, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(posterior.variance, V.diagonal(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(posterior.log_det, log_det, rtol=1e-10, atol=1e-10)
    batch = condition_dense(mu, K.expand(2, 20, 20), sites)
    torch.testing.assert_close(batch.variance[1], posterior.variance, rtol=1e-10, atol=1e-10)
