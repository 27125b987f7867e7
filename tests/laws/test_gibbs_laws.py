"""Laws of the Gibbs sampler, over every likelihood with an augmentation.

Chains are independent, so a statistic averaged over each has a standard error from the chains alone, whatever their
autocorrelation.
"""

import numpy as np
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

from gpext.inference.gibbs import draw_latent, draw_sites
from gpext.posteriors import DensePrior
from gpext.samplers import GibbsSampler
from tests.members import F64, MEMBERS
from tests.statistics import misfit

members = pytest.mark.parametrize("name", MEMBERS)

K2 = torch.tensor([[1.3, 0.8], [0.8, 1.1]], dtype=F64)
MU2 = torch.tensor([0.3, -0.4], dtype=F64)


def statistics(f):
    """First and second moments of two latent values, (..., 2) -> (..., 5)."""
    return torch.stack([f[..., 0], f[..., 1], f[..., 0] ** 2, f[..., 1] ** 2, f[..., 0] * f[..., 1]], -1)


@members
def test_agrees_with_two_dimensional_quadrature(name):
    member = MEMBERS[name]
    y = member.targets(2, seed=3)
    grid = np.linspace(-9, 9, 901)
    logs = [[member.log_density(float(target), float(f)) for f in grid] for target in y]
    f = torch.tensor(grid, dtype=F64)
    points = torch.stack(torch.meshgrid(f, f, indexing="ij"), -1)
    log_prior = MultivariateNormal(MU2, K2).log_prob(points)
    log_posterior = log_prior + torch.tensor(logs[0]).unsqueeze(-1) + torch.tensor(logs[1])
    weight = torch.softmax(log_posterior.flatten(), 0).view_as(log_posterior)
    expected = (weight.unsqueeze(-1) * statistics(points)).sum((0, 1))

    sampler = GibbsSampler(MultivariateNormal(MU2, K2), member.likelihood, y)
    draws = sampler.run(300, num_chains=200, warmup=60, generator=torch.Generator().manual_seed(1))
    assert misfit(statistics(draws.latent).mean(1), expected) < 1


def simulate(member, f, generator):
    """Draw y given f; normalised over the two classes, a pseudo-likelihood has the same y | f as its joint."""
    if member.support == "binary":
        logs = [member.likelihood.augmentation(torch.full_like(f, c)).log_prob(f) for c in (0.0, 1.0)]
        return (torch.rand(f.shape, dtype=F64, generator=generator) < torch.sigmoid(logs[1] - logs[0])).to(F64)
    return member.likelihood.forward(f).sample().to(F64)


@members
def test_the_joint_distribution_stays_as_it_is(name):
    """Geweke's test, started in the joint distribution: f ~ p(f), then y | f and f | y in turn keep the law of f."""
    member = MEMBERS[name]
    generator = torch.Generator().manual_seed(2)
    torch.manual_seed(3)  # torch's distributions take no generator
    prior = DensePrior(MU2, K2)
    f = prior.draw(torch.Size((8000, 2)), generator=generator)
    if name == "bayesian_svm":  # exp(-2 max(0, 1 - y f)) does not sum to one: p(f) of its joint is weighted by the sum
        total = sum(member.likelihood.augmentation(torch.full_like(f, c)).log_prob(f).exp() for c in (0.0, 1.0))
        f = f[torch.rand(len(f), dtype=F64, generator=generator) < (total / 1.02).prod(-1)]
    start = statistics(f)
    for _ in range(5):
        y = simulate(member, f, generator)
        sites = draw_sites(member.likelihood.augmentation(y), f, generator=generator)
        before = prior.draw(f.shape, generator=generator)
        f = draw_latent(prior.condition(sites), before, generator=generator)
    assert misfit(statistics(f) - start, 0) < 1
