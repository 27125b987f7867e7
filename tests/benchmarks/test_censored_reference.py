"""The samplers of the reference against integrals, and the rules against the samplers.

False alarms: one in 150,000 for each comparison with chance, see `tests.statistics`.
"""

import math

import pytest
import torch

from benchmarks.censored_reference import (
    NOISES,
    RULES,
    Problem,
    between,
    ghk,
    importance,
    moments,
    of_rule,
    problem,
    references,
)
from gpext.quadrature import gauss_hermite
from tests.members import F64, tensor
from tests.seeds import as_written
from tests.statistics import misfit, t_threshold, z_threshold


def test_draws_between_limits_are_truncated_normals():
    """Means by the hazard, 8 standard deviations out on both sides as well as about the mean."""
    lower, upper = tensor(-0.3, 8.0, -torch.inf, 0.1), tensor(0.9, torch.inf, -8.0, 0.1001)
    u = torch.rand(40000, 4, generator=torch.Generator().manual_seed(1), dtype=F64)
    drawn, log_share = between(torch.zeros(4, dtype=F64), torch.ones(4, dtype=F64), lower, upper, u)
    assert bool(((drawn >= lower) & (drawn <= upper)).all())
    density = [torch.exp(-0.5 * limit.square()) / math.sqrt(2 * math.pi) for limit in (lower, upper)]
    assert misfit(drawn, (density[0] - density[1]) / log_share.exp(), rounding=1e-9) < 1


@pytest.mark.parametrize("name", NOISES)
def test_two_data_against_quadrature(name):
    """Evidence and posterior of two censored data: both estimators and the Gibbs sampler, by a product rule."""
    covariance = tensor([1.0, 0.6], [0.6, 1.0])
    p = Problem(covariance, tensor([0.5, torch.inf], [-0.2, 0.3]), 0.5, NOISES[name])
    nodes, weights = (each.double() for each in gauss_hermite(200))
    f = torch.cartesian_prod(nodes, nodes) @ torch.linalg.cholesky(covariance).mT
    log_p = p.likelihood().log_prob(p.targets, f).sum(-1) + torch.cartesian_prod(weights, weights).prod(-1).log()
    exact, share = float(torch.logsumexp(log_p, 0)), torch.softmax(log_p, 0)
    row = references(p, 200, 20000, 2)
    for estimator in ("importance", "ghk"):
        if estimator in row:
            assert abs(row[estimator]["log_evidence"] - exact) < z_threshold() * row[estimator]["error"] + 1e-6
    mean, variance, mean_error, variance_error = moments(row)
    law = t_threshold(len(row["mean"]) - 1, 4)
    expected = share @ f
    assert bool(((mean - expected).abs() < law * mean_error).all())
    assert bool(((variance - share @ (f - expected).square()).abs() < law * variance_error).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", NOISES)
def test_rules_against_gibbs_sampling_and_the_estimates_of_the_evidence(name):
    """Twenty data of all four kinds: errors beyond chance are those that each rule is known for."""
    with as_written():  # errors beyond chance are those of these data
        p = problem(NOISES[name], 20)
    row = references(p, 400, 100000, 3)
    mean, variance, mean_error, variance_error = moments(row)
    truth = row.get("ghk", row["importance"])
    law = t_threshold(len(row["mean"]) - 1, 2 * len(mean))
    allowed = {"Laplace": (0.3, 0.35, 0.3), "KL": (0.03, 0.08, 0.05), "EP": (0.01, 0.03, 0.01)}
    for rule, (of_mean, of_variance, of_evidence) in allowed.items():
        found = of_rule(p, RULES[rule])
        assert found["status"] == "CONVERGED"
        gap = (torch.tensor(found["mean"]) - mean).abs()
        assert bool((gap < law * mean_error + of_mean * variance.sqrt()).all()), rule
        gap = (torch.tensor(found["variance"]) - variance).abs()
        assert bool((gap < law * variance_error + of_variance * variance).all()), rule
        off, chance = found["log_evidence"] - truth["log_evidence"], z_threshold() * truth["error"]
        assert abs(off) < chance + of_evidence, rule
        if rule == "KL":  # a bound
            assert off < chance


def test_the_two_estimators_agree():
    p = problem(None, 12)
    generator = torch.Generator().manual_seed(4)
    start = of_rule(p, RULES["EP"])
    covariance = torch.diag(torch.tensor(start["variance"]).double())
    first = ghk(p, 20000, generator)
    second = importance(p, torch.tensor(start["mean"]).double(), covariance, 40000, generator)
    chance = z_threshold() * math.hypot(first["error"], second["error"])
    assert abs(first["log_evidence"] - second["log_evidence"]) < chance
