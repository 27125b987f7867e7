"""Tilted moments in closed form, against mpmath and the adaptive rule, and which likelihoods get them."""

import itertools
import math

import gpytorch
import mpmath
import pytest
import torch

from gpext.inference import EP
from gpext.likelihoods import LaplaceLikelihood, StudentTLikelihood
from gpext.likelihoods.tilted_moments import tilt
from gpext.quadrature import laplace_tilted_moments, probit_tilted_moments
from tests.members import F64

OFFSETS = [0.0, 1e-6, 0.3, -1.0, 4.0, -60.0, 1e3, -1e6]  # in units of the noise's scale
VARIANCES = [1e-8, 1e-4, 0.1, 1.0, 30.0, 1e4, 1e8]
POWERS = [1.0, 0.5, 0.01]
STATE = [(offset, variance) for offset, variance in itertools.product(OFFSETS, VARIANCES)]


def beyond(a):
    """int_0^inf x^k exp(-a x - x^2 / 2) dx, k to 4, by parts, which needs spare digits."""
    moments = [mpmath.sqrt(mpmath.pi / 2) * mpmath.exp(a * a / 2) * mpmath.erfc(a / mpmath.sqrt(2))]
    moments.append(1 - a * moments[0])
    for k in range(1, 4):
        moments.append(k * moments[k - 1] - a * moments[k])
    return moments


def central(raw):
    """Mean and central moments from moments about some point."""
    m1, m2, m3, m4 = (moment / raw[0] for moment in raw[1:])
    return m1, m2 - m1**2, m3 - 3 * m1 * m2 + 2 * m1**3, m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4


def exact_laplace(offset, variance, noise, power):
    with mpmath.workdps(250):
        offset, variance, noise, power = (mpmath.mpf(value) for value in (offset, variance, noise, power))
        scale, b = mpmath.sqrt(variance), mpmath.sqrt(noise)
        d, c = offset / scale, power * scale / b
        raw = [
            right + (-1) ** k * left for k, (right, left) in enumerate(zip(beyond(c + d), beyond(c - d), strict=True))
        ]
        mean, second, third, fourth = central(raw)
        log_z = mpmath.log(raw[0]) - d**2 / 2 - mpmath.log(2 * mpmath.pi) / 2 - power * mpmath.log(2 * b)
        values = (log_z, scale * (d + mean), scale**2 * second, scale**3 * third, scale**4 * fourth)
        return [float(value) for value in values]


def exact_probit(sign, mean, variance):
    with mpmath.workdps(250):
        mean, variance = mpmath.mpf(mean), mpmath.mpf(variance)
        total = mpmath.sqrt(1 + variance)
        a = -sign * mean / total
        excess, second, third, fourth = central(beyond(a))
        log_z = mpmath.log(mpmath.erfc(a / mpmath.sqrt(2)) / 2)
        w, c = variance / total, variance / (1 + variance)
        fourth = w**4 * fourth + 6 * w**2 * second * c + 3 * c**2
        values = (log_z, mean + sign * w * (a + excess), c + w**2 * second, sign * w**3 * third, fourth)
        return [float(value) for value in values]


def by_integration(log_function, mean, variance, edges):
    """The same by mpmath's quadrature, without truncated normals."""
    with mpmath.workdps(20):
        mean, variance = mpmath.mpf(mean), mpmath.mpf(variance)
        sd = mpmath.sqrt(variance)
        edges = sorted({mean + k * sd for k in range(-14, 15)} | {mpmath.mpf(edge) for edge in edges})

        def integral(function):
            def density(f):
                return mpmath.exp(log_function(f) - (f - mean) ** 2 / (2 * variance)) / (
                    sd * mpmath.sqrt(2 * mpmath.pi)
                )

            return mpmath.quad(lambda f: function(f) * density(f), edges)

        total = integral(lambda f: 1)
        first = integral(lambda f: f) / total
        rest = [integral(lambda f, k=k: (f - first) ** k) / total for k in (2, 3, 4)]
        return [float(value) for value in (mpmath.log(total), first, *rest)]


def compare(found, expected, tolerance):
    """Compare relative to the moments, or to the standard deviation for signed ones."""
    sd = math.sqrt(expected[2])
    values = [found.log_normalizer, found.mean, found.variance, found.third, found.fourth]
    log_z, mean, variance, third, fourth = (value.item() for value in values)
    assert log_z == pytest.approx(expected[0], rel=tolerance, abs=tolerance)
    assert mean == pytest.approx(expected[1], rel=0, abs=tolerance * sd + 2e-15 * abs(expected[1]))
    assert variance == pytest.approx(expected[2], rel=tolerance, abs=0)
    assert third == pytest.approx(expected[3], rel=0, abs=tolerance * sd**3)
    assert fourth == pytest.approx(expected[4], rel=tolerance, abs=0)


def tensors(*values):
    return [torch.tensor(value, dtype=F64) for value in values]


@pytest.mark.slow
@pytest.mark.parametrize("case", [(0.7, 2.0, 0.3, 1.0), (-4.0, 1.0, 0.05, 0.5), (0.0, 0.1, 4.0, 1.0)])
def test_the_references_agree_with_integration(case):
    offset, variance, noise, power = case

    def log_laplace(x):
        b = mpmath.sqrt(mpmath.mpf(noise))
        return power * (-mpmath.log(2 * b) - abs(offset - x) / b)

    expected = by_integration(log_laplace, 0.0, variance, [offset])
    assert exact_laplace(*case) == pytest.approx(expected, rel=1e-13, abs=1e-15)
    expected = by_integration(lambda f: mpmath.log(mpmath.ncdf(-f)), offset, variance, [0.0])
    assert exact_probit(-1, offset, variance) == pytest.approx(expected, rel=1e-13, abs=1e-15)


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("noise", [1e-8, 1.0, 1e8])
def test_laplace_agrees_with_mpmath(noise, power):
    for in_scales, variance in STATE:
        offset = in_scales * math.sqrt(noise)
        found = laplace_tilted_moments(*tensors(offset, variance, noise), power)
        compare(found, exact_laplace(offset, variance, noise, power), 1e-10)


@pytest.mark.parametrize("variance", [1e-4, 1.0, 1e4, 1e8])
def test_laplace_where_one_piece_becomes_the_tail(variance):
    """Where d passes c the truncation of the piece on the side of the mean passes its middle."""
    for in_sds in (-40.0, -5.0, -1.0, 0.0, 0.5, 2.0, 2.9999, 3.0001, 8.0, 40.0):
        offset = variance - in_sds * math.sqrt(variance)
        found = laplace_tilted_moments(*tensors(offset, variance, 1.0), 1.0)
        compare(found, exact_laplace(offset, variance, 1.0, 1.0), 1e-10)


@pytest.mark.parametrize("sign", [1, -1])
def test_probit_agrees_with_mpmath(sign):
    for in_sds, variance in itertools.product([0.0, 0.4, 2.9, -3.1, 8.0, -40.0, -1e3], VARIANCES):
        mean = in_sds * math.sqrt(1 + variance)
        found = probit_tilted_moments(*tensors(sign, mean, variance))
        compare(found, exact_probit(sign, mean, variance), 1e-10)


def test_derivatives_of_the_log_normaliser_agree_with_finite_differences():
    offset, variance = (tensor.requires_grad_() for tensor in tensors([0.3, -2.0, 4.0, 50.0], [1.0, 0.2, 3.0, 100.0]))
    noise = torch.tensor([0.5], dtype=F64, requires_grad=True)
    one = torch.ones((), dtype=F64)
    assert torch.autograd.gradcheck(
        lambda *x: laplace_tilted_moments(*x, 0.7).log_normalizer, (offset, variance, noise)
    )
    assert torch.autograd.gradcheck(lambda *x: probit_tilted_moments(one, *x).log_normalizer, (offset, variance))


@pytest.mark.parametrize("in_scales", OFFSETS)
def test_the_derivative_in_the_noise_keeps_its_digits(in_scales):
    for variance in VARIANCES:
        noise = torch.ones((), dtype=F64, requires_grad=True)
        laplace_tilted_moments(*tensors(in_scales, variance), noise, 1.0).log_normalizer.backward()
        with mpmath.workdps(250):
            step = mpmath.mpf(10) ** -100
            ahead, behind = (_log_laplace(in_scales, variance, 1 + s * step) for s in (1, -1))
            expected = float((ahead - behind) / (2 * step))
        assert noise.grad.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def _log_laplace(offset, variance, noise):
    offset, variance = mpmath.mpf(offset), mpmath.mpf(variance)
    scale, b = mpmath.sqrt(variance), mpmath.sqrt(noise)
    d, c = offset / scale, scale / b
    return mpmath.log(beyond(c + d)[0] + beyond(c - d)[0]) - mpmath.log(b) - d**2 / 2


CLOSED = {
    "probit": (gpytorch.likelihoods.BernoulliLikelihood, [1.0], 1.0),
    "stock laplace": (gpytorch.likelihoods.LaplaceLikelihood, [0.3], 0.6),
    "laplace": (LaplaceLikelihood, [0.3], 0.6),
    "student t": (StudentTLikelihood, [0.3], 0.6),
    "gaussian": (gpytorch.likelihoods.GaussianLikelihood, [0.3], 0.6),
}


@pytest.mark.parametrize("name", CLOSED)
def test_a_subclass_with_its_own_density_gets_its_own_moments(name):
    kind, targets, power = CLOSED[name]

    class Sharper(kind):
        def forward(self, function_samples, *args, **kwargs):
            return super().forward(2 * function_samples, *args, **kwargs)

        def log_prob(self, targets, f):
            return self.forward(f).log_prob(targets)

    class Renamed(kind):
        pass

    targets, mean, variance = tensors(targets, [0.8], [0.5])
    plain = tilt(kind().double(), targets, power)(mean, variance)
    same = tilt(Renamed().double(), targets, power)(mean, variance)
    assert torch.equal(same.log_normalizer, plain.log_normalizer)
    sharper = tilt(Sharper().double(), targets, power)(mean, variance)
    expected = tilt(kind().double(), targets, power)(2 * mean, 4 * variance)  # g = 2 f
    torch.testing.assert_close(sharper.log_normalizer, expected.log_normalizer, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(2 * sharper.mean, expected.mean, rtol=1e-8, atol=1e-8)


def test_a_probit_that_overrides_forward_alone_is_not_taken_for_one():
    class Logit(gpytorch.likelihoods.BernoulliLikelihood):
        def forward(self, function_samples, *args, **kwargs):
            return torch.distributions.Bernoulli(logits=function_samples)

    targets, mean, variance = tensors([1.0], [0.0], [1e-12])
    found = tilt(Logit(), targets, 1.0)(torch.full_like(mean, 2.0), variance)
    torch.testing.assert_close(found.log_normalizer.exp(), torch.sigmoid(torch.full_like(mean, 2.0)))


@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms_agree_with_the_adaptive_rule(name, monkeypatch):
    kind, targets, power = CLOSED[name]
    likelihood = kind().double()
    targets, mean, variance = tensors(targets * 3, [0.8, -2.0, 0.1], [0.5, 3.0, 1e-4])
    closed = tilt(likelihood, targets, power)(mean, variance)
    monkeypatch.setattr("gpext.likelihoods.tilted_moments.has_density_of", lambda *_: False)
    adaptive = tilt(likelihood, targets, power)(mean, variance)
    for field in ("log_normalizer", "mean", "variance", "fourth"):
        torch.testing.assert_close(getattr(closed, field), getattr(adaptive, field), rtol=1e-7, atol=1e-12)


def test_a_probit_wants_classes_0_and_1():
    prior = gpytorch.distributions.MultivariateNormal(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))
    with pytest.raises(ValueError, match=r"\(y \+ 1\) / 2"):
        EP().infer(prior, gpytorch.likelihoods.BernoulliLikelihood(), torch.tensor([-1.0, 1.0], dtype=F64))
