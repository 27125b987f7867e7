"""Sites from local posteriors: those of the posterior where K has no longer reach, and never worse ones."""

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

from gpext.bounds import Quadrature
from gpext.inference import KL
from gpext.inference.drivers.fixed_point import visit
from gpext.inference.drivers.local_start import settle_locally
from gpext.inference.kl import independent_sites
from gpext.inference.local_terms import bound_terms
from gpext.inference.problem import Problem
from gpext.likelihoods import BernoulliLogitLikelihood, PoissonLikelihood
from tests.members import F64


def started(K, likelihood, y):
    """The problem, its terms, the sites of data alone, and those that the local posteriors make of them."""
    prior = MultivariateNormal(torch.full_like(y, 0.3), to_linear_operator(K))
    problem = Problem.of(prior, likelihood, y, 0.0)
    local = Quadrature().bind(likelihood, y)

    def terms(mean, variance):
        return bound_terms(local, mean, variance)

    start = independent_sites(problem, terms)
    return problem, terms, start, settle_locally(problem, terms, start)


def along_a_line(n, spacing, variance=1.0):
    x = spacing * torch.arange(n, dtype=F64)
    return variance * torch.exp(-0.5 * (x.unsqueeze(-1) - x).square())


def labels(n):
    return (torch.rand(n, dtype=F64, generator=torch.Generator().manual_seed(0)) < 0.6).double()


@pytest.mark.parametrize("likelihood", [BernoulliLogitLikelihood(), PoissonLikelihood()])
def test_data_that_come_in_groups_start_at_the_solution(likelihood):
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    K = torch.block_diag(*[along_a_line(12, 0.5)] * 5)[order][:, order]
    problem, terms, start, found = started(K, likelihood, labels(60))
    before, after = (float(visit(problem, terms, sites).residual.max()) for sites in (start, found))
    assert after < min(before, 0.02)


def test_a_prior_of_short_reach_starts_nearer():
    problem, terms, start, found = started(along_a_line(80, 0.7, 4.0), BernoulliLogitLikelihood(), labels(80))
    end = KL().infer(problem.prior.distribution, problem.likelihood, problem.targets).log_evidence
    before, after = (float(end - visit(problem, terms, sites).value) for sites in (start, found))
    assert before > 1e-2
    assert after < 1e-3


@pytest.mark.parametrize(("n", "spacing", "variance"), [(80, 0.01, 1.0), (80, 0.5, 1e4), (16, 0.5, 1.0)])
def test_elsewhere_sites_stay_as_they_were(n, spacing, variance):
    _, _, start, found = started(along_a_line(n, spacing, variance), BernoulliLogitLikelihood(), labels(n))
    assert found is start
