"""Augmentations of every likelihood: int p(y | f, w) p(w) dw = p(y | f), by quadrature."""

import math

import numpy as np
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator

from gpext.augmentations import AutomaticRadial, ExponentialRadial, Matern32Radial, SechRadial, StudentTRadial
from gpext.inference import CAVI, Status
from tests.members import F64, MEMBERS, rbf_prior, tensor

RADIALS = {
    "student_t": StudentTRadial(tensor(4.5)),
    "student_t_heavy": StudentTRadial(tensor(0.5)),
    "exponential": ExponentialRadial(),
    "matern32": Matern32Radial(),
    "sech": SechRadial(tensor(1.0)),
    "sech_power": SechRadial(tensor(7.3)),
}
C = torch.logspace(-8, 4, 97, dtype=F64)


@pytest.fixture(params=MEMBERS)
def member(request):
    return MEMBERS[request.param]


@pytest.fixture(params=RADIALS)
def radial(request):
    return RADIALS[request.param]


def random_marginals(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = 1.5 * torch.randn(n, generator=generator, dtype=F64)
    variance = torch.logspace(-3, 1, n, dtype=F64)
    return mean, variance


# ---- the identity --------------------------------------------------------------------------------------------------


def test_mixture_of_gaussians_integrates_to_the_likelihood(member):
    low, high, step = member.log_w_range
    t = np.arange(low, high, step)
    w = np.exp(t)
    for y in {"real": [1.3], "binary": [0.0, 1.0], "count": [0.0, 4.0]}[member.support]:
        mixing = member.mixing(w, y) if member.vectorised else np.array([member.mixing(v, y) for v in w])
        weights = torch.from_numpy(mixing * w * step)  # trapezoidal in log w: exponentially accurate
        assert float(weights.sum()) == pytest.approx(1, abs=1e-6 if not member.vectorised else 1e-5)
        augmentation = member.likelihood.augmentation(tensor(y))
        for f in [-2.0, -0.3, 0.45, 2.5]:
            given_w = augmentation.log_constant + augmentation.potential * f
            given_w = given_w - augmentation.squared_distance(tensor(f)) * torch.from_numpy(w)
            density = float((given_w.exp() * weights).sum())
            assert density == pytest.approx(math.exp(member.log_density(y, f)), rel=1e-6)


def test_site_is_the_dependence_of_the_mixture_component_on_f(member):
    y = member.targets(5)
    augmentation = member.likelihood.augmentation(y)
    w = torch.linspace(0.1, 3, 5, dtype=F64)
    shift, precision = augmentation.site(w)

    def component(f):
        return augmentation.potential * f - w * augmentation.squared_distance(f)

    f = torch.linspace(-3, 2, 5, dtype=F64)
    difference = component(f) - component(torch.zeros(5, dtype=F64))
    torch.testing.assert_close(difference, shift * f - 0.5 * precision * f.square(), rtol=1e-12, atol=1e-12)


def test_log_prob_is_the_density_of_scipy(member):
    y, f = member.targets(40), random_marginals(40)[0]
    expected = tensor(*(member.log_density(float(a), float(b)) for a, b in zip(y, f, strict=True)))
    torch.testing.assert_close(member.likelihood.augmentation(y).log_prob(f), expected, rtol=1e-12, atol=1e-12)


def test_conditional_distribution_and_augmentation_are_one_density(member):
    y, f = member.targets(40), random_marginals(40)[0]
    log_prob = member.likelihood(f).log_prob(y)
    torch.testing.assert_close(log_prob, member.likelihood.augmentation(y).log_prob(f), rtol=1e-12, atol=1e-12)


def test_likelihood_is_normalised_over_targets(request, member):
    if "bayesian_svm" in request.node.name:
        pytest.skip("the Bayesian SVM is a pseudo-likelihood")
    for f in [-3.0, 0.2, 4.0]:
        if member.support == "real":  # y = f +- e^u: trapezoidal in u, exponentially accurate
            u = torch.arange(-40, member.reach, 0.02, dtype=F64)
            y = torch.cat([f + u.exp(), f - u.exp()])
            weight = 0.02 * torch.cat([u, u]).exp()
        else:
            y = torch.arange(2 if member.support == "binary" else 20000, dtype=F64)
            weight = torch.ones_like(y)
        mass = float((member.likelihood.augmentation(y).log_prob(tensor(f)).exp() * weight).sum())
        assert mass == pytest.approx(1, abs=1e-6)


# ---- E[w] ----------------------------------------------------------------------------------------------------------


def test_automatic_mean_agrees_with_the_closed_form_from_1e_minus_8_to_1e4(radial):
    closed = radial.mean(C.square())
    torch.testing.assert_close(AutomaticRadial(log_phi=radial.log_phi).mean(C.square()), closed, rtol=1e-10, atol=0)
    usable = radial.log_phi(C.square()) > -600
    assert usable.sum() > 60
    by_phi = AutomaticRadial(lambda r: radial.log_phi(r).exp()).mean(C[usable].square())
    torch.testing.assert_close(by_phi, closed[usable], rtol=1e-10, atol=0)


def test_mean_is_minus_the_derivative_of_log_phi(radial):
    r = torch.logspace(-1.5, 2, 30, dtype=F64).requires_grad_(True)
    (slope,) = torch.autograd.grad(radial.log_phi(r).sum(), r)
    torch.testing.assert_close(radial.mean(r.detach()), -slope, rtol=1e-12, atol=0)


@pytest.mark.parametrize("automatic", [False, True])
def test_mean_is_stable_in_float32(radial, automatic):
    r = C.square().float()  # exact in float64
    chosen = AutomaticRadial(log_phi=radial.log_phi) if automatic else radial
    if isinstance(radial, StudentTRadial | SechRadial) and not automatic:
        name = "deg_free" if isinstance(radial, StudentTRadial) else "count"
        chosen = type(radial)(getattr(radial, name).float())
    mean = chosen.mean(r)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean.double(), radial.mean(r.double()), rtol=1e-5, atol=0)


def test_log_phi_starts_at_zero_decreases_and_is_convex(radial):
    r = torch.logspace(-6, 4, 200, dtype=F64)
    value = radial.log_phi(r)
    assert float(radial.log_phi(tensor(0.0))) == 0
    slope = value.diff() / r.diff()
    assert bool((slope < 0).all())
    assert bool((slope.diff() >= -1e-9 * slope[1:].abs()).all())


def test_expected_log_phi_in_closed_form_is_the_quadrature():
    gap, variance = random_marginals(30)
    closed = ExponentialRadial().expected_log_phi(gap, variance)
    nodes = torch.linspace(-12, 12, 400001, dtype=F64)
    weights = torch.exp(-0.5 * nodes.square())
    f = gap.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * nodes
    torch.testing.assert_close(closed, -(f.abs() * weights).sum(-1) / weights.sum(), rtol=1e-8, atol=1e-8)
    at_point = ExponentialRadial().expected_log_phi(gap, torch.zeros_like(gap))
    torch.testing.assert_close(at_point, -gap.abs(), rtol=0, atol=0)


# ---- the bound -----------------------------------------------------------------------------------------------------


def test_augmented_bound_is_below_the_exact_expectation(member):
    mean, variance = random_marginals(60)
    y = member.targets(60)
    marginals = MultivariateNormal(mean, DiagLinearOperator(variance))
    exact = member.likelihood.expected_log_prob(y, marginals)
    bound = member.likelihood.augmented_bound(y, marginals)
    assert bool((bound <= exact + 1e-12 * exact.abs()).all())
    assert float((exact - bound).max()) > 1e-3  # a bound, not the expectation itself


def test_gap_of_the_bound_vanishes_with_the_variance(member):
    mean, _ = random_marginals(20)
    y = member.targets(20)
    mean = torch.where((mean - y).abs() < 0.3, y + 0.3, mean)  # away from the kinks; that of the SVM is at +-1
    mean = torch.where((mean.abs() - 1).abs() < 0.2, mean + 0.4, mean)
    augmentation = member.likelihood.augmentation(y)
    gaps = []
    for v in [1e-2, 1e-4, 1e-6]:
        variance = torch.full_like(mean, v)
        gaps.append((augmentation.expected_log_prob(mean, variance) - augmentation.bound(mean, variance)).max())
    assert gaps[1] < 0.05 * gaps[0]
    assert gaps[2] < 0.05 * gaps[1]
    torch.testing.assert_close(augmentation.bound(mean, 0 * mean), augmentation.log_prob(mean), rtol=1e-12, atol=1e-12)


def test_augmented_bound_is_attained_by_the_site_at_the_optimal_w(member):
    """The site plus a constant touches the bound at (m, v) and lies below it elsewhere: it is a minoriser."""
    mean, variance = random_marginals(30)
    augmentation = member.likelihood.augmentation(member.targets(30))
    tilt = augmentation.tilt(mean, variance)
    w = augmentation.radial.mean(tilt)
    shift, precision = augmentation.site(w)

    def site_bound(m, v):
        return shift * m - 0.5 * precision * (m.square() + v)

    constant = augmentation.bound(mean, variance) - site_bound(mean, variance)
    for seed in range(5):
        other_mean, other_variance = random_marginals(30, seed=seed + 1)
        other_variance = other_variance.flip(0)
        slack = augmentation.bound(other_mean, other_variance) - constant - site_bound(other_mean, other_variance)
        assert bool((slack >= -1e-9).all())


# ---- coordinate ascent ---------------------------------------------------------------------------------------------


def problem(member, n, seed=0, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.rand(n, 2, generator=generator, dtype=F64)
    return rbf_prior(x, **kwargs), member.targets(n, seed=seed + 1)


@pytest.mark.parametrize("seed", range(3))
def test_every_cavi_step_increases_the_bound(member, seed):
    (prior, _, _), y = problem(member, 40, seed, lengthscale=0.3 + 0.4 * seed, outputscale=0.5 + 3 * seed, mean=0.2)
    result = CAVI(max_steps=3000, tolerance=1e-7).infer(prior, member.likelihood, y)
    assert result.status is Status.CONVERGED
    assert result.num_steps == len(result.trace) > 2
    rounding = 1e-12 * result.trace.abs().max()
    assert bool((result.trace.diff() >= -rounding).all())
    assert float(result.trace[-1] - result.trace[0]) > 1e-6
    torch.testing.assert_close(result.trace[-1], result.log_evidence.detach(), rtol=1e-10, atol=1e-10)


def test_log_evidence_is_below_the_true_one(member):
    (prior, _, _), y = problem(member, 2, lengthscale=1.5)
    z = torch.arange(-8, 8.001, 0.02, dtype=F64)
    grid = torch.stack(torch.meshgrid(z, z, indexing="ij"), -1)  # whitened
    f = prior.mean.detach() + grid @ torch.linalg.cholesky(prior.covariance_matrix.detach()).mT
    log_density = member.likelihood.augmentation(y).log_prob(f).sum(-1).detach()
    log_weight = -0.5 * grid.square().sum(-1) - math.log(2 * math.pi) + 2 * math.log(0.02)
    truth = torch.logsumexp((log_density + log_weight).flatten(), 0)
    evidence = CAVI().infer(prior, member.likelihood, y).log_evidence
    assert evidence < truth + 1e-5
    assert evidence > truth - 0.6


def test_evidence_gradient_agrees_with_finite_differences_of_converged_runs(member):
    likelihood = member.make()
    generator = torch.Generator().manual_seed(3)
    x = 3 * torch.rand(8, 1, generator=generator, dtype=F64)
    y = member.targets(8, seed=4)
    _, kernel, mean_module = rbf_prior(x, mean=0.3)
    rule = CAVI(max_steps=20000, tolerance=1e-9)

    def evidence():
        return rule.infer(MultivariateNormal(mean_module(x), kernel(x).add_jitter(1e-6)), likelihood, y).log_evidence

    parameters = [*kernel.parameters(), *mean_module.parameters(), *likelihood.parameters()]
    gradients = torch.autograd.grad(evidence(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        start, values = parameter.detach().clone(), []
        for step in (-2e-3, -1e-3, 1e-3, 2e-3):
            parameter.data.copy_(start + step)
            values.append(evidence().item())
        parameter.data.copy_(start)
        fourth_order = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / 12e-3
        assert float(gradient) == pytest.approx(fourth_order, rel=1e-5, abs=1e-7)
