"""The negative binomial with a log link: derivatives against 60 digits for dispersions 1e-6 to 1e6, predictions."""

import math

import mpmath
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator

from gpext.bounds import PiecewiseQuadratic
from gpext.inference import EP, KL, Laplace, Status, Taylor
from gpext.likelihoods import NegativeBinomialLogitLikelihood, NegativeBinomialLogLikelihood, PoissonLikelihood
from tests.members import F64, rbf_prior, tensor

EPS = torch.finfo(F64).eps
COUNTS = [0.0, 1.0, 5.0, 15.0, 1e3, 1e6, 1e9]
DISPERSIONS = [1e-6, 1e-2, 1.0, 1e3, 1e6]


def likelihood_of(dispersion):
    likelihood = NegativeBinomialLogLikelihood().double()
    likelihood.dispersion = tensor(dispersion)
    return likelihood


def exact(y, alpha, f, order=(0, 0)):
    """d^i/df^i d^j/dalpha^j log p in 60 digits."""

    def log_p(f, alpha):
        r = 1 / alpha
        binomial = mpmath.loggamma(y + r) - mpmath.loggamma(r) - mpmath.loggamma(y + 1)
        n = y + r
        return binomial + y * (f + mpmath.log(alpha)) - n * mpmath.log1p(alpha * mpmath.exp(f))

    with mpmath.workdps(60):
        f, alpha = mpmath.mpf(f), mpmath.mpf(alpha)
        if order == (0, 1):
            return float(mpmath.diff(lambda a: log_p(f, a), alpha, h=alpha * mpmath.mpf(10) ** -25))
        mean, n = mpmath.exp(f), y + 1 / alpha
        share = alpha * mean / (1 + alpha * mean)
        return float({0: log_p(f, alpha), 1: y - n * share, 2: -n * share * (1 - share)}[order[0]])


@pytest.mark.parametrize("alpha", DISPERSIONS)
@pytest.mark.parametrize("y", COUNTS)
def test_values_and_derivatives_have_digits(y, alpha):
    """At several widths of the likelihood from its mode; f and log alpha are known to rounding."""
    likelihood, target = likelihood_of(alpha), tensor(y)
    alpha = likelihood.dispersion.item()
    width = math.sqrt(1 / max(y, 1) + alpha)
    for deviations in (-3.0, -0.1, 0.0, 0.7, 20.0):
        f = tensor(math.log(max(y, 1)) + deviations * min(width, 5.0)).requires_grad_()
        value = likelihood.log_prob(target, f)
        (slope,) = torch.autograd.grad(value, f, create_graph=True)
        (bend,) = torch.autograd.grad(slope, f, retain_graph=True)
        (in_raw,) = torch.autograd.grad(value, likelihood.raw_dispersion)
        expected = [exact(y, alpha, f.item(), (order, 0)) for order in range(3)]
        known_to = 8 * EPS * max(abs(f.item()), abs(math.log(alpha)), 1)  # of f - log y and of log alpha
        assert value.item() == pytest.approx(expected[0], rel=1e-13, abs=1e-14 + known_to * abs(expected[1]))
        of_slope = known_to * abs(expected[2]) + 8 * EPS * math.sqrt(abs(expected[2]) + 1)
        assert slope.item() == pytest.approx(expected[1], rel=1e-12, abs=of_slope)
        assert bend.item() == pytest.approx(expected[2], rel=1e-10 + known_to)
        in_alpha = in_raw.item() / -math.expm1(-alpha)  # softplus' is 1 - e^-softplus
        in_exact = exact(y, alpha, f.item(), (0, 1))
        scale = (abs(expected[1]) + 1) / alpha  # d/d log alpha has a rounding of what moves in log p
        assert in_alpha == pytest.approx(in_exact, rel=1e-6, abs=1e-12 * scale)


@pytest.mark.parametrize("f", [-800.0, -40.0, 40.0, 300.0])
@pytest.mark.parametrize("y", [0.0, 3.0])
def test_far_latents_neither_overflow_nor_lose_the_slope(y, f):
    for alpha in (1e-6, 1.0, 1e6):
        likelihood, latent = likelihood_of(alpha), tensor(f).requires_grad_()
        value = likelihood.log_prob(tensor(y), latent)
        (slope,) = torch.autograd.grad(value, latent, create_graph=True)
        (bend,) = torch.autograd.grad(slope, latent)
        alpha = likelihood.dispersion.item()
        assert value.item() == pytest.approx(exact(y, alpha, f), rel=1e-12)
        assert slope.item() == pytest.approx(exact(y, alpha, f, (1, 0)), rel=1e-9, abs=1e-300)
        assert math.isfinite(bend.item())


def test_without_dispersion_it_is_poisson():
    y, f = tensor(0.0, 1.0, 7.0, 40.0), tensor(-1.0, 0.4, 2.0, 3.5)
    apart = likelihood_of(1e-6).log_prob(y, f) - PoissonLikelihood().log_prob(y, f)
    mean = f.exp()
    first = 0.5e-6 * ((y - mean).square() - y)  # of the series in alpha
    torch.testing.assert_close(apart.detach(), first, rtol=1e-3, atol=1e-12)


def test_it_is_the_logit_likelihood_at_another_latent():
    y, f = tensor(0.0, 1.0, 7.0, 40.0), tensor(-1.0, 0.4, 2.0, 3.5)
    logit = NegativeBinomialLogitLikelihood().double()
    logit.total_count = tensor(1 / 0.3)
    log = likelihood_of(0.3)
    torch.testing.assert_close(log.log_prob(y, f), logit.log_prob(y, f + math.log(0.3)), rtol=1e-11, atol=1e-12)
    variance = tensor(0.3, 1.0, 0.1, 2.0)
    for method in ("expected_log_density", "log_density"):
        ours = getattr(log, method)(y, f, variance)
        torch.testing.assert_close(ours, getattr(logit, method)(y, f + math.log(0.3), variance), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 3.0, 1e5])
@pytest.mark.parametrize("y", [0.0, 20.0, 1e9])
def test_expected_log_densities_agree_with_mpmath(y, alpha):
    likelihood = likelihood_of(alpha)
    alpha, m, v = likelihood.dispersion.item(), math.log(max(y, 1)) + 0.1, 0.01
    with mpmath.workdps(40):
        r = 1 / mpmath.mpf(alpha)

        def log_p(f):
            binomial = mpmath.loggamma(y + r) - mpmath.loggamma(r) - mpmath.loggamma(y + 1)
            return binomial + y * (f - mpmath.log(r)) - (y + r) * mpmath.log1p(mpmath.exp(f) / r)

        sd, mean = mpmath.sqrt(mpmath.mpf(v)), mpmath.mpf(m)
        weight = mpmath.npdf
        points = [k * mpmath.mpf(3) for k in range(-5, 6)]
        first = mpmath.quad(lambda t: log_p(mean + sd * t) * weight(t), points)
        peak = max(log_p(mean + sd * mpmath.mpf(k) / 200) for k in range(-400, 401))
        if y < 1e9:  # beyond, the integrand is too narrow for these panels
            share = mpmath.quad(lambda t: mpmath.exp(log_p(mean + sd * t) - peak) * weight(t), points)
            second = peak + mpmath.log(share)
            found = likelihood.log_density(tensor(y), tensor(m), tensor(v)).item()
            assert found == pytest.approx(float(second), rel=1e-9, abs=1e-9)
    found = likelihood.expected_log_density(tensor(y), tensor(m), tensor(v)).item()
    assert found == pytest.approx(float(first), rel=1e-9, abs=1e-9)


def test_the_predictive_distribution():
    """Its pmf sums to the cdf, and mean and variance are those of a log-normal mean."""
    mean, variance = tensor(0.4, 1.5), tensor(0.5, 0.05)
    predictive = likelihood_of(0.5)(MultivariateNormal(mean, DiagLinearOperator(variance)))
    y = torch.arange(6.0).double().unsqueeze(-1).expand(-1, 2)
    torch.testing.assert_close(predictive.cdf(y[-1]), predictive.log_prob(y).exp().sum(0), rtol=1e-9, atol=0)
    rate = (mean + variance / 2).exp()
    square = rate.square() * variance.exp()
    torch.testing.assert_close(predictive.mean, rate, rtol=1e-9, atol=0)
    torch.testing.assert_close(predictive.variance, rate + 1.5 * square - rate.square(), rtol=1e-8, atol=0)
    median = predictive.quantile(0.5)
    assert bool((predictive.cdf(median) >= 0.5).all() and (predictive.cdf(median - 1) < 0.5).all())


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("rule", [KL(), KL(PiecewiseQuadratic()), Laplace(), Taylor(), EP()], ids=repr)
def test_every_rule_takes_counts_of_all_sizes(rule, alpha):
    x = torch.linspace(0, 3, 6, dtype=F64).unsqueeze(-1)
    prior = rbf_prior(x, mean=3.0, outputscale=30.0)[0]
    y = tensor(0.0, 2.0, 1e3, 1e5, 3.0, 0.0)
    result = rule.infer(prior, likelihood_of(alpha), y)
    assert result.status is Status.CONVERGED
    assert math.isfinite(result.log_evidence.item())
    assert bool(result.log_loo.isfinite().all())
