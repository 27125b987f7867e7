"""Logarithms of distribution functions against 50 digits in both tails, and derivatives against differences."""

import math

import mpmath
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from gpext.distributions import (
    GeneralizedPareto,
    LogLogistic,
    Matern32,
    NegativeBinomial,
    Poisson,
    RadialNoise,
    StudentT,
    log_cdf,
    log_interval,
    log_survival,
)
from tests.members import F64, tensor

mpmath.mp.dps = 60
VALUES = tensor(-45.0, -8.0, -1.3, -1e-3, 0.2, 2.0, 9.0, 41.0)


def log_pseudo_huber(r):
    return 1 - torch.sqrt(1 + r)


def matern_tail(z):
    t = math.sqrt(3) * mpmath.mpf(abs(z))
    far = (2 + t) * mpmath.exp(-t) / 4
    return far if z < 0 else 1 - far


def student_tail(z, nu=3.3):
    z, nu = mpmath.mpf(z), mpmath.mpf(nu)
    far = mpmath.betainc(nu / 2, mpmath.mpf(1) / 2, 0, nu / (nu + z * z), regularized=True) / 2
    return far if z < 0 else 1 - far


def laplace_tail(z):
    return mpmath.exp(z) / 2 if z < 0 else 1 - mpmath.exp(-mpmath.mpf(z)) / 2


def huber_tail(z):
    total = 2 * mpmath.quad(lambda s: mpmath.exp(1 - mpmath.sqrt(1 + s * s)), [0, 1, 10, 100, mpmath.inf])
    edges = [abs(z), abs(z) + 1, abs(z) + 10, abs(z) + 100, mpmath.inf]
    far = mpmath.quad(lambda s: mpmath.exp(1 - mpmath.sqrt(1 + s * s)), edges) / total
    return far if z < 0 else 1 - far


SYMMETRIC = {
    "normal": (lambda loc, scale: torch.distributions.Normal(loc, scale), mpmath.ncdf, 1e-13),
    "laplace": (lambda loc, scale: torch.distributions.Laplace(loc, scale), laplace_tail, 1e-13),
    "matern": (Matern32, matern_tail, 1e-13),
    "student-t": (lambda loc, scale: StudentT(tensor(3.3).squeeze(), loc, scale), student_tail, 1e-11),
    "radial": (lambda loc, scale: RadialNoise(loc, log_pseudo_huber, scale**-2), huber_tail, 1e-9),
}


@pytest.mark.parametrize("name", SYMMETRIC)
def test_tails_of_real_numbers(name):
    make, exact, tolerance = SYMMETRIC[name]
    loc, scale = tensor(0.7).squeeze(), tensor(1.9).squeeze()
    y = loc + scale * VALUES
    below = tensor(*(float(mpmath.log(exact(float(z)))) for z in VALUES))
    above = tensor(*(float(mpmath.log(exact(float(-z)))) for z in VALUES))
    torch.testing.assert_close(log_cdf(make(loc, scale), y), below, rtol=tolerance, atol=1e-15)
    torch.testing.assert_close(log_survival(make(loc, scale), y), above, rtol=tolerance, atol=1e-15)


@pytest.mark.parametrize("name", SYMMETRIC)
def test_derivatives_of_real_numbers(name):
    make = SYMMETRIC[name][0]
    y = tensor(-6.0, -0.4, 0.9, 7.0)
    loc = torch.full((4,), 0.3, dtype=F64, requires_grad=True)
    scale = torch.full((4,), 1.4, dtype=F64, requires_grad=True)
    for function in (log_cdf, log_survival):
        assert gradcheck(lambda a, b, f=function: f(make(a, b), y), (loc, scale), eps=1e-5)
        assert gradgradcheck(lambda a, b, f=function: f(make(a, b), y), (loc, scale), eps=1e-5)


def test_the_derivative_in_degrees_of_freedom():
    nu = torch.tensor(3.3, dtype=F64, requires_grad=True)
    y = tensor(-40.0, -2.0, 0.3, 5.0)
    (found,) = torch.autograd.grad(log_cdf(StudentT(nu, torch.zeros(4, dtype=F64), 1.0), y).sum(), nu)
    exact = sum(float(mpmath.diff(lambda n, z=z: mpmath.log(student_tail(float(z), n)), 3.3)) for z in y)
    assert abs(float(found) - exact) < 1e-7 * abs(exact)


def poisson_cdf(k, rate):
    return mpmath.gammainc(k + 1, rate, mpmath.inf, regularized=True)


def binomial_cdf(k, total, p):
    return 1 - mpmath.betainc(k + 1, total, 0, p, regularized=True)


@pytest.mark.parametrize("rate", [1e-3, 0.8, 30.0, 4000.0])
def test_tails_of_poisson_counts(rate):
    k = tensor(0, 1, 7, 40, 300, 3000, 9000)
    below = tensor(*(float(mpmath.log(poisson_cdf(int(i), mpmath.mpf(rate)))) for i in k))
    above = tensor(*(float(mpmath.log(mpmath.gammainc(int(i) + 1, 0, mpmath.mpf(rate), regularized=True))) for i in k))
    law = Poisson(tensor(rate).squeeze())
    torch.testing.assert_close(log_cdf(law, k), below, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(log_survival(law, k), above, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("total", "p"), [(0.7, 0.3), (5.0, 0.999), (200.0, 1e-4)])
def test_tails_of_negative_binomial_counts(total, p):
    k = tensor(0, 1, 7, 40, 300, 2000)
    p = mpmath.mpf(p)
    below = tensor(*(float(mpmath.log(mpmath.betainc(total, int(i) + 1, 0, 1 - p, regularized=True))) for i in k))
    above = tensor(*(float(mpmath.log(mpmath.betainc(int(i) + 1, total, 0, p, regularized=True))) for i in k))
    law = NegativeBinomial(tensor(total).squeeze(), logits=tensor(float(mpmath.log(p / (1 - p)))).squeeze())
    torch.testing.assert_close(log_cdf(law, k), below, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(log_survival(law, k), above, rtol=1e-9, atol=1e-12)


def weibull_tail(y, upper):
    hazard = (mpmath.mpf(y) / mpmath.mpf("1.9")) ** mpmath.mpf("1.3")
    return mpmath.exp(-hazard) if upper else 1 - mpmath.exp(-hazard)


def log_logistic_tail(y, upper):
    ratio = (mpmath.mpf(y) / mpmath.mpf("1.9")) ** mpmath.mpf("1.3")
    return 1 / (1 + ratio) if upper else ratio / (1 + ratio)


def pareto_tail(y, upper):
    far = (1 + mpmath.mpf("1.3") * mpmath.mpf(y) / mpmath.mpf("1.9")) ** (-1 / mpmath.mpf("1.3"))
    return far if upper else 1 - far


def gamma_tail(y, upper):
    x, shape = mpmath.mpf(y) / mpmath.mpf("1.9"), mpmath.mpf("1.3")
    limits = (x, mpmath.inf) if upper else (0, x)
    return mpmath.gammainc(shape, *limits, regularized=True)


def log_normal_tail(y, upper):
    z = (mpmath.log(mpmath.mpf(y)) - mpmath.log(mpmath.mpf("1.9"))) / mpmath.mpf("1.3")
    return mpmath.ncdf(-z if upper else z)


POSITIVE = {  # functions of a logarithm of the scale and a shape
    "weibull": (lambda f, k: torch.distributions.Weibull(f.exp(), k), weibull_tail),
    "log-logistic": (LogLogistic, log_logistic_tail),
    "pareto": (GeneralizedPareto, pareto_tail),
    "gamma": (lambda f, k: torch.distributions.Gamma(k, (-f).exp()), gamma_tail),
    "log-normal": (torch.distributions.LogNormal, log_normal_tail),
}


@pytest.mark.parametrize("name", POSITIVE)
def test_tails_of_positive_numbers(name):
    make, exact = POSITIVE[name]
    f, k, y = tensor(math.log(1.9)).squeeze(), tensor(1.3).squeeze(), tensor(1e-12, 1e-3, 0.7, 2.0, 30.0, 3000.0)
    for upper, function in ((False, log_cdf), (True, log_survival)):
        expected = tensor(*(float(mpmath.log(exact(float(each), upper))) for each in y))
        torch.testing.assert_close(function(make(f, k), y), expected, rtol=1e-11, atol=1e-13)
    f = torch.full((3,), 0.3, dtype=F64, requires_grad=True)
    k = tensor(0.7, 1.3, 2.6).requires_grad_()
    y = tensor(0.2, 1.1, 6.0)
    for function in (log_cdf, log_survival):
        assert gradcheck(lambda f, k, g=function: g(make(f, k), y), (f, k), eps=1e-5)
        assert gradgradcheck(lambda f, g=function: g(make(f, k.detach()), y), f, eps=1e-5)


@pytest.mark.parametrize("make", [LogLogistic, GeneralizedPareto])
def test_distributions_that_torch_has_not(make):
    """Density, cdf, quantiles, moments and draws agree, by differences, quadrature and the binomial law."""
    law = make(tensor(0.4), tensor(3.7 if make is LogLogistic else 0.2))
    y = torch.logspace(-3, 1, 9, dtype=F64)
    step = 1e-6 * y
    slope = (law.cdf(y + step) - law.cdf(y - step)) / (2 * step)
    torch.testing.assert_close(law.log_prob(y).exp(), slope, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(law.icdf(law.cdf(y)), y, rtol=1e-9, atol=1e-12)
    u = (torch.arange(400000, dtype=F64) + 0.5) / 400000
    values = law.icdf(u)
    torch.testing.assert_close(law.mean.squeeze(), values.mean(), rtol=1e-3, atol=0)
    torch.testing.assert_close(law.variance.squeeze(), values.var(), rtol=3e-2, atol=0)
    drawn = law.sample(torch.Size([20000]), generator=torch.Generator().manual_seed(0)).squeeze(-1)
    for q in (0.1, 0.5, 0.9):
        share = (drawn < law.icdf(tensor(q))).double().mean()
        assert abs(float(share) - q) < 4.5 * math.sqrt(q * (1 - q) / 20000)
    assert law.expand(torch.Size([3])).mean.shape == (3,)


def test_derivatives_of_counts():
    k = tensor(0, 3, 20)
    f = tensor(0.4, 0.9, 1.3).requires_grad_()
    total = tensor(2.0, 0.7, 5.0).requires_grad_()
    for function in (log_cdf, log_survival):
        assert gradcheck(lambda f, g=function: g(Poisson(f.exp()), k), f, eps=1e-5)
        assert gradgradcheck(lambda f, g=function: g(Poisson(f.exp()), k), f, eps=1e-5)
        assert gradcheck(lambda f, r, g=function: g(NegativeBinomial(r, logits=f), k), (f, total), eps=1e-5)
        assert gradgradcheck(lambda f, g=function: g(NegativeBinomial(total.detach(), logits=f), k), f, eps=1e-5)


def test_intervals():
    """Against sums over counts, or differences with 60 digits, for intervals from 1e-12 wide to half the line."""
    law = torch.distributions.Normal(tensor(0.0).squeeze(), tensor(1.0).squeeze())
    low = tensor(-1.0, 0.5, 40.0, -41.0, 2.0, -torch.inf, 3.0, -30.0)
    high = tensor(1.5, 0.5 + 1e-12, 40.5, -40.9, 2.0 + 1e-7, -3.0, torch.inf, 30.0)

    def exact(a, b):
        if a > 0:  # the difference of the smaller tails
            a, b = -b, -a
        return float(mpmath.log(mpmath.ncdf(b) - mpmath.ncdf(a)))

    expected = tensor(*(exact(mpmath.mpf(float(a)), mpmath.mpf(float(b))) for a, b in zip(low, high, strict=True)))
    torch.testing.assert_close(log_interval(law, low, high), expected, rtol=1e-9, atol=1e-12)
    point = tensor(0.4)
    torch.testing.assert_close(log_interval(law, point, point), law.log_prob(point))
    rate = tensor(6.0)
    for a, b in ((0, 3), (2, 9), (5, 5), (0, 0), (40, 60)):
        mass = torch.logsumexp(Poisson(rate).log_prob(torch.arange(a, b + 1, dtype=F64)), 0)
        found = log_interval(Poisson(rate), tensor(a), tensor(b)).squeeze()
        torch.testing.assert_close(found, mass, rtol=1e-10, atol=1e-12)
    loc = torch.zeros(8, dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(log_interval(torch.distributions.Normal(loc, 1.0), low, high).sum(), loc)
    assert bool(slope.isfinite().all())


def test_unknown_tails_are_refused():
    with pytest.raises(TypeError, match="the tails of Gumbel are not known"):
        log_cdf(torch.distributions.Gumbel(0.0, 1.0), torch.zeros(1))
