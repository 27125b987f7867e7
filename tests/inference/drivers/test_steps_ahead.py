"""KL and EP take their sites at the means after a Newton step: it is one, and it saves factorisations."""

from functools import partial

import pytest
import torch
from gpytorch.distributions import MultivariateNormal

from gpext.bounds import Quadrature
from gpext.inference import EP, KL, Status
from gpext.inference.drivers import fixed_point
from gpext.inference.drivers.inexact_newton import rough_newton_step
from gpext.inference.ep_internals import moment_matching
from gpext.inference.local_terms import bound_terms
from gpext.inference.problem import Problem
from gpext.likelihoods import BernoulliLogitLikelihood, LaplaceLikelihood, PoissonLikelihood, StudentTLikelihood
from gpext.likelihoods.tilted_moments import tilt
from gpext.sites import GaussianSites

F64 = torch.float64
SIZE = 60
LIKELIHOODS = {
    "labels": BernoulliLogitLikelihood(),
    "counts": PoissonLikelihood(),
    "Student-t": StudentTLikelihood().double(),
    "Laplace": LaplaceLikelihood().double(),
}


def prior(variance=1.0, *batch):
    x = torch.linspace(0, 1, SIZE, dtype=F64).unsqueeze(-1)
    return MultivariateNormal(torch.zeros(*batch, SIZE, dtype=F64), variance * torch.exp(-5 * torch.cdist(x, x)))


def targets(name):
    generator = torch.Generator().manual_seed(0)
    f = torch.linalg.cholesky(prior(2.0).covariance_matrix) @ torch.randn(SIZE, dtype=F64, generator=generator)
    return {"labels": (f > 0).double(), "counts": torch.poisson(f.exp(), generator=generator)}.get(name, f)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_the_step_leaves_least_of_the_residual_along_it(batch):
    """Which is then at right angles to it; the products with K^-1 and V are those of dense solves."""
    generator = torch.Generator().manual_seed(0)
    before, tau, residual = (torch.rand(*batch, SIZE, dtype=F64, generator=generator) + 0.5 for _ in range(3))
    problem = Problem.of(prior(2.0, *batch), PoissonLikelihood(), torch.ones(*batch, SIZE, dtype=F64), 0.0)
    posterior = problem.condition(GaussianSites(before, before))
    move, turn = rough_newton_step(problem, posterior, GaussianSites(tau, tau), residual)
    K = prior(2.0).covariance_matrix
    torch.testing.assert_close((K @ turn.unsqueeze(-1)).squeeze(-1), move, rtol=1e-9, atol=1e-9)
    left = residual - turn - tau * move
    assert bool(((left * move).sum(-1).abs() < 1e-10 * (residual * move).sum(-1)).all())
    V = torch.linalg.inv(torch.linalg.inv(K) + torch.diag_embed(before))
    along = (V @ residual.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(move / move[..., :1], along / along[..., :1], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_kl_stays_where_it_ends(name):
    likelihood, y = LIKELIHOODS[name], targets(name)
    sites = KL(tolerance=1e-10).infer(prior(), likelihood, y).sites
    problem = Problem.of(prior(), likelihood, y, 0.0)
    terms = partial(bound_terms, Quadrature().bind(likelihood, y))
    with torch.no_grad():
        ahead = fixed_point.target_ahead(problem, terms, fixed_point.visit(problem, terms, sites))
    torch.testing.assert_close(ahead.shift, sites.shift, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(ahead.precision, sites.precision, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("power", [1.0, 0.6])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_ep_stays_where_it_ends(name, power):
    likelihood, y = LIKELIHOODS[name], targets(name)
    sites = EP(power=power, tolerance=1e-10).infer(prior(), likelihood, y).sites
    problem = Problem.of(prior(), likelihood, y, 0.0)
    found = moment_matching.match(problem, tilt(likelihood, y, power), power, sites)
    with torch.no_grad():
        ahead = found.proposal_ahead(problem)
    torch.testing.assert_close(ahead.shift, sites.shift, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(ahead.precision, sites.precision, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("power", [1.0, 0.6])
def test_the_step_of_ep_is_newtons(power):
    """The change of (m^ - m) / (eta v^) along the step, by differences, is what the step takes from it."""
    likelihood, y = PoissonLikelihood(), targets("counts")
    sites = EP(power=power, tolerance=1e-10).infer(prior(), likelihood, y).sites
    problem = Problem.of(prior(), likelihood, y, 0.0)
    found = moment_matching.match(problem, tilt(likelihood, y, power), power, sites)
    c, tau = found.cavity_variance, found.proposal.precision
    turn = torch.cos(torch.arange(SIZE, dtype=F64))
    move = prior().covariance_matrix @ turn

    def residual(t):
        tilted = found.tilt(found.cavity_mean + t * (move - power * c * turn), c)
        return (tilted.mean - found.mean - t * move) / (power * tilted.variance)

    with torch.no_grad():
        slope = (residual(1e-4) - residual(-1e-4)) / 2e-4
    torch.testing.assert_close(slope, -turn - tau * move, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [KL, EP])
def test_it_saves_factorisations(rule, monkeypatch):
    """From the sites of a prior with half of the variance, to 1e-6, in all that are log-concave."""
    condition, count = Problem.condition, 0

    def counted(self, sites):
        nonlocal count
        count += 1
        return condition(self, sites)

    monkeypatch.setattr(Problem, "condition", counted)

    def factorisations():
        nonlocal count
        total = 0
        for name in ("labels", "counts", "Laplace"):
            start = rule().infer(prior(1.0), LIKELIHOODS[name], targets(name)).sites
            count = 0
            result = rule().infer(prior(2.0), LIKELIHOODS[name], targets(name), start=start)
            assert result.status is Status.CONVERGED, result.message
            total += count
        return total

    with_step = factorisations()
    for module in (fixed_point, moment_matching):
        monkeypatch.setattr(
            module, "rough_newton_step", lambda problem, posterior, sites, residual: (0 * residual,) * 2
        )
    assert with_step <= 0.9 * factorisations()


def test_mixing_leaves_positive_precisions_positive():
    """The second residual is nearly the first: extrapolated to where it vanishes, a precision would be -3.2."""
    problem = Problem.of(prior(), PoissonLikelihood(), torch.ones(SIZE, dtype=F64), 0.0)
    zero, one = torch.zeros(SIZE, dtype=F64), torch.ones(SIZE, dtype=F64)
    mixing = fixed_point.Mixing(problem)
    assert mixing.mix(GaussianSites(zero, one), one, GaussianSites(zero, 0.5 * one)) is None
    mixed = mixing.mix(GaussianSites(zero, 0.5 * one), one, GaussianSites(zero, 0.06 * one))
    torch.testing.assert_close(mixed.precision, 0.006 * one)
    others = fixed_point.Mixing(problem)
    others.mix(GaussianSites(zero, one), one, GaussianSites(zero, 0.5 * one))
    mixed = others.mix(GaussianSites(zero, -0.1 * one), one, GaussianSites(zero, -0.3 * one))
    torch.testing.assert_close(mixed.precision, -5 / 6 * one)
