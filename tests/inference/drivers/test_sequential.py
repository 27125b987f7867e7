"""The blocked sweep against the plain one, which makes a rank-one update after each datum."""

import pytest
import torch

from gpext.bounds import Quadrature
from gpext.inference import KL
from gpext.inference.drivers.fixed_point import visit
from gpext.inference.drivers.sequential import SequentialState, sweep_sequentially
from gpext.inference.drivers.single_site import solve_scalar
from gpext.inference.local_terms import bound_terms
from gpext.inference.problem import Problem
from gpext.sites import GaussianSites
from tests.latent_cases import CASES


def make(name, n, rate):
    """A problem, and sites a fraction `rate` of the way from the optimal ones to none."""
    likelihood, prior, y = CASES[name].problem(n, outputscale=3.0)
    problem = Problem.of(prior(), likelihood.requires_grad_(False), y, 0.0)
    best = KL(tolerance=1e-9).infer(prior(), likelihood, y).sites

    def terms_at(part):
        bound = Quadrature().bind(likelihood, y[part])
        return lambda mean, variance: bound_terms(bound, mean, variance)

    return problem, terms_at, best.detach().lerp(problem.no_sites(), rate)


def plain_sweep(problem, terms_at, sites):
    posterior = problem.condition(sites)
    V, m = posterior.covariance.clone(), posterior.mean.clone()
    tau, nu = sites.precision.clone(), sites.shift.clone()
    for i in range(len(m)):
        v = V[i, i].clone()
        r, b = 1 / v - tau[i], m[i] / v - nu[i]
        old = GaussianSites(nu[i : i + 1], tau[i : i + 1])
        new = solve_scalar(terms_at(slice(i, i + 1)), b[None], r[None], old, max_steps=200, tolerance=1e-12)
        d, dn = new.precision[0] - tau[i], new.shift[0] - nu[i]
        column = V[:, i].clone()
        m += column * (dn - d * m[i]) / (1 + d * v)
        V -= torch.outer(column, column) * d / (1 + d * v)
        tau[i], nu[i] = new.precision[0], new.shift[0]
    return GaussianSites(nu, tau), m, V


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bernoulli_logit", "poisson", "student_t", "ordinal_logit"])
@pytest.mark.parametrize(("n", "rate"), [(40, 0.02), (200, 0.02), (40, 0.3)])
def test_a_blocked_sweep_is_the_plain_one(name, n, rate):
    problem, terms_at, sites = make(name, n, rate)
    everything = terms_at(slice(None))
    start = visit(problem, everything, sites)
    blocked, trace = sweep_sequentially(problem, everything, terms_at, start, 1, 0.0)
    plain, mean, covariance = plain_sweep(problem, terms_at, sites)
    moved = (plain.shift - sites.shift).abs().max()
    assert (blocked.shift - plain.shift).abs().max() < 0.015 * moved  # second order in the motion of the cavities
    moved = (plain.precision - sites.precision).abs().max()
    assert (
        blocked.precision - plain.precision
    ).abs().max() < 0.015 * moved  # second order in the motion of the cavities
    after = visit(problem, everything, plain)
    torch.testing.assert_close(after.mean, mean, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(after.posterior.covariance, covariance, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(trace[0], after.value, rtol=1e-5, atol=1e-4)
    assert after.value >= start.value


def test_a_variance_that_rounding_has_made_negative_ends_the_sweep():
    """The first datum gets so sharp a site that no variance is left for the second, nearly equal one."""
    problem, terms_at, sites = make("student_t", 2, 0.0)
    terms = terms_at(slice(None))
    state = SequentialState(problem, visit(problem, terms, sites))
    state.covariance = torch.tensor([[1.0, 1.0], [1.0, 1.0 - 1e-9]], dtype=torch.float64)
    state.mean = state.shift = state.precision = torch.zeros(2, dtype=torch.float64)
    responses = [[1.0, 0.0, 1e15, 0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    assert not state.visit_block(slice(0, 2), terms, terms_at, responses)
