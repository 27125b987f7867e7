"""The Beta likelihood agrees with the Dirichlet of two shares."""

import copy
import pickle

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator
from scipy import stats

from gpext.distributions import CompoundBeta
from gpext.inference import Laplace, Taylor
from gpext.likelihoods import BetaLikelihood, DirichletLikelihood
from tests.members import F64, tensor

MEAN, COVARIANCE = (0.5, 1.5), ((1.0, 0.8), (0.8, 2.0))


def shares(y):
    return torch.stack([y, 1 - y], -1)


def correlated(dtype=F64):
    """Two data with one mean and covariance."""
    V = torch.tensor(COVARIANCE, dtype=dtype)
    mean = torch.tensor(MEAN, dtype=dtype).expand(2, 2)
    return MultitaskMultivariateNormal(mean, to_linear_operator(torch.block_diag(V, V)))


def given():
    """The same distribution as a mixture: weights and Beta parameters on a grid."""
    line = torch.arange(-9, 9, 0.05, dtype=F64)
    z = torch.cartesian_prod(line, line)
    z = z[z.square().sum(-1) < 64]
    f = tensor(*MEAN) + z @ torch.linalg.cholesky(torch.tensor(COVARIANCE, dtype=F64)).T
    weights = torch.exp(-0.5 * z.square().sum(-1)) * 0.05**2 / (2 * torch.pi)
    theta = torch.nn.functional.softplus(f).numpy()
    return weights.numpy(), stats.beta(theta[:, 0], theta[:, 1])


def test_it_is_the_dirichlet_of_two_shares():
    generator = torch.Generator().manual_seed(0)
    y = torch.rand(7, generator=generator, dtype=F64)
    f = 3 * torch.randn(2, 7, generator=generator, dtype=F64)
    beta, dirichlet = BetaLikelihood(), DirichletLikelihood(2)
    torch.testing.assert_close(beta.log_prob(y, f), dirichlet.log_prob(shares(y), f), rtol=1e-12, atol=1e-12)
    theta = torch.nn.functional.softplus(f).numpy()
    assert beta.log_prob(y, f).tolist() == pytest.approx(stats.beta.logpdf(y.numpy(), *theta).tolist(), rel=1e-10)
    assert beta(f).log_prob(y).tolist() == pytest.approx(beta.log_prob(y, f).tolist(), rel=1e-10)
    ours, theirs = beta.curvature(y, f), dirichlet.curvature(shares(y), f)
    for name in ("log_prob", "gradient", "blocks", "expected_blocks"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(beta.expansion_point(y), dirichlet.expansion_point(shares(y)))
    q = MultivariateNormal(f, torch.diag_embed(torch.rand(2, 7, generator=generator, dtype=F64)))
    for method in ("log_marginal", "expected_log_prob"):
        torch.testing.assert_close(getattr(beta, method)(y, q), getattr(dirichlet, method)(shares(y), q))


@pytest.mark.parametrize("rule", [Laplace(), Taylor()])
def test_inference_is_that_of_two_shares(rule):
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 3, 9, dtype=F64)
    K = 2 * torch.exp(-0.5 * (x.unsqueeze(-1) - x).square()) + 1e-4 * torch.eye(9, dtype=F64)
    y = torch.rand(9, generator=generator, dtype=F64)
    prior = MultivariateNormal(torch.ones(2, 9, dtype=F64), to_linear_operator(K.expand(2, 9, 9)))
    ours, theirs = rule.infer(prior, BetaLikelihood(), y), rule.infer(prior, DirichletLikelihood(2), shares(y))
    for name in ("log_evidence", "log_loo"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-9, atol=1e-9)


def test_the_predictive_against_a_fine_mixture():
    predictive = BetaLikelihood()(correlated())
    assert isinstance(predictive, CompoundBeta)
    assert predictive.batch_shape == (2,)
    weights, mixture = given()
    for y in (1e-3, 0.3, 0.99):
        at = tensor(y)
        assert predictive.log_prob(at).exp()[1].item() == pytest.approx(weights @ mixture.pdf(y), rel=1e-7)
        assert predictive.cdf(at)[1].item() == pytest.approx(weights @ mixture.cdf(y), abs=1e-9)
    mean = weights @ mixture.mean()
    assert predictive.mean[0].item() == pytest.approx(mean, abs=1e-8)
    variance = weights @ (mixture.var() + (mixture.mean() - mean) ** 2)
    assert predictive.variance[0].item() == pytest.approx(variance, abs=1e-7)
    for q in (1e-4, 0.025, 0.5, 0.975):
        assert weights @ mixture.cdf(predictive.quantile(q)[0].item()) == pytest.approx(q, abs=1e-8)


def test_values_and_probabilities_broadcast():
    predictive = BetaLikelihood()(correlated())
    y = tensor(0.1, 0.5, 0.9).unsqueeze(-1)
    assert predictive.log_prob(y).shape == predictive.cdf(y).shape == (3, 2)
    torch.testing.assert_close(predictive.log_prob(y)[2], predictive.log_prob(tensor(0.9, 0.9)))
    quantiles = predictive.icdf(y)
    torch.testing.assert_close(predictive.cdf(quantiles), y.expand(3, 2), rtol=0, atol=1e-8)
    single = BetaLikelihood()(correlated(torch.float32))
    assert single.icdf(0.5).dtype == single.cdf(y.float()).dtype == torch.float32
    torch.testing.assert_close(single.icdf(0.5).double(), quantiles[1], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"strictly between 0 and 1; got 1"):
        predictive.icdf(1.0)


def test_a_batch_is_a_loop():
    mean = torch.tensor([[0.5, 2.0, 1.0], [1.5, -1.0, 4.0]], dtype=F64)
    shifted = torch.stack([mean, mean + 1])
    predictive = BetaLikelihood()(MultivariateNormal(shifted, torch.eye(3, dtype=F64).expand(2, 2, 3, 3)))
    alone = BetaLikelihood()(MultivariateNormal(mean + 1, torch.eye(3, dtype=F64).expand(2, 3, 3)))
    y = tensor(0.2, 0.5, 0.9)
    for name in ("mean", "variance"):
        torch.testing.assert_close(getattr(predictive, name)[1], getattr(alone, name), rtol=1e-8, atol=1e-8)
    for name in ("cdf", "log_prob", "icdf"):
        torch.testing.assert_close(getattr(predictive, name)(y)[1], getattr(alone, name)(y), rtol=1e-7, atol=1e-7)


def test_quantiles_of_parameters_near_zero():
    """Half of the mass is at y < 1e-9; below the range of float64, a quantile is its smallest number."""
    q = MultivariateNormal(tensor(-4.0, 0.0).unsqueeze(-1), torch.full((2, 1, 1), 0.1, dtype=F64))
    predictive = BetaLikelihood()(q)
    median = predictive.icdf(0.5)
    assert median.item() < 1e-9
    assert predictive.cdf(median).item() == pytest.approx(0.5, abs=1e-8)
    assert 0 < predictive.icdf(1e-9).item() < 1e-300


def test_draws_have_the_distribution():
    predictive = BetaLikelihood()(correlated())
    y = predictive.sample((500,), generator=torch.Generator().manual_seed(0))
    assert y.shape == (500, 2)
    assert stats.kstest(predictive.cdf(y).flatten().numpy(), "uniform").pvalue > 1e-5
    assert torch.equal(y, predictive.sample((500,), generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ((0.5, 0.0), r"strictly between 0 and 1; got 0 at index 1.*Smooth: y = \(y \* \(n - 1\) \+ 0.5\) / n.* n = 2"),
        ((1.0, 0.2, 0.3), r"got 1 at index 0.*n = 3"),
        ((0.5, 12.0), r"got 12 at index 1. Divide counts by their totals"),
        ((-0.1, 0.0), r"got -0.1 at index 0. Divide"),
    ],
)
def test_wrong_proportions_are_refused(y, message):
    with pytest.raises(ValueError, match=message):
        BetaLikelihood().check(tensor(*y))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(clone):
    likelihood, y, f = BetaLikelihood(), torch.rand(3), torch.randn(2, 3)
    assert torch.equal(clone(likelihood).log_prob(y, f), likelihood.log_prob(y, f))
    predictive = likelihood(correlated())
    assert torch.equal(clone(predictive).mean, predictive.mean)
