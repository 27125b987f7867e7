"""Adaptive quadrature against closed forms and mpmath, for integrands with far, narrow or kinked mass."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch.distributions import Laplace, StudentT

from gpext.quadrature import (
    QuadratureStatus,
    QuadratureWarning,
    expectation,
    gauss_hermite,
    gauss_kronrod,
    integrate,
    log_expectation,
    rules,
    smooth_expectation,
    trapezoid,
    trapezoid_nodes,
)

F64 = torch.float64
LEGENDRE = np.polynomial.legendre.leggauss(24)


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def brute_force(function, mean, sd, points, log_space):
    """Gauss-Legendre on half-dyadic panels about every point, none wider than sd near the mass; no shared code."""
    anchors = [mean, *points]
    low, high = min(anchors) - 14 * sd, max(anchors) + 14 * sd
    steps = sd * 2.0 ** np.arange(-45, math.log2((high - low) / sd) + 1, 0.5)
    edges = np.concatenate([np.array([low, high, *anchors]), *(a + s * steps for a in anchors for s in (-1, 1))])
    edges = np.unique(np.clip(edges, low, high))
    left, width = edges[:-1], np.diff(edges)
    pieces = np.clip(np.ceil(width / (0.5 * sd)), 1, 3000).astype(int)
    offset = np.concatenate([np.arange(n) / n for n in pieces])
    left, half = np.repeat(left, pieces) + offset * np.repeat(width, pieces), np.repeat(width / pieces, pieces) / 2
    f = (left + half)[:, None] + half[:, None] * LEGENDRE[0]
    log_density = -0.5 * ((f - mean) / sd) ** 2 - math.log(sd * math.sqrt(2 * math.pi))
    values = function(torch.from_numpy(f)).numpy()
    weights = half[:, None] * LEGENDRE[1]
    if not log_space:
        return float((weights * np.exp(log_density) * values).sum())
    exponent = values + log_density
    peak = exponent.max()
    return float(peak + np.log((weights * np.exp(exponent - peak)).sum()))


def student_t(y, deg_free, scale):
    return lambda f: StudentT(tensor(deg_free), tensor(0.0), tensor(scale)).log_prob(y - f)


def laplace(y, scale):
    return lambda f: Laplace(tensor(0.0), tensor(scale)).log_prob(y - f)


def logit(f):
    return torch.nn.functional.logsigmoid(f)


def support_vector(f):
    return -2 * (1 - f).clamp(min=0)


def poisson(y):
    return lambda f: y * f - f.exp()


def check(function, mean, sd, points, tolerance=1e-9, knots=True):
    m, v = tensor(mean), tensor(sd).square()
    knots = tensor(*points).unsqueeze(-1) if knots else None
    for log_space, rule in ((False, expectation), (True, log_expectation)):
        truth = brute_force(function, mean, sd, points, log_space)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            value = rule(function, m, v, knots=knots).item()
        assert value == pytest.approx(truth, rel=tolerance, abs=tolerance), (log_space, value - truth)


@pytest.mark.parametrize("deg_free", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("scale", [1e-9, 1e-6, 1e-3, 0.1, 1.0])
@pytest.mark.parametrize("distance", [0.0, 1.0, 6.0, 40.0, 1e3])
def test_student_t(deg_free, scale, distance):
    # f itself is rounded to 1e-16 |f|: at f = 6 a scale of 1e-9 is resolved to 1e-6 only, by any rule.
    check(student_t(distance, deg_free, scale), 0.0, 1.0, [distance], 1e-7 if scale < 1e-6 else 1e-9)


def test_student_t_not_at_the_origin():
    check(student_t(-3.2, 2.5, 1e-3), 1.7, 0.6, [-3.2])


def test_stock_failure():
    # 20 Gauss-Hermite nodes, as gpytorch has, against the adaptive rule: scale 0.1, variance 1.
    target = student_t(0.0, 4.0, 0.1)
    nodes, weights = gauss_hermite(20)
    truth = brute_force(target, 0.0, 1.0, [0.0], True)
    assert truth == pytest.approx(-0.93, abs=0.01)
    assert abs(math.log((weights * target(nodes).exp()).sum()) - truth) > 0.1
    assert log_expectation(target, tensor(0.0), tensor(1.0), knots=tensor(0.0)).item() == pytest.approx(
        truth, abs=1e-11
    )


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.03, 1.0])
@pytest.mark.parametrize("distance", [0.0, 1.0, 6.0, 40.0, 1e3])
def test_laplace(scale, distance):
    check(laplace(distance, scale), 0.0, 1.0, [distance], 1e-8 if scale < 1e-3 else 1e-9)


@pytest.mark.parametrize("scale", [1e-5, 1e-3])
def test_laplace_a_million_sd_away_has_its_bump_in_between(scale):
    # log E = -log 2b + (v/b - 2(y - m)) / 2b + O(exp(-...)): the bump sits at m + v/b, of width sd.
    y = 1e6
    value = log_expectation(laplace(y, scale), tensor(0.0), tensor(1.0), knots=tensor(y)).item()
    truth = -math.log(2 * scale) + (1 / scale - 2 * y) / (2 * scale)
    assert value == pytest.approx(truth, rel=1e-13)


@pytest.mark.parametrize("y", [1e3, 1e6])
def test_narrow_gaussian_far_away(y):
    scale = 1e-3
    value = log_expectation(
        lambda f: -0.5 * ((y - f) / scale).square(), tensor(0.0), tensor(1.0), knots=tensor(y)
    ).item()
    truth = -0.5 * y**2 / (1 + scale**2) + 0.5 * math.log(scale**2 / (1 + scale**2))
    assert value == pytest.approx(truth, rel=1e-13)


@pytest.mark.parametrize("function", [logit, support_vector])
@pytest.mark.parametrize(("mean", "sd"), [(0.3, 1.0), (-30.0, 10.0), (2.0, 1e-3), (-5.0, 40.0), (1e3, 1.0)])
def test_classification(function, mean, sd):
    check(function, mean, sd, [1.0], 1e-9)
    if function is logit:
        check(function, mean, sd, [0.0], knots=False)


def test_kink_without_a_knot_is_found():
    check(support_vector, 0.3, 1.0, [1.0], knots=False)


@pytest.mark.parametrize(("mean", "sd", "y"), [(0.2, 0.7, 3.0), (0.0, 0.1, 1000.0), (3.0, 2.0, 0.0), (-8.0, 0.5, 20.0)])
def test_range_grows_to_the_mass(mean, sd, y):
    # y = 1000, sd = 0.1: the mass is 59 sd from the mean. Points for the brute force only.
    mode = math.log(y) if y else mean
    truth = brute_force(poisson(y), mean, sd, [mode], True)
    assert log_expectation(poisson(y), tensor(mean), tensor(sd**2)).item() == pytest.approx(truth, rel=1e-10)
    truth = y * mean - math.exp(mean + sd**2 / 2)
    assert expectation(poisson(y), tensor(mean), tensor(sd**2)).item() == pytest.approx(truth, rel=1e-10)


def test_exponential_far_beyond_the_first_range():
    # E exp(f) with sd = 15 has its mass at 15 sd.
    assert expectation(torch.exp, tensor(0.0), tensor(225.0)).item() == pytest.approx(math.exp(112.5), rel=1e-9)


def test_smooth_integrand_needs_one_round():
    mean, variance = torch.linspace(-3, 3, 50, dtype=F64), torch.linspace(0.2, 2.0, 50, dtype=F64)
    for log_space in (False, True):
        result = integrate(logit, mean, variance, log_space=log_space)
        assert result.num_rounds == 0
        assert result.num_evaluations <= 12 * 15
        assert result.status is QuadratureStatus.CONVERGED


@pytest.mark.parametrize("log_space", [False, True])
@pytest.mark.parametrize("distance", [0.4, 3.0, 60.0])
def test_gradients(log_space, distance):
    def value(mean, variance, deg_free, scale):
        y = tensor(0.0, distance)
        return integrate(
            lambda f: StudentT(deg_free, 0.0, scale).log_prob(y - f), mean, variance, log_space=log_space, knots=y[None]
        ).value.sum()

    inputs = [tensor(0.1, -0.2), tensor(0.9, 0.5), tensor(3.0), tensor(0.05)]
    inputs = [x.requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(value(*inputs), inputs)
    with torch.no_grad():
        for i, gradient in enumerate(gradients):
            for j in range(gradient.numel()):
                step = torch.zeros_like(inputs[i])
                step[j] = 1e-5 * inputs[i][j].abs()
                shifted = [[x + s * step if k == i else x for k, x in enumerate(inputs)] for s in (1, -1)]
                numeric = (value(*shifted[0]) - value(*shifted[1])) / (2 * step[j])
                assert gradient[j].item() == pytest.approx(numeric.item(), rel=1e-5, abs=1e-6)


def test_gradient_through_a_kink():
    # d/dm E max(0, f) = Phi(m / sd), d/dv = N(0 | m, v) / 2: autograd at fixed z would miss it.
    mean, variance = tensor(0.3).requires_grad_(), tensor(0.8).requires_grad_()
    expectation(lambda f: f.clamp(min=0), mean, variance, knots=torch.zeros(1, 1, dtype=F64)).sum().backward()
    normal = torch.distributions.Normal(mean.detach(), variance.detach().sqrt())
    assert mean.grad.item() == pytest.approx(1 - normal.cdf(tensor(0.0)).item(), rel=1e-11)
    assert variance.grad.item() == pytest.approx(normal.log_prob(tensor(0.0)).exp().item() / 2, rel=1e-10)


def test_gradient_at_small_variance():
    mean, variance = tensor(0.3).requires_grad_(), tensor(1e-10).requires_grad_()
    expectation(torch.exp, mean, variance).sum().backward()
    exact = math.exp(0.3 + 0.5e-10)
    assert mean.grad.item() == pytest.approx(exact, rel=1e-11)
    assert variance.grad.item() == pytest.approx(exact / 2, rel=1e-6)  # 1e-5 if no constant were taken out


@pytest.mark.parametrize("width", [1e-3, 1e-4, 1e-5])
def test_bump_on_a_panel_edge_is_not_halved(width):
    # 1.2 is an edge of the first panels: each neighbour alone sees its side of the bump, or nothing at all.
    result = integrate(lambda f: -0.5 * ((1.2 - f) / width) ** 2, tensor(0.0), tensor(1.0), log_space=True)
    truth = -0.5 * 1.2**2 / (1 + width**2) + 0.5 * math.log(width**2 / (1 + width**2))
    assert result.value.item() == pytest.approx(truth, abs=1e-10)


def test_bump_between_mean_and_knot_is_found_quickly():
    # The panels are graded towards the mean as well: 9 rounds here, 18 without.
    result = integrate(laplace(1e6, 1e-3), tensor(0.0), tensor(1.0), log_space=True, knots=tensor(1e6))
    assert result.status is QuadratureStatus.CONVERGED
    assert result.num_rounds <= 12


def test_broadcasting_equals_loops():
    mean, variance = torch.randn(3, 1, 4, dtype=F64), torch.rand(2, 1, dtype=F64) + 0.1
    y = torch.randn(4, dtype=F64)
    knots = torch.stack([y, y + 5])
    for log_space in (False, True):
        together = integrate(student_t(y, 3.0, 0.01), mean, variance, log_space=log_space, knots=knots[:, None, None])
        assert together.value.shape == (3, 2, 4)
        for i, j, n in np.ndindex(3, 2, 4):
            alone = integrate(
                student_t(y[n], 3.0, 0.01), mean[i, 0, n], variance[j, 0], log_space=log_space, knots=knots[:, n]
            )
            assert alone.value.shape == ()
            assert together.value[i, j, n].item() == pytest.approx(alone.value.item(), abs=1e-9, rel=1e-9)


def test_empty_batch():
    assert expectation(torch.exp, torch.zeros(0), torch.ones(0), knots=torch.zeros(1, 0)).shape == (0,)


def test_float32():
    mean, variance = torch.tensor([0.0, 1e6]), torch.tensor([1.0, 0.25])
    y = torch.tensor([0.5, 1e6 + 1])
    value = log_expectation(student_t(y, 4.0, 1e-3), mean, variance, knots=y[None])
    assert value.dtype == torch.float32
    exact = [brute_force(student_t(0.5, 4.0, 1e-3), 0.0, 1.0, [0.5], True)]
    exact.append(brute_force(student_t(1.0, 4.0, 1e-3), 0.0, 0.5, [1.0], True))
    assert value.tolist() == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("rule", [expectation, log_expectation])
def test_zero_variance(rule):
    mean, variance = tensor(0.3, -1.0, 2.0), tensor(0.0, 1.0, 0.0)
    knots = tensor(0.3, 0.3, 9.0)[None]
    value = rule(logit, mean.requires_grad_(), variance.requires_grad_(), knots=knots)
    assert value[[0, 2]].tolist() == pytest.approx(logit(mean[[0, 2]]).tolist(), rel=1e-14)
    value.sum().backward()
    s = torch.sigmoid(-mean.detach())
    assert mean.grad[[0, 2]].tolist() == pytest.approx(s[[0, 2]].tolist(), rel=1e-12)
    # the derivative in the variance is the limit v -> 0
    curvature = -s * (1 - s) + (s.square() if rule is log_expectation else 0)
    assert variance.grad[[0, 2]].tolist() == pytest.approx((curvature / 2)[[0, 2]].tolist(), rel=1e-12)
    near = rule(logit, mean.detach(), torch.full_like(mean, 1e-300), knots=knots)
    assert near.tolist() == pytest.approx(logit(mean).tolist(), rel=1e-14)


def test_errors_name_the_first_index():
    good = torch.zeros(2, 3)
    for bad in (math.nan, math.inf):
        mean = good.clone()
        mean[1, 2] = bad
        with pytest.raises(ValueError, match=r"mean must be finite; got \w+ at index \(1, 2\) of shape \(2, 3\)"):
            expectation(logit, mean, good + 1)
        with pytest.raises(ValueError, match=r"knots must be finite; got \w+ at index \(0, 1, 2\)"):
            expectation(logit, good, good + 1, knots=mean[None])
    with pytest.raises(ValueError, match=r"variance must be finite and not negative; got -1.0 at index \(0, 0\)"):
        log_expectation(logit, good, good - 1)
    with pytest.raises(ValueError, match="num_nodes"):
        gauss_hermite(0)


def test_unresolved_integral_warns():
    def noise(f):
        return torch.frac(1e4 * torch.sin(1e6 * f)).abs()

    mean, variance = tensor(0.0, 1.0), tensor(1.0, 1.0)
    with pytest.warns(QuadratureWarning, match=r"2 of 2 integrals .* worst estimated error .* at index \(0,\)"):
        expectation(noise, mean, variance, max_rounds=3)
    with pytest.warns(QuadratureWarning, match="1 of 2 integrals"):
        log_expectation(
            lambda f: torch.where(torch.tensor([True, False]), support_vector(f), 0.0), mean, variance, max_rounds=0
        )


def test_non_finite_function_is_reported():
    with pytest.warns(QuadratureWarning, match="nan or"):
        assert expectation(torch.log, tensor(0.0), tensor(1.0)).isnan().all()
    result = integrate(torch.log, tensor(0.0), tensor(1.0))
    assert result.status is QuadratureStatus.NON_FINITE
    # A likelihood may be zero everywhere.
    assert log_expectation(lambda f: torch.full_like(f, -math.inf), tensor(0.0), tensor(1.0)).item() == -math.inf


def test_error_estimate_covers_the_error():
    for scale in (0.01, 0.3, 2.0):
        for rounds in (0, 1, 2):
            target = student_t(0.7, 1.5, scale)
            result = integrate(target, tensor(0.0), tensor(1.0), log_space=True, max_rounds=rounds)
            truth = brute_force(target, 0.0, 1.0, [0.7], True)
            assert abs(result.value.item() - truth) <= 2 * result.error.item() + 1e-14


def test_rule_gives_tilted_moments():
    y, v, s = 2.0, 1.0, 1e-2
    result = integrate(lambda f: -0.5 * ((y - f) / s) ** 2, tensor(0.0), tensor(v), log_space=True, knots=tensor(y))
    weights = (result.log_weights - 0.5 * ((y - result.nodes) / s) ** 2).softmax(0)
    mean = (weights * result.nodes).sum(0)
    variance = (weights * (result.nodes - mean) ** 2).sum(0)
    assert mean.item() == pytest.approx(y * v / (v + s**2), rel=1e-12)
    assert variance.item() == pytest.approx(v * s**2 / (v + s**2), rel=1e-10)


def test_tables():
    # Exactness on polynomials is what defines the rules: 7-point Gauss to degree 13, 15-point Kronrod to 22 and odd 23.
    nodes = np.array(gauss_kronrod._ABSCISSAE)
    nodes = np.concatenate([-nodes, nodes[:-1][::-1]])
    mirror = [
        np.concatenate([np.array(w), np.array(w)[:-1][::-1]]) for w in (gauss_kronrod._KRONROD, gauss_kronrod._GAUSS)
    ]
    for weights, points, degree in ((mirror[0], nodes, 23), (mirror[1], nodes[1::2], 13)):
        for power in range(degree + 1):
            exact = 0.0 if power % 2 else 2 / (power + 1)
            assert (weights * points**power).sum() == pytest.approx(exact, abs=4e-16)


@pytest.mark.parametrize("num_nodes", [1, 2, 20, 64, 100])
def test_gauss_hermite(num_nodes):
    nodes, weights = gauss_hermite(num_nodes)
    assert weights.sum().item() == pytest.approx(1, abs=1e-15)
    moment = 1.0
    for power in range(0, min(2 * num_nodes, 20), 2):
        assert (weights * nodes**power).sum().item() == pytest.approx(moment, rel=1e-12)
        moment *= power + 1
    nodes, weights = gauss_hermite(num_nodes, torch.float32, "cpu")
    assert nodes.dtype == weights.dtype == torch.float32
    nodes.zero_()  # a caller's edit must not reach the next caller
    assert num_nodes == 1 or gauss_hermite(num_nodes)[0].abs().max() > 0


def test_inside_inference_mode_first():
    rules._hermite.cache_clear()
    with torch.inference_mode():
        gauss_hermite(3)
    nodes, weights = gauss_hermite(3)
    x = tensor(1.0).requires_grad_()
    (weights * (x * nodes).exp()).sum().backward()
    assert x.grad is not None


def sine(z):
    return z.sin(), z.cos(), -z.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 0.1, 1.0, 3.0])
def test_smooth_expectation_of_a_sine_is_its_closed_form(dtype, spread):
    """E[sin z] = sin(m) exp(-v/2)."""
    mean = torch.linspace(-5, 5, 300, dtype=dtype).view(3, 100).requires_grad_()
    variance = torch.full((100,), spread**2, dtype=dtype).requires_grad_()
    num_nodes = trapezoid_nodes(2.0, torch.tensor(spread, dtype=dtype))
    value = smooth_expectation(sine, mean, variance, trapezoid(num_nodes), num_nodes)
    exact = mean.detach().double().sin() * torch.exp(-0.5 * variance.detach().double())
    slope = mean.detach().double().cos() * torch.exp(-0.5 * variance.detach().double())
    tolerance = 1e-10 if dtype == torch.float64 else 2e-6
    assert value.dtype == dtype
    torch.testing.assert_close(value.detach().double(), exact, rtol=0, atol=tolerance)
    by_mean, by_variance = torch.autograd.grad(value.sum(), (mean, variance))
    torch.testing.assert_close(by_mean.double(), slope, rtol=0, atol=tolerance)
    torch.testing.assert_close(by_variance.double(), -0.5 * exact.sum(0), rtol=0, atol=3 * tolerance)


def test_nodes_grow_with_the_spread_in_proportion():
    counts = [trapezoid_nodes(1.0, torch.tensor(s, dtype=torch.float64)) for s in (1e-9, 1.0, 10.0, 100.0)]
    assert counts[0] < 25
    assert 9 < counts[3] / counts[2] < 11


@pytest.mark.parametrize("knots", [None, 0.0])
def test_rounding_at_the_mean_does_not_hide_mass_far_off(knots):
    """f - e^f / 8 is -3e42 at the mean, rounded to 1e26, and -4e6 at the mass, 2700 standard deviations away."""
    mean, variance = 100.0, 0.001
    slope = tensor(1.0, -0.125)

    def log_function(f):
        return slope[0] * f + slope[1] * f.exp()

    found = log_expectation(
        log_function, tensor(mean), tensor(variance), knots=None if knots is None else tensor(knots).unsqueeze(0)
    )
    f = torch.linspace(13.0, 14.0, 200_001, dtype=F64)
    exponent = log_function(f) - 0.5 * (f - mean).square() / variance - 0.5 * math.log(2 * math.pi * variance)
    expected = exponent.logsumexp(0) + math.log(float(f[1] - f[0]))
    torch.testing.assert_close(found.squeeze(), expected, rtol=1e-12, atol=1e-6)
