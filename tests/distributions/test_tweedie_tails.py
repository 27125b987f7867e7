"""Tails of Tweedie's law against sums with 30 digits and integrals of the density, and their derivatives."""

import math

import mpmath
import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from gpext.distributions import Tweedie, log_cdf, log_interval, log_survival
from gpext.distributions.tweedie_density import tweedie_log_prob
from gpext.distributions.tweedie_tails import tweedie_log_tail
from tests.members import F64

NODES, WEIGHTS = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(40))


def tensor(*values):
    return tuple(torch.tensor(value, dtype=F64) for value in values)


def reference(y, log_mean, phi, p, upper):
    """log P(Y > y) or log P(Y <= y), y > 0, by the sum over the number of terms about the largest; 30 digits."""
    with mpmath.workdps(30):
        y, mu, phi, p = mpmath.mpf(y), mpmath.exp(mpmath.mpf(log_mean)), mpmath.mpf(phi), mpmath.mpf(p)
        rate, a = mu ** (2 - p) / (phi * (2 - p)), (2 - p) / (p - 1)
        x = y / (phi * (p - 1) * mu ** (p - 1))
        ends = (lambda: (x, mpmath.inf)) if upper else (lambda: (0, x))

        def log_term(j):
            beyond = mpmath.log(mpmath.gammainc(a * j, *ends(), regularized=True))
            return j * mpmath.log(rate) - rate - mpmath.loggamma(j + 1) + beyond

        low, high = 1, 2
        while log_term(high) > log_term(high // 2):
            high *= 2
        while high - low > 2:  # the terms have one maximum
            middle = (low + high) // 2
            low, high = (middle, high) if log_term(middle + 1) > log_term(middle) else (low, middle + 1)
        largest, total = log_term(low), mpmath.mpf(0) if upper else mpmath.exp(-rate - log_term(low))
        for step, j in ((-1, low), (1, low + 1)):
            while j >= 1:
                share = mpmath.exp(log_term(j) - largest)
                total += share
                if share < 1e-22:
                    break
                j += step
        return float(largest + mpmath.log(total))


def agrees(y, log_mean, phi, p):
    for upper in (False, True):
        found = tweedie_log_tail(*tensor(y, log_mean, phi, p), upper).item()
        assert found == pytest.approx(reference(y, log_mean, phi, p, upper), rel=1e-13, abs=1e-12)


def places(log_mean, phi, p):
    """Amounts from far below the mean to far beyond it."""
    mu = math.exp(log_mean)
    sd = math.sqrt(phi * mu**p)
    return (1e-6 * mu, 0.2 * mu, 0.95 * mu, mu + 0.5 * sd, mu + 9 * sd, mu + 50 * sd)


@pytest.mark.parametrize("p", [1.1, 1.5, 1.9])
@pytest.mark.parametrize(("log_mean", "phi"), [(-7.0, 100.0), (-7.0, 0.03), (0.0, 1.0), (0.0, 0.05), (9.0, 100.0)])
def test_both_tails_to_1e_12(p, log_mean, phi):
    for y in places(log_mean, phi, p)[::2] if p < 1.9 else places(log_mean, phi, p)[1::2]:
        agrees(y, log_mean, phi, p)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.05, 1.1, 1.3, 1.5, 1.7, 1.9, 1.98])
@pytest.mark.parametrize("phi", [1e-2, 0.1, 1.0, 10.0, 100.0])
def test_both_tails_to_1e_12_everywhere(p, phi):
    for log_mean in (math.log(1e-3), 0.0, math.log(1e4)):
        if math.exp((2 - p) * log_mean) / phi / min(2 - p, p - 1) < 1000:  # larger ones below
            for y in places(log_mean, phi, p):
                agrees(y, log_mean, phi, p)


def integral(y, log_mean, phi, p, upper):
    """The tail as the integral of the density over log u, by panels over which it falls by a few factors e."""
    kappa, t = math.exp((2 - p) * log_mean) / phi, math.log(y) - log_mean
    fall = kappa * (math.exp(t) - math.exp((2 - p) * t)) / (p - 1)
    width = 6 / (math.sqrt(kappa) + abs(fall)) * (1 if upper else -1)
    parts = []
    while len(parts) < 2 or parts[-1] > max(parts) - 45:
        log_u = math.log(y) + width * (len(parts) + 0.5 * (NODES + 1))
        log_p = tweedie_log_prob(log_u.exp(), *tensor(log_mean, phi, p))
        parts.append((log_p + log_u + (0.5 * abs(width) * WEIGHTS).log()).logsumexp(0))
    return torch.stack(parts).logsumexp(0).item()


@pytest.mark.parametrize("p", [1.01, 1.1, 1.5, 1.9, 1.99])
@pytest.mark.parametrize(("log_mean", "phi"), [(0.0, 2e-3), (0.0, 1e-4), (9.2, 1e-3), (-7.0, 1e-7), (9.2, 1e-6)])
def test_tails_of_many_terms_are_integrals_of_the_density(p, log_mean, phi):
    """From 500 terms to 1e9; what rounding of log y alone does to the logarithm is allowed for."""
    kappa = math.exp((2 - p) * log_mean) / phi
    assert kappa > 400
    for z in (-30.0, -5.0, -0.7, 0.0, 0.7, 5.0, 30.0, 100.0):
        y = math.exp(log_mean) * math.exp(z / math.sqrt(kappa))
        expected = integral(y, log_mean, phi, p, z >= 0)
        found = tweedie_log_tail(*tensor(y, log_mean, phi, p), z >= 0).item()
        rounding = 1e-15 * (1 + abs(math.log(y))) * math.sqrt(kappa) * (1 + abs(z))
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-11 + rounding)


@pytest.mark.parametrize("p", [1.1, 1.5, 1.9])
@pytest.mark.parametrize("upper", [False, True])
def test_derivatives_are_differences(p, upper):
    """First ones in all parameters and in the value, and of the first and the second in the mean again in all."""
    y = torch.tensor([0.0, 0.3, 1.1, 6.0, 500.0], dtype=F64)
    f = torch.tensor([0.2, 0.1, 0.3, 0.4, 6.0], dtype=F64, requires_grad=True)
    phi = torch.tensor([0.7, 0.2, 1.5, 0.6, 0.01], dtype=F64, requires_grad=True)
    p = torch.full((5,), p, dtype=F64, requires_grad=True)

    def slope(f, phi, p):
        return torch.autograd.grad(tweedie_log_tail(y, f, phi, p, upper).sum(), f, create_graph=True)[0]

    def bend(f, phi):
        return torch.autograd.grad(slope(f, phi, p.detach()).sum(), f, create_graph=True)[0]

    options = {"eps": 1e-6, "atol": 1e-5, "rtol": 1e-5}
    assert gradcheck(lambda *parameters: tweedie_log_tail(y, *parameters, upper), (f, phi, p), **options)
    assert gradcheck(slope, (f, phi, p), **options)
    assert gradcheck(bend, (f, phi), **options)
    parameters = [each.detach()[1:] for each in (f, phi, p)]
    assert gradcheck(lambda y: tweedie_log_tail(y, *parameters, upper), y[1:].clone().requires_grad_(), **options)
    assert gradgradcheck(lambda f: tweedie_log_tail(y, f, phi.detach(), p.detach(), upper), f, **options)
    (third,) = torch.autograd.grad(bend(f, phi).sum(), f, create_graph=True)
    with pytest.raises(NotImplementedError, match="one more"):
        torch.autograd.grad(third.sum(), f)


def test_the_derivative_in_the_mean_is_that_of_the_exponential_family():
    """d P(Y > y) / d theta = E[(Y - mu); Y > y] / phi, theta = mu^(1-p) / (1-p) by quadrature of the density."""
    f, phi, p = (value.requires_grad_() for value in tensor(0.4, 0.3, 1.4))
    y = torch.tensor(2.0, dtype=F64)
    (slope,) = torch.autograd.grad(log_survival(Tweedie(f, phi, p), y).exp(), f)
    with torch.no_grad():
        u = (y + torch.arange(20.0, dtype=F64).unsqueeze(-1) + 0.5 * (NODES + 1)).flatten()
        moment = ((u - f.exp()) * tweedie_log_prob(u, f, phi, p).exp() * 0.5 * WEIGHTS.repeat(20)).sum()
        torch.testing.assert_close(slope, f.exp() ** (1 - p) / phi * moment, rtol=1e-8, atol=0)


def test_tails_of_the_distribution():
    """They sum to one, begin with the atom, and an interval has the probability of their difference."""
    law = Tweedie(*tensor(0.3, 0.8, 1.6))
    y = torch.tensor([-1.0, 0.0, 1e-300, 0.4, 3.0, 1e3], dtype=F64)
    below, above = log_cdf(law, y), log_survival(law, y)
    torch.testing.assert_close(below.exp() + above.exp(), torch.ones_like(y), rtol=1e-14, atol=0)
    torch.testing.assert_close(below[1], law.log_prob(y[1]))
    assert below[0] == -math.inf
    assert above[0] == 0
    torch.testing.assert_close(law.cdf(y), below.exp())
    found = log_interval(law, torch.tensor([0.0, -math.inf, 0.4]), torch.tensor([0.4, 0.0, 0.4]))
    expected = torch.stack([(law.cdf(y[3]) - law.cdf(y[1])).log(), below[1], law.log_prob(y[3])])
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_shapes_and_dtypes():
    law = Tweedie(torch.zeros(3), 1.0, torch.tensor([1.2, 1.5, 1.8]))
    y = torch.tensor([[0.0], [2.5]])
    assert log_cdf(law, y).shape == (2, 3)
    assert log_cdf(law, y).dtype == torch.float32
    alone = [log_cdf(Tweedie(*tensor(0.0, 1.0, p)), y.double()) for p in (1.2, 1.5, 1.8)]
    torch.testing.assert_close(log_cdf(law, y).double(), torch.cat(alone, -1), rtol=1e-5, atol=1e-5)
    assert log_survival(Tweedie(torch.zeros(0), 1.0, 1.5), torch.zeros(0)).shape == (0,)
