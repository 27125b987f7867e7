"""Fixed rules of analytic functions against the adaptive rule, and what they leave to it."""

import gpytorch
import pytest
import torch

from gpext import likelihoods
from gpext.bounds import conditional_log_prob
from gpext.likelihoods.latent import LatentLikelihood, strip_of
from gpext.likelihoods.tilted_moments import tilt
from gpext.quadrature import (
    analytic_expectation,
    analytic_tilted_moments,
    expectation,
    log_expectation,
    tilted_moments,
)
from tests.latent_cases import CASES, counts, intervals, positive, real
from tests.members import F64, tensor


def student_t():
    return likelihoods.StudentTLikelihood().double().initialize(noise=0.3, deg_free=3.1)


def counts_or_more(generator, n):
    y = counts(generator, n)
    return torch.stack(
        [y, torch.where(torch.arange(n) % 3 == 0, y, torch.where(torch.arange(n) % 3 == 1, torch.inf, y + 2))], -1
    )


def times(generator, n):
    y = positive(generator, n)
    return torch.stack([y, torch.where(torch.arange(n) % 2 == 0, y, torch.inf)], -1)


def zero_inflated(probability):
    likelihood = likelihoods.ZeroInflated(likelihoods.PoissonLikelihood()).double()
    return likelihood.initialize(zero_probability=probability)


ANALYTIC = {
    **{name: (case.make, case.targets) for name, case in CASES.items() if case.num_latents is None},
    "censored student-t": (lambda: likelihoods.Censored(student_t()), intervals),
    "censored counts": (lambda: likelihoods.Censored(likelihoods.PoissonLikelihood()), counts_or_more),
    "censored gamma": (lambda: likelihoods.Censored(likelihoods.GammaLikelihood().double()), times),
    "censored weibull": (lambda: likelihoods.Censored(likelihoods.WeibullLikelihood().double()), times),
    "truncated student-t": (lambda: likelihoods.Truncated(student_t(), lower=-6.0, upper=7.0), real),
    "truncated counts": (lambda: likelihoods.Truncated(likelihoods.PoissonLikelihood(), upper=9), counts),
    "zero-inflated": (lambda: zero_inflated(0.3), counts),
    "rarely zero-inflated": (lambda: zero_inflated(0.001), counts),
    "negative binomial hurdle": (
        lambda: likelihoods.Hurdle(likelihoods.NegativeBinomialLogLikelihood()).double(),
        counts,
    ),
}


def case(name, n=24):
    """A likelihood, targets, and marginals from narrow ones to those three times as wide as the strip."""
    make, targets = ANALYTIC[name]
    generator = torch.Generator().manual_seed(3)
    likelihood, y = make(), targets(generator, n)
    strip = strip_of(likelihood, y)
    if strip is None:
        pytest.skip("no strip is known")
    mean = torch.randn(n, dtype=F64, generator=generator)
    width = torch.logspace(-3, 0.47, n, dtype=F64)
    return likelihood, y, mean, (width * torch.where(strip > 0, strip, 1.0)).square()


@pytest.mark.parametrize("name", ANALYTIC)
def test_integrals_and_derivatives_are_those_of_the_adaptive_rule(name):
    likelihood, y, mean, variance = case(name)
    if not isinstance(likelihood, LatentLikelihood):
        pytest.skip("of another package")
    strip, part, knots = strip_of(likelihood, y), likelihood.part(y), likelihood.knots(y)
    parameters = [p for p in likelihood.parameters() if p.requires_grad]

    def with_gradient(integral):
        m, v = mean.clone().requires_grad_(), variance.clone().requires_grad_()
        value = integral(m, v)
        wanted = torch.autograd.grad(value.sum(), [m, v, *parameters], allow_unused=True, materialize_grads=True)
        return value.detach(), wanted

    def log_p(f):
        return conditional_log_prob(likelihood, y, f)

    for fixed, adaptive in (
        (lambda m, v: analytic_expectation(part, m, v, strip), lambda m, v: expectation(log_p, m, v, knots=knots)),
        (
            lambda m, v: analytic_tilted_moments(part, m, v, strip).log_normalizer,
            lambda m, v: log_expectation(log_p, m, v, knots=knots),
        ),
    ):
        (found, slopes), (exact, expected) = with_gradient(fixed), with_gradient(adaptive)
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)
        # the adaptive derivative in the variance has rounding of 1e-16 / v
        torch.testing.assert_close(slopes[0], expected[0], rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(slopes[1], expected[1], rtol=1e-6, atol=3e-7)
        torch.testing.assert_close(slopes[2:], expected[2:], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("power", [1.0, 0.4])
@pytest.mark.parametrize("name", ANALYTIC)
def test_tilted_moments_are_those_of_the_adaptive_rule(name, power):
    likelihood, y, mean, variance = case(name)
    with torch.no_grad():
        found = tilt(likelihood, y, power)(mean, variance)
        exact = (
            tilted_moments(
                lambda f: power * conditional_log_prob(likelihood, y, f), mean, variance, knots=likelihood.knots(y)
            )
            if isinstance(likelihood, LatentLikelihood)
            else found
        )
    sd = exact.variance.sqrt()
    for k, moment in enumerate(("log_normalizer", "mean", "variance", "third", "fourth")):
        gap = (getattr(found, moment) - getattr(exact, moment)).abs() / sd**k
        assert float(gap.max()) < 1e-8, moment


@pytest.mark.parametrize("name", ["censored", "censored student-t", "truncated counts", "hurdle"])
def test_a_gaussian_within_the_strip_takes_few_nodes(name, monkeypatch):
    """A tenth of what the adaptive rule takes at the least, with two knots."""
    likelihood, y, mean, _ = case(name)
    strip = strip_of(likelihood, y)
    sizes = []
    inside = likelihood.unchecked_log_prob
    monkeypatch.setattr(likelihood, "unchecked_log_prob", lambda y, f: sizes.append(f.numel()) or inside(y, f))
    analytic_expectation(likelihood.part(y), mean, 0.1 * strip.square(), strip)
    assert sum(sizes) <= 60 * len(y)


def test_far_data_and_wide_gaussians_are_left_to_the_adaptive_rule():
    """Limits forty standard deviations away, no variance at all, and one a million times that of the noise."""
    likelihood = likelihoods.Censored(gpytorch.likelihoods.GaussianLikelihood().double())
    y = tensor([40.0, torch.inf], [-torch.inf, -40.0], [0.3, torch.inf], [0.2, 0.9], [-torch.inf, 40.0])
    for variance in (0.0, 1e-20, 1.0, 1e6):
        m, v = torch.zeros(5, dtype=F64), torch.full((5,), variance, dtype=F64)
        for found, exact in (
            (likelihood.expected_log_density(y, m, v), expectation),
            (likelihood.log_density(y, m, v), log_expectation),
        ):
            expected = exact(lambda f: likelihood.log_prob(y, f), m, v, knots=likelihood.knots(y))
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class OwnDensity(likelihoods.StudentTLikelihood):
    """A subclass whose density is not the one that the strip of its base belongs to."""

    def unchecked_log_prob(self, targets, f):
        return -1e3 * (targets - f).abs()


class WrongStrip(likelihoods.PoissonLikelihood):
    """A kink, and the claim that there is none."""

    def unchecked_log_prob(self, targets, f):
        return -20.0 * (targets - f).abs()

    def strip(self, targets):
        return torch.full_like(targets, 50.0)


def test_a_wrong_strip_is_noticed_and_one_of_another_density_not_taken():
    y = tensor(0.0, 1.0)
    assert strip_of(OwnDensity().double(), y) is None
    assert strip_of(WrongStrip(), y) is not None
    likelihood = WrongStrip()
    m, v = tensor(0.0, 0.4), tensor(1.0, 0.3)
    found = likelihood.log_density(y, m, v)
    exact = log_expectation(lambda f: likelihood.unchecked_log_prob(y, f), m, v, knots=y.unsqueeze(0))
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)
