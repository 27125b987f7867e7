"""Predictions p(y) = int p(y | f) N(f) df: density, cdf, quantiles and draws against brute-force integrals."""

import copy
import functools
import math
import pickle

import pytest
import scipy.stats
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from torch.distributions import Bernoulli, Gamma, Laplace, Normal

from gpext.distributions import (
    AdditiveNoisePredictive,
    CompoundDistribution,
    LatentNormal,
    Matern32,
    NegativeBinomial,
    Poisson,
    StudentT,
)
from gpext.distributions.predictive import compound
from gpext.likelihoods import (
    GammaLikelihood,
    LogLogisticLikelihood,
    LogNormalLikelihood,
    MultivariatePoissonLikelihood,
    NegativeBinomialLogLikelihood,
    PoissonLikelihood,
    WeibullLikelihood,
)

F64 = torch.float64


def tensor(*values):
    return torch.tensor(values, dtype=F64)


MEAN, VARIANCE = tensor(0.4, -1.0, 2.0), tensor(1.0, 0.01, 0.25)


def poisson(f):
    return Poisson(f.exp())


def negative_binomial(f):
    return NegativeBinomial(3.0, logits=f)


def gamma(f):
    return Gamma(2.0, f.exp())


def student_t(f, deg_free=4.0, scale=0.1):
    return StudentT(deg_free, f, scale)


def brute_force(function, mean, sd):  # E function(f), function (F,) -> (F,), for integrands of width above 1e-4 sd
    f = (
        torch.linspace(-12, 12, 400001, dtype=F64) * sd + mean
    )  # trapezoid: exponentially accurate for smooth integrands
    weights = torch.exp(-0.5 * ((f - mean) / sd) ** 2)
    return ((weights * function(f)).sum() / weights.sum()).item()


CASES = {
    "poisson": (CompoundDistribution, poisson, tensor(0.0, 1.0, 9.0)),
    "negative_binomial": (CompoundDistribution, negative_binomial, tensor(0.0, 1.0, 30.0)),
    "gamma": (CompoundDistribution, gamma, tensor(0.1, 2.0, 0.02)),
    "student_t": (AdditiveNoisePredictive, student_t, tensor(0.0, 4.0, 2.0)),
    "matern32": (AdditiveNoisePredictive, lambda f: Matern32(f, 0.2), tensor(0.0, -0.2, 2.0)),
    "laplace": (AdditiveNoisePredictive, lambda f: Laplace(f, 0.2), tensor(0.0, -0.2, 2.0)),
}


@pytest.fixture(params=CASES)
def case(request):
    kind, conditional, value = CASES[request.param]
    return kind(conditional, MEAN, VARIANCE), conditional, value


def test_against_brute_force(case):
    predictive, conditional, value = case
    log_prob, cdf = predictive.log_prob(value), predictive.cdf(value)
    for i in range(3):
        m, s, y = MEAN[i].item(), VARIANCE[i].sqrt().item(), value[i]
        density = brute_force(lambda f, y=y: conditional(f).log_prob(y).exp(), m, s)
        assert log_prob[i].exp().item() == pytest.approx(density, rel=1e-7)
        assert cdf[i].item() == pytest.approx(brute_force(lambda f, y=y: conditional(f).cdf(y), m, s), rel=1e-7)
        mean = brute_force(lambda f: conditional(f).mean, m, s)
        second = brute_force(lambda f: conditional(f).variance + conditional(f).mean ** 2, m, s)
        assert predictive.mean[i].item() == pytest.approx(mean, rel=1e-9)
        assert predictive.variance[i].item() == pytest.approx(second - mean**2, rel=1e-8)
        assert predictive.stddev[i].item() == pytest.approx(math.sqrt(second - mean**2), rel=1e-8)


@pytest.mark.slow
def test_quantiles(case):
    predictive, _, value = case
    for q in (1e-6, 0.02, 0.5, 0.9, 1 - 1e-6):
        y = predictive.icdf(torch.full((3,), q, dtype=F64))
        if predictive.support.is_discrete:
            assert bool((predictive.cdf(y) >= q * (1 - 1e-10)).all())
            below = torch.where(y > 0, predictive.cdf((y - 1).clamp(min=0)), 0.0)
            assert bool((below < q).all())
        else:
            assert predictive.cdf(y).tolist() == pytest.approx([q] * 3, rel=1e-9)
    q = predictive.cdf(value)
    assert torch.equal(predictive.quantile(q), predictive.icdf(q))
    assert predictive.icdf(q).tolist() == pytest.approx(value.tolist(), rel=1e-8, abs=1e-9)


@pytest.mark.slow
def test_samples_follow_the_cdf(case):
    predictive, _, _ = case
    torch.manual_seed(0)
    n = 4000
    draws = predictive.sample((n,))
    assert draws.shape == (n, 3)
    u = predictive.cdf(draws)
    if predictive.support.is_discrete:  # randomised: uniform between cdf(k - 1) and cdf(k)
        below = torch.where(draws > 0, predictive.cdf((draws - 1).clamp(min=0)), 0.0)
        u = below + torch.rand(u.shape, dtype=F64) * (u - below)
    for i in range(3):
        # sqrt(n) D has tail 2 exp(-2 x^2): 2.7 is exceeded with probability 1e-6.
        assert scipy.stats.kstest(u[:, i].numpy(), "uniform").statistic * math.sqrt(n) < 2.7


def test_gaussian_noise_is_a_gaussian():
    predictive = AdditiveNoisePredictive(lambda f: Normal(f, 0.5), MEAN, VARIANCE)
    exact = Normal(MEAN, (VARIANCE + 0.25).sqrt())
    y = tensor(-3.0, 0.0, 5.0)
    assert torch.allclose(predictive.log_prob(y), exact.log_prob(y), rtol=1e-12)
    assert torch.allclose(predictive.cdf(y), exact.cdf(y), rtol=1e-11)
    q = tensor(1e-6, 0.3, 0.999)
    assert torch.allclose(predictive.icdf(q), exact.icdf(q), rtol=1e-10)
    assert torch.allclose(predictive.variance, exact.variance, rtol=1e-14)


@pytest.mark.parametrize("deg_free", [0.5, 1.0, 2.0])
def test_heavy_tails_are_told(deg_free):
    conditional = functools.partial(student_t, deg_free=deg_free, scale=1e-3)
    for kind in (AdditiveNoisePredictive, CompoundDistribution):
        predictive = kind(conditional, MEAN, VARIANCE)
        reference = StudentT(deg_free, MEAN)
        assert torch.allclose(predictive.mean, reference.mean, equal_nan=True)
        assert torch.allclose(predictive.variance, reference.variance, equal_nan=True)
    for q in (1e-6, 1e-3, 0.5, 1 - 1e-6):
        y = predictive.icdf(torch.full((3,), q, dtype=F64))
        assert predictive.cdf(y).tolist() == pytest.approx([q] * 3, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(("mean", "variance"), [(1e4, 1e-6), (0.0, 1e6)])
@pytest.mark.filterwarnings("ignore::gpext.quadrature.QuadratureWarning")  # the integral is infinite
def test_a_mean_that_overflows_has_an_infinite_variance(mean, variance, dtype):
    f = MultivariateNormal(torch.full((1,), mean, dtype=dtype), torch.full((1, 1), variance, dtype=dtype))
    latents = MultivariateNormal(f.mean.expand(2, 1), f.covariance_matrix.expand(2, 1, 1))
    for predictive in (PoissonLikelihood()(f), MultivariatePoissonLikelihood(2)(latents)):
        assert bool((predictive.mean == math.inf).all())
        assert bool((predictive.variance == math.inf).all())


def test_gradients_reach_latent_and_likelihood():
    mean, variance = MEAN.clone().requires_grad_(), VARIANCE.clone().requires_grad_()
    scale = tensor(0.3).requires_grad_()
    y = tensor(0.0, -0.9, 3.0)

    def predictive(mean, variance, scale):
        return AdditiveNoisePredictive(lambda f: Normal(f, scale), mean, variance)

    exact = Normal(mean, (variance + scale**2).sqrt())
    for name in ("log_prob", "cdf"):
        mine = torch.autograd.grad(getattr(predictive(mean, variance, scale), name)(y).sum(), (mean, variance, scale))
        truth = torch.autograd.grad(getattr(exact, name)(y).sum(), (mean, variance, scale), retain_graph=True)
        for a, b in zip(mine, truth, strict=True):
            assert torch.allclose(a, b, rtol=1e-8, atol=1e-10)


def test_shapes_expand_and_copies():
    predictive = AdditiveNoisePredictive(student_t, MEAN, VARIANCE)
    y = torch.randn(5, 2, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    wide = predictive.expand((2, 3))
    assert type(wide) is AdditiveNoisePredictive
    assert wide.batch_shape == (2, 3)
    assert wide.sample((4,)).shape == (4, 2, 3)
    for twin in (wide, copy.deepcopy(wide), pickle.loads(pickle.dumps(wide))):
        assert twin.log_prob(y).shape == twin.cdf(y).shape == (5, 2, 3)
        assert torch.allclose(twin.log_prob(y)[3, 1], predictive.log_prob(y[3, 1]), rtol=1e-9)
        assert twin.icdf(tensor(0.5)).shape == (2, 3)
    assert wide.to_event(1).log_prob(y).shape == (5, 2)


def test_float32():
    predictive = AdditiveNoisePredictive(student_t, MEAN.float(), VARIANCE.float())
    exact = AdditiveNoisePredictive(student_t, MEAN, VARIANCE)
    y = torch.tensor([0.0, 4.0, 2.0])
    for name in ("log_prob", "cdf"):
        value = getattr(predictive, name)(y)
        assert value.dtype == torch.float32
        assert torch.allclose(value.double(), getattr(exact, name)(y.double()), rtol=1e-5)
    assert predictive.icdf(torch.tensor(0.9)).dtype == predictive.sample().dtype == torch.float32
    assert torch.allclose(predictive.icdf(torch.tensor(0.9)).double(), exact.icdf(tensor(0.9)), rtol=1e-5)
    assert predictive.mean.dtype == predictive.variance.dtype == torch.float32


def test_zero_variance_is_the_conditional():
    predictive = CompoundDistribution(poisson, MEAN, torch.zeros_like(MEAN))
    k = tensor(0.0, 1.0, 9.0)
    exact = Poisson(MEAN.exp())
    for name in ("log_prob", "cdf"):
        assert torch.allclose(getattr(predictive, name)(k), getattr(exact, name)(k), rtol=1e-12)
    assert torch.allclose(predictive.variance, exact.variance, rtol=1e-12)
    assert predictive.sample().shape == (3,)


def test_override_and_knots_are_used():
    predictive = CompoundDistribution(
        student_t, MEAN, VARIANCE, log_prob=lambda value, mean, variance: value + 10 * mean + 100 * variance
    )
    assert predictive.expand((2, 3)).log_prob(tensor(1.0))[1].tolist() == (1 + 10 * MEAN + 100 * VARIANCE).tolist()
    seen = []

    def knots(value):
        seen.append(value)
        return value.unsqueeze(0)

    CompoundDistribution(student_t, MEAN, VARIANCE, knots=knots).log_prob(MEAN)
    assert torch.equal(seen[0], MEAN)


def test_infinities_and_nan():
    predictive = AdditiveNoisePredictive(student_t, MEAN, VARIANCE, validate_args=False)
    value = tensor(-math.inf, math.inf, math.nan)
    assert predictive.log_prob(value)[:2].tolist() == [-math.inf, -math.inf]
    assert predictive.cdf(value)[:2].tolist() == [0.0, 1.0]
    assert predictive.log_prob(value)[2].isnan()
    assert predictive.cdf(value)[2].isnan()
    with pytest.raises(ValueError, match="support"):
        AdditiveNoisePredictive(student_t, MEAN, VARIANCE).log_prob(value)


def test_errors():
    with pytest.raises(ValueError, match=r"batch shape \(3,\)|batch shape \(2, 3\)"):
        CompoundDistribution(lambda f: Normal(torch.zeros(2, 3), 1.0), MEAN, VARIANCE)
    with pytest.raises(ValueError, match="latent_variance"):
        CompoundDistribution(poisson, MEAN, -VARIANCE)
    predictive = CompoundDistribution(poisson, MEAN, VARIANCE)
    for q in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="strictly between 0 and 1"):
            predictive.icdf(tensor(0.5, q, 0.5))
    with pytest.raises(NotImplementedError, match="Bernoulli has no cdf"):
        CompoundDistribution(lambda f: Bernoulli(logits=f), MEAN, VARIANCE).cdf(torch.zeros(3, dtype=F64))


@pytest.mark.parametrize("mean", [8.0, 11.0, 14.0, 18.0])
def test_the_distribution_function_of_counts_as_large_as_their_rates(mean):
    """p(y <= k | f) is a step about log k, far narrower than the Gaussian: trapezoids across it are the reference."""
    variance = 100.0
    k = torch.tensor([mean - 5, mean, mean + 5], dtype=F64).exp().floor()
    latent = MultivariateNormal(torch.full((3,), mean, dtype=F64), variance * torch.eye(3, dtype=F64))
    step, width = k.log(), 12 / k.sqrt()
    f = step + width * torch.linspace(-1, 1, 40001, dtype=F64).unsqueeze(-1)
    density = scipy.stats.norm.pdf(f, mean, math.sqrt(variance))
    across = torch.trapezoid(torch.as_tensor(scipy.stats.poisson.cdf(k, f.exp()) * density), f, dim=0)
    below = torch.as_tensor(scipy.stats.norm.cdf(step - width, mean, math.sqrt(variance)))
    torch.testing.assert_close(PoissonLikelihood()(latent).cdf(k), below + across, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("mean", "variance"), [(50.0, 0.01), (300.0, 4.0)])
def test_quantiles_of_counts_that_float64_has_no_longer_one_by_one(mean, variance):
    """The rate is log-normal, and so, nearly, is the count."""
    latent = MultivariateNormal(torch.full((1,), mean, dtype=F64), torch.full((1, 1), variance, dtype=F64))
    predictive = PoissonLikelihood()(latent)
    for q in (0.2, 0.9):
        expected = mean + math.sqrt(variance) * scipy.stats.norm.ppf(q)
        assert float(predictive.icdf(q).log()) == pytest.approx(expected, rel=1e-9)


def test_a_count_beyond_all_numbers_has_an_infinite_quantile():
    latent = MultivariateNormal(torch.full((1,), 1000.0, dtype=F64), torch.full((1, 1), 1e-9, dtype=F64))
    assert PoissonLikelihood()(latent).icdf(0.5).item() == math.inf


def test_distribution_functions_are_at_most_one(monkeypatch):
    """If by rounding the weights sum to more than one, log(1 - F) would be nan."""
    monkeypatch.setattr(Poisson, "cdf", lambda self, value: torch.full_like(self.rate, 1 + 2**-51))
    predictive = CompoundDistribution(lambda f: Poisson(f.exp()), torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64))
    assert bool((predictive.cdf(torch.ones(3, dtype=F64)) <= 1).all())


@pytest.mark.parametrize(
    "kind",
    [
        PoissonLikelihood,
        NegativeBinomialLogLikelihood,
        GammaLikelihood,
        WeibullLikelihood,
        LogLogisticLikelihood,
        LogNormalLikelihood,
    ],
)
def test_distribution_functions_by_equal_steps_are_those_of_the_adaptive_rule(kind, monkeypatch):
    likelihood = kind().double()
    mean, variance = (each.flatten() for each in torch.meshgrid(tensor(-2, 0.4, 3), tensor(0.01, 1, 4), indexing="ij"))
    adaptive = CompoundDistribution(likelihood.forward, mean, variance, knots=likelihood.knots)
    values = torch.stack([adaptive.icdf(q).detach() for q in (1e-6, 0.02, 0.5, 0.98, 1 - 1e-6)])
    expected = adaptive.cdf(values)
    by_steps = likelihood(LatentNormal(mean, DiagLinearOperator(variance)))
    torch.testing.assert_close(by_steps.cdf(values), expected, rtol=1e-8, atol=1e-13)
    torch.testing.assert_close(by_steps.icdf(tensor(0.02)), values[1], rtol=1e-7, atol=0)
    monkeypatch.setattr(compound, "expectation", None)
    by_steps.cdf(values[2])  # all of them by equal steps
