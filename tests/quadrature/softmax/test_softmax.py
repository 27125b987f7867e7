"""Integrals of the softmax against independent references: mpmath, grids in K dimensions, Sobol points."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import scipy.special
import torch

from gpext.quadrature import (
    expected_log_sum_exp,
    expected_softmax,
    log_multinomial_marginal,
)
from gpext.quadrature.softmax import clustered, softmax
from tests.members import F64, tensor

# means, variances of two classes: narrow, moderate, on both sides of the change of rule at 4, wide, mixed, far apart
PAIRS = [
    ((0.0, 0.0), (0.0, 0.0)),
    ((1.5, -2.0), (1e-6, 0.25)),
    ((0.0, 0.0), (1.0, 1.0)),
    ((1.5, -2.0), (3.75, 4.25)),
    ((-30.0, 20.0), (0.5, 2.0)),
    ((-30.0, 20.0), (1e4, 3.0)),
    ((1000.0, -1000.0), (1.0, 1.0)),
    ((-1000.0, 1000.0), (100.0, 1.0)),
    ((0.0, 0.0), (1e4, 1e4)),
    ((700.0, 690.0), (1e4, 1e-8)),
]
COUNTS = [(1, 0), (0, 1), (3, 5), (0, 60), (400, 600)]


def column(*values):
    return tensor(*values).unsqueeze(-1)


def log_sum_exp_of_two(mean, variance):
    """E[log(e^f + e^g)] = E[g] + E[softplus(f - g)], one integral over f - g, kink and remainder apart."""
    m, v = mpmath.mpf(mean[0]) - mean[1], mpmath.mpf(variance[0]) + variance[1]
    if v == 0:
        return mean[1] + mpmath.log1p(mpmath.exp(m))
    s = mpmath.sqrt(v)
    hinge = m * mpmath.ncdf(m / s) + s * mpmath.npdf(m / s)
    points = sorted({-100, -40, -10, 0, 10, 40, 100, *(m + k * s for k in (-12, -3, 0, 3, 12) if s < 3)})
    rest = mpmath.quad(lambda d: mpmath.log1p(mpmath.exp(-abs(d))) * mpmath.npdf(d, m, s), points)
    return mean[1] + hinge + rest


def marginal_of_two(counts, mean, variance):
    """log E[sigma(d)^y0 sigma(-d)^y1], d = f - g, one integral about its peak."""
    m, v = mpmath.mpf(mean[0]) - mean[1], mpmath.mpf(variance[0]) + variance[1]

    def log_density(d):
        return -counts[0] * mpmath.log1p(mpmath.exp(-d)) - counts[1] * mpmath.log1p(mpmath.exp(d))

    if v == 0:
        return log_density(m)
    low, high = m - sum(counts) * v - 1, m + sum(counts) * v + 1
    for _ in range(120):
        middle = (low + high) / 2
        slope = counts[0] / (1 + mpmath.exp(middle)) - counts[1] / (1 + mpmath.exp(-middle)) - (middle - m) / v
        low, high = (middle, high) if slope > 0 else (low, middle)
    width = 1 / mpmath.sqrt(1 / v + sum(counts) / (4 * mpmath.cosh(low / 2) ** 2))
    reach = 13 * mpmath.sqrt(v)
    points = {low + sign * min(k * width, reach) for sign in (-1, 1) for k in (0, 2, 6, 20, 60, 10**9)}
    points |= {mpmath.mpf(p) for p in (-40, -4, 0, 4, 40) if abs(p - low) < reach}
    top = log_density(low) - (low - m) ** 2 / (2 * v)
    total = mpmath.quad(lambda d: mpmath.exp(log_density(d) - (d - m) ** 2 / (2 * v) - top), sorted(points))
    return top + mpmath.log(total) - mpmath.log(2 * mpmath.pi * v) / 2


@pytest.mark.slow
@pytest.mark.parametrize(("mean", "variance"), PAIRS)
def test_two_classes_are_one_integral(mean, variance):
    with mpmath.workdps(25):
        reference = float(log_sum_exp_of_two(mean, variance))
        assert expected_log_sum_exp(column(*mean), column(*variance)).item() == pytest.approx(
            reference, rel=1e-12, abs=1e-12
        )
        for counts in COUNTS:
            if sum(counts) > 50 and sum(variance) > 1e3:  # also right, but takes minutes of mpmath
                continue
            reference = float(marginal_of_two(counts, mean, variance))
            actual = log_multinomial_marginal(column(*counts), column(*mean), column(*variance)).item()
            assert actual == pytest.approx(reference, rel=1e-13, abs=1e-11)


def on_a_grid(mean, variance, num_nodes):
    """Nodes f (3, Q^3) and log weights (Q^3,) of the product of three Gauss-Hermite rules."""
    x, w = np.polynomial.hermite_e.hermegauss(num_nodes)
    keep = w > 0
    x, log_w = torch.tensor(x[keep]), torch.tensor(np.log(w[keep] / w.sum()))
    nodes = torch.meshgrid(*(m + v.sqrt() * x for m, v in zip(mean, variance, strict=True)), indexing="ij")
    weights = torch.meshgrid(*3 * [log_w], indexing="ij")
    return torch.stack(nodes).flatten(1), sum(weights).flatten()


@pytest.mark.parametrize("variance", [(0.3, 0.0, 1.0), (1.5, 2.0, 0.1), (4.5, 0.5, 1.0)])
def test_three_classes_agree_with_a_grid(variance):
    mean, variance = tensor(0.4, -1.0, 1.3), tensor(*variance)
    f, log_weight = on_a_grid(mean, variance, 110)
    expected = (log_weight.exp() * f.logsumexp(0)).sum()
    m, v = mean.unsqueeze(-1), variance.unsqueeze(-1)
    torch.testing.assert_close(expected_log_sum_exp(m, v)[0], expected, rtol=1e-9, atol=0)
    probs = (log_weight.exp() * f.softmax(0)).sum(-1)
    torch.testing.assert_close(expected_softmax(m, v)[:, 0], probs, rtol=1e-8, atol=0)
    for counts in ((1, 0, 0), (0, 0, 1), (2, 1, 3)):
        log_density = (tensor(*counts) @ f) - sum(counts) * f.logsumexp(0)
        actual = log_multinomial_marginal(column(*counts), m, v)[0]
        torch.testing.assert_close(actual, (log_weight + log_density).logsumexp(0), rtol=0, atol=1e-8)


def test_five_classes_agree_with_quasi_monte_carlo():
    mean, variance = tensor(0.5, -1.0, 2.0, 0.0, 1.0), tensor(0.5, 4.0, 1.0, 9.0, 0.01)
    uniform = torch.quasirandom.SobolEngine(5, scramble=True, seed=0).draw(2**20, dtype=F64)
    f = mean + variance.sqrt() * torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12))
    m, v = mean.unsqueeze(-1), variance.unsqueeze(-1)
    torch.testing.assert_close(expected_log_sum_exp(m, v)[0], f.logsumexp(-1).mean(), rtol=0, atol=1e-5)
    torch.testing.assert_close(expected_softmax(m, v)[:, 0], f.softmax(-1).mean(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("variance", [(0.0, 0.01, 0.3), (1.0, 3.9, 4.1), (100.0, 1.0, 1e4)])
def test_all_outcomes_of_three_trials_sum_to_one(variance):
    outcomes = [y for y in itertools.product(range(4), repeat=3) if sum(y) == 3]
    counts = torch.tensor(outcomes, dtype=F64).T  # (3, 10)
    m, v = column(0.3, -1.0, 5.0), column(*variance)
    log_coefficient = math.log(6) - torch.lgamma(counts + 1).sum(0)
    total = (log_coefficient + log_multinomial_marginal(counts, m, v)).logsumexp(0)
    assert total.item() == pytest.approx(0, abs=1e-12)


def test_known_classes_can_be_merged():
    """Two classes known to be a and b are one known to be log(e^a + e^b), beside any others."""
    m, v = column(0.3, -1.2, 2.0, -0.5), column(2.0, 50.0, 0.0, 0.0)
    merged = torch.cat([m[:2], m[2:].logsumexp(0, keepdim=True)])
    torch.testing.assert_close(expected_log_sum_exp(m, v), expected_log_sum_exp(merged, v[:3]), rtol=0, atol=1e-12)
    for counts in (column(1, 0, 0, 0), column(2, 3, 0, 0)):
        expected = log_multinomial_marginal(counts[:3], merged, v[:3])
        torch.testing.assert_close(log_multinomial_marginal(counts, m, v), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0, 200.0])
@pytest.mark.parametrize("which", ["log_sum_exp", "marginal", "softmax"])
def test_derivatives_agree_with_differences_of_fourth_order(which, scale):
    generator = torch.Generator().manual_seed(3)
    mean = 2 * torch.randn(2, 3, 2, generator=generator, dtype=F64)
    variance = scale * torch.rand(2, 3, 2, generator=generator, dtype=F64)
    weight = torch.randn(2, 3, 2, generator=generator, dtype=F64)
    counts = tensor(1, 0, 2).unsqueeze(-1)

    def total(m, v):
        if which == "softmax":
            return (weight * expected_softmax(m, v)).sum()
        value = expected_log_sum_exp(m, v) if which == "log_sum_exp" else log_multinomial_marginal(counts, m, v)
        return (weight[:, 0] * value).sum()

    m, v = mean.clone().requires_grad_(), variance.clone().requires_grad_()
    by_mean, by_variance = torch.autograd.grad(total(m, v), (m, v))
    h = 1e-2
    direction = torch.randn(2, 3, 2, generator=generator, dtype=F64)
    difference = sum(
        c * total(mean + k * h * direction, variance) for k, c in zip((-2, -1, 1, 2), (1, -8, 8, -1), strict=True)
    )
    assert (by_mean * direction).sum().item() == pytest.approx(difference.item() / (12 * h), rel=1e-6, abs=1e-7)
    # One-sided, so that variances stay nonnegative, and relative to each.
    direction = direction.abs() * variance.clamp(min=0.1)
    coefficients = (-25 / 12, 4, -3, 4 / 3, -1 / 4)
    difference = sum(c * total(mean, variance + k * h * direction) for k, c in enumerate(coefficients))
    assert (by_variance * direction).sum().item() == pytest.approx(difference.item() / h, rel=1e-4, abs=1e-6)


def test_float32_broadcasting_and_no_trials():
    m, v = torch.randn(2, 3, 1, generator=torch.Generator().manual_seed(0)), torch.tensor([[0.5, 30.0, 0.0, 2.0]])
    value = expected_log_sum_exp(m, v)
    assert value.shape == (2, 4)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected_log_sum_exp(m.double(), v.double()), rtol=1e-6, atol=1e-6)
    probs = expected_softmax(m, v)
    assert probs.shape == (2, 3, 4)
    torch.testing.assert_close(probs.sum(-2), torch.ones(2, 4))
    counts = torch.zeros(2, 3, 4)
    counts[0, 1, 2] = 1
    m = m.clone().requires_grad_()
    value = log_multinomial_marginal(counts, m, v)
    assert value[0, 2].item() == pytest.approx(probs[0, 1, 2].log().item(), abs=1e-5)
    value[0, 2] = 0
    assert not bool(value.any())
    (gradient,) = torch.autograd.grad(value.sum(), m)
    assert not bool(gradient.any())


def test_many_data_are_integrated_as_few():
    generator = torch.Generator().manual_seed(0)
    m = 5 * torch.randn(4, 300, generator=generator, dtype=F64)
    v = torch.exp(3 * torch.randn(4, 300, generator=generator, dtype=F64))
    together = expected_log_sum_exp(m, v)
    alone = torch.cat([expected_log_sum_exp(m[:, i : i + 1], v[:, i : i + 1]) for i in range(0, 300, 37)])
    torch.testing.assert_close(together[::37], alone, rtol=1e-12, atol=1e-12)


def test_no_data_and_bad_marginals():
    empty = torch.zeros(3, 0, dtype=F64, requires_grad=True)
    assert expected_log_sum_exp(empty, empty).shape == (0,)
    assert log_multinomial_marginal(empty, empty, empty).shape == (0,)
    assert expected_softmax(empty, empty).shape == (3, 0)
    for function in (expected_log_sum_exp, expected_softmax, lambda m, v: log_multinomial_marginal(m, m, v)):
        with pytest.raises(ValueError, match=r"mean must be finite; got nan at index \(1, 0\)"):
            function(column(0, math.nan), column(1, 1))
        with pytest.raises(ValueError, match=r"variance must be finite and not negative; got -1.0 at index \(0, 0\)"):
            function(column(0, 0), column(-1, 1))


def rough_and_smooth(mean, variance):
    """E[log sum exp] and its derivatives on shared grids, and over the kernels of each datum."""
    m, v = mean.mT.contiguous(), variance.mT.contiguous()
    return zip(softmax.log_sum_exp_on_grid(m, v), softmax._log_sum_exp_over_kernels(m, v), strict=True)


# about the widths where one rule takes over from another, all of them in one datum, and equal ones
@pytest.mark.parametrize("largest", [1e-6, 0.03, 0.0325, 0.2, 0.205, 3.0, 30.0, 600.0])
@pytest.mark.parametrize("equal", [False, True])
def test_shared_grids_agree_with_a_grid_for_each(largest, equal):
    generator = torch.Generator().manual_seed(0)
    mean = 3 * torch.randn(5, 30, generator=generator, dtype=F64)
    share = torch.ones(5, 30, dtype=F64) if equal else torch.rand(5, 30, generator=generator, dtype=F64) ** 2
    for together, alone in rough_and_smooth(mean, largest * share):
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-11 * 10 ** (together.dim() > 1))


@pytest.mark.parametrize("width", [1e-3, 1.0, 1e3])
def test_clustered_coordinates_are_inverted(width):
    center = tensor([0.0, 5.0, -300.0], [1e4, 1e4, 1e4])
    widths = width * tensor([1.0, 2.0, 1e3], [1.0, 1.0, 1e-3])
    u = tensor([-1e5, -301.0, 0.0, 4.99, 1e3], [-1e5, 0.0, 1e4, 1e4 + 1e-2, 1e6])
    t = clustered.coordinate(u, center, widths)
    found, stretch = clustered.place(t, center, widths)
    assert bool(((found - u).abs() < 1e-13 * stretch * (1 + t.abs())).all())
    h = 1e-2 * stretch
    ahead, behind = (clustered.coordinate(u + sign * h, center, widths) for sign in (1, -1))
    torch.testing.assert_close((ahead - behind) / (2 * h), 1 / stretch, rtol=1e-3, atol=0)


def log_sum_exp_by_fine_sums(mean, scale):
    """u_1 - int_{u_0}^{u_1} prod_k F_k du - gamma, F_k a sum over the Gumbel density, or G itself where s = 0."""
    g = np.arange(-4.3, 45.0, 0.04)
    density = 0.04 * np.exp(-g - np.exp(-g))
    low, high = np.max(mean - 9 * scale) - 4.3, np.max(mean + 9 * scale) + 45.0
    total = 0.0
    step = 0.05
    nodes = np.arange(math.ceil((high - low) / step))
    for u in np.array_split(low + step * (nodes + 0.5), 1 + len(nodes) // 2000):
        product = np.ones_like(u)
        for m, s in zip(mean, scale, strict=True):
            z = (u[:, None] - m - g) / s if s else u - m
            product *= scipy.special.ndtr(z) @ density if s else np.exp(-np.exp(-z))
        total += step * np.sum(1 - product)
    return low + total - np.euler_gamma


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mean", "scale"),
    [
        ((3.0, 0.0, -10.0), (0.0, 25.0, 60.0)),
        ((0.0, 5.0, 40.0), (0.0, 0.0, 50.0)),
        ((-20.0, 5.0, 30.0), (2.1, 30.0, 45.0)),  # all beyond the range in which the Gumbel variable is integrated
        ((10.0, 10.0, -80.0), (0.0, 3.0, 70.0)),
    ],
)
def test_narrow_latents_beside_wide_ones(mean, scale):
    m, s = column(*mean), column(*scale)
    value, slope, bend = softmax._log_sum_exp_over_kernels(m.mT, s.mT.square())
    assert abs(float(value) - log_sum_exp_by_fine_sums(np.array(mean), np.array(scale))) < 1e-10
    assert abs(float(slope.sum()) - 1) < 1e-11
    for k in range(3):
        h, moved = 0.01, torch.zeros(1, 3, dtype=F64)
        moved[0, k] = h
        by_mean = [softmax._log_sum_exp_over_kernels(m.mT + i * moved, s.mT.square())[0] for i in (-2, -1, 1, 2)]
        difference = float(by_mean[0] - 8 * by_mean[1] + 8 * by_mean[2] - by_mean[3]) / (12 * h)
        assert abs(float(slope[0, k]) - difference) < 1e-9
        if scale[k]:
            by_variance = [softmax._log_sum_exp_over_kernels(m.mT, s.mT**2 + i * moved)[0] for i in (-2, -1, 1, 2)]
            difference = float(by_variance[0] - 8 * by_variance[1] + 8 * by_variance[2] - by_variance[3]) / (12 * h)
            assert abs(float(bend[0, k]) - difference) < 1e-9


def test_a_datum_does_not_depend_on_its_company():
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(3, 40, generator=generator, dtype=F64) * torch.logspace(-1, 3, 40, dtype=F64)
    variance = torch.logspace(-3, 4, 40, dtype=F64) * torch.rand(3, 40, generator=generator, dtype=F64)
    together = expected_log_sum_exp(mean, variance)
    alone = torch.cat(
        [expected_log_sum_exp(m, v) for m, v in zip(mean.split(1, -1), variance.split(1, -1), strict=True)]
    )
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-11)
