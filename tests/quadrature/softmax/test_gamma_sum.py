"""E[log Gamma(sum of softplus)] against sums over grids of all latents, and the number of nodes."""

import math

import mpmath
import numpy as np
import pytest
import scipy.special
import torch

from gpext.likelihoods import BetaLikelihood, DirichletLikelihood
from gpext.quadrature import expected_log_gamma_of_sum, softplus_expectation
from gpext.quadrature.softmax import gamma_sum
from gpext.quadrature.softmax.softplus import softplus_rules
from tests.members import F64, tensor

# means, variances of two latents: narrow, moderate, on both sides of the change of rule at 4, wide, mixed, far apart
PAIRS = [
    ((0.0, 0.0), (1.0, 1.0)),
    ((0.0, 1.0), (1e-10, 1e-4)),
    ((-3.0, 2.0), (0.01, 9.0)),
    ((5.0, -5.0), (4.1, 3.9)),
    ((-30.0, -30.0), (4.0, 100.0)),
    ((30.0, -30.0), (1.0, 1e4)),
    ((-30.0, -25.0), (1e-10, 1e-3)),
    ((30.0, 20.0), (1e-3, 2.0)),
    ((0.0, 3.0), (1e6, 1e-10)),
    ((300.0, 0.0), (1e4, 1e2)),
    ((-3000.0, -500.0), (1e4, 1e-2)),
    ((3000.0, 1.0), (1e5, 1.0)),
    ((-80.0, -79.0), (1.0, 3.0)),  # where log Gamma(S) is -log S, and on the other side of it
    ((-45.0, -50.0), (0.1, 1e-3)),
    ((-41.0, -50.0), (0.1, 1e-3)),
    ((-500.0, -480.0), (50.0, 1e3)),
]


def column(values):
    return tensor(*values).unsqueeze(-1)


def log_theta(f):
    return np.where(f < -30, f, np.log(np.logaddexp(0, np.maximum(f, -30))))


def grid(mean, variance):
    """Equal steps, fine enough for softplus and for the Gaussian."""
    s = math.sqrt(variance)
    half = int(8.5 / min(0.25, 0.15 / s))
    z = np.linspace(-8.5, 8.5, 2 * half + 1)
    weights = np.exp(-0.5 * z**2)
    return mean + s * z, weights / weights.sum()


def by_brute_force(mean, variance):
    (f, weights), (g, others) = (grid(*pair) for pair in zip(mean, variance, strict=True))
    total = 0.0
    for at, weight in zip(
        np.array_split(f, len(f) // 100 + 1), np.array_split(weights, len(f) // 100 + 1), strict=True
    ):
        log_sum = np.logaddexp(log_theta(at)[:, None], log_theta(g))
        total += weight @ ((scipy.special.gammaln(1 + np.exp(log_sum)) - log_sum) @ others)
    return total


@pytest.mark.parametrize(("mean", "variance"), PAIRS)
def test_two_latents_agree_with_a_grid(mean, variance):
    found = expected_log_gamma_of_sum(column(mean), column(variance))
    expected = by_brute_force(mean, variance)
    assert found.item() == pytest.approx(expected, rel=3e-12, abs=1e-11)


@pytest.mark.parametrize(("mean", "variance"), PAIRS)
def test_derivatives_are_those_of_the_value(mean, variance):
    m, v = column(mean).requires_grad_(), column(variance).requires_grad_()
    value = expected_log_gamma_of_sum(m, v)
    by_mean, by_variance = torch.autograd.grad(value.sum(), (m, v))
    noise = 1e-13 * (1 + abs(value.item()))
    with torch.no_grad():
        for k in range(2):
            unit = torch.eye(2, dtype=F64)[:, k : k + 1]
            for found, x, h in ((by_mean, 0, 1e-3 * (1 + v[k].sqrt())), (by_variance, 1, 1e-2 * v[k])):
                ends = [
                    expected_log_gamma_of_sum(m + sign * h * unit * (1 - x), v + sign * h * unit * x)
                    for sign in (-2, -1, 1, 2)
                ]
                difference = (ends[0] - 8 * ends[1] + 8 * ends[2] - ends[3]) / (12 * h)
                assert found[k].item() == pytest.approx(difference.item(), rel=1e-7, abs=1e-9 + noise / h.item())


@pytest.mark.parametrize(("mean", "variance"), [(0.3, 1e-8), (-2.0, 0.5), (1.0, 4.5), (-20.0, 400.0), (5.0, 1e5)])
def test_one_latent_agrees_with_its_own_integral(mean, variance):
    s = mpmath.sqrt(variance)

    def integrand(z):
        f = mean + s * z
        return mpmath.loggamma(mpmath.log1p(mpmath.exp(f))) * mpmath.npdf(z)

    cuts = sorted({-12, -6, -3, 0, 3, 6, 12, *(float((b - mean) / s) for b in (-20, -5, 0, 5, 20) if s > 1)})
    expected = float(mpmath.quad(integrand, [c for c in cuts if abs(c) <= 12]))
    found = expected_log_gamma_of_sum(tensor(mean).view(1, 1), tensor(variance).view(1, 1))
    assert found.item() == pytest.approx(expected, rel=1e-11, abs=1e-11)


def test_five_latents_agree_with_draws():
    generator = torch.Generator().manual_seed(0)
    mean, sd = 2 * torch.randn(5, 1, generator=generator, dtype=F64), torch.rand(5, 1, generator=generator, dtype=F64)
    f = mean + 2 * sd * torch.randn(5, 200_000, generator=generator, dtype=F64)
    draws = torch.nn.functional.softplus(f).sum(0).lgamma()
    found = expected_log_gamma_of_sum(mean, (2 * sd).square())
    assert abs(float((draws.mean() - found) / (draws.std() / 200_000**0.5))) < 4.5


def test_little_sums_are_those_of_the_integral():
    """At the border small sums agree with the integral, which other tests compare with grids."""
    m, v = torch.tensor([[-70.0, -71.0, -90.0]], dtype=F64), torch.tensor([[2.0, 1e-3, 9.0]], dtype=F64)
    for found, expected in zip(gamma_sum._of_rows(m, v), gamma_sum._of_larger(m, v), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_latent_that_is_nothing_beside_the_others_changes_nothing():
    mean, variance = column((0.5, -1.0, 2.0)), column((0.3, 20.0, 1e-5))
    alone = expected_log_gamma_of_sum(mean, variance)
    beside = expected_log_gamma_of_sum(torch.cat([mean, column([-200.0])]), torch.cat([variance, column([9.0])]))
    torch.testing.assert_close(beside, alone, rtol=1e-12, atol=1e-12)


def test_many_data_are_as_each_alone():
    generator = torch.Generator().manual_seed(0)
    mean = 10 * torch.randn(3, 40, generator=generator, dtype=F64)
    variance = 10 ** (10 * torch.rand(3, 40, generator=generator, dtype=F64) - 5)
    together = expected_log_gamma_of_sum(mean, variance)
    alone = torch.cat([expected_log_gamma_of_sum(mean[:, i : i + 1], variance[:, i : i + 1]) for i in range(40)])
    torch.testing.assert_close(together, alone, rtol=1e-11, atol=1e-11)
    batch = expected_log_gamma_of_sum(mean.view(3, 4, 10).movedim(1, 0), variance.view(3, 4, 10).movedim(1, 0))
    torch.testing.assert_close(batch.flatten(), alone, rtol=1e-11, atol=1e-11)


def test_the_number_of_nodes_grows_with_the_logarithm_of_the_width():
    sizes = []
    for sd in (10.0, 1e3, 1e5):
        m, v = torch.zeros(1, 5, dtype=F64), torch.full((1, 5), sd**2, dtype=F64)
        outer = gamma_sum._nodes(*gamma_sum._ends(m, v), m, v)[0].size(-1)
        inner = max(rule.f.size(-1) for rule in softplus_rules(m[0], v[0]))
        sizes.append((outer, inner))
    assert sizes[2][0] < 3000
    assert sizes[2][1] < 600
    assert all(later - last <= 1.5 * (last - first) + 200 for first, last, later in zip(*sizes, strict=True))


@pytest.mark.parametrize("latents", [2, 3])
def test_the_expected_log_density_is_that_of_a_lattice(latents):
    generator = torch.Generator().manual_seed(0)
    likelihood = DirichletLikelihood(latents)
    y = torch.randn(6, latents, generator=generator, dtype=F64).softmax(-1)
    m = torch.randn(latents, 6, generator=generator, dtype=F64).requires_grad_()
    v = (0.2 + 0.3 * torch.rand(latents, 6, generator=generator, dtype=F64)).requires_grad_()
    ours = likelihood.expected_log_density(y, m, v)
    theirs = likelihood.joint_expected_log_density(y, m, torch.diag_embed(v.mT).movedim(-3, -1))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    slopes = [torch.autograd.grad(value.sum(), (m, v)) for value in (ours, theirs)]
    torch.testing.assert_close(*slopes, rtol=1e-7, atol=1e-7)
    if latents == 2:
        as_beta = BetaLikelihood().expected_log_density(y[:, 0], m, v)
        torch.testing.assert_close(as_beta, ours, rtol=1e-12, atol=1e-12)


def test_a_smooth_function_of_one_latent_and_its_derivatives():
    def jet(f, rows):
        theta, J = torch.nn.functional.softplus(f), f.sigmoid()
        return theta.square(), 2 * theta * J, 2 * J.square() + 2 * theta * J * (1 - J)

    m, v = column((0.4, -1.0)).requires_grad_(), column((1e-6, 2e4)).requires_grad_()
    value = softplus_expectation(jet, m, v)
    by_mean, by_variance = torch.autograd.grad(value.sum(), (m, v))
    z = torch.linspace(-9, 9, 200_001, dtype=F64)
    f = m.detach() + v.detach().sqrt() * z
    weights = torch.softmax(-0.5 * z.square(), 0)
    expected, slope, bend = ((values * weights).sum(-1) for values in jet(f, None))
    torch.testing.assert_close(value.squeeze(), expected.sum())
    torch.testing.assert_close(by_mean.squeeze(), slope)
    torch.testing.assert_close(by_variance.squeeze(), 0.5 * bend)


def test_a_latent_that_underflows_beside_one_that_takes_more_nodes_is_finite():
    """Latents integrated together have equally many nodes, which then reach far beyond the first latent."""
    m, v = column((-5054.0, -400.0, 3.0)).requires_grad_(), column((1600.0, 1600.0, 1.0)).requires_grad_()
    value = expected_log_gamma_of_sum(m, v)
    slopes = torch.autograd.grad(value.sum(), (m, v))
    assert all(bool(tensor.isfinite().all()) for tensor in (value, *slopes))
