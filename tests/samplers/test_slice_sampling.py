"""Slice sampling draws from its density, against the distribution function."""

import pytest
import scipy.stats
import torch

from gpext.samplers.slice_sampling import slice_step
from tests.members import F64


def mixture_cdf(x):
    return 0.3 * scipy.stats.norm.cdf(x, -2, 0.4) + 0.7 * scipy.stats.norm.cdf(x, 2, 1.0)


def log_mixture(x):
    normal = torch.distributions.Normal
    parts = [
        normal(-2, 0.4).log_prob(x) + torch.tensor(0.3).log(),
        normal(2, 1.0).log_prob(x) + torch.tensor(0.7).log(),
    ]
    return torch.logsumexp(torch.stack(parts), 0)


def log_gamma(x):
    return torch.where(x > 0, -0.3 * x.clamp_min(1e-300).log() - x, -torch.inf)


def exact(name, number, generator):
    u = torch.rand(number, dtype=F64, generator=generator)
    if name == "two_modes":
        noise = torch.randn(number, dtype=F64, generator=generator)
        return torch.where(u < 0.3, -2 + 0.4 * noise, 2 + noise)
    law = scipy.stats.norm(2, 3) if name == "normal" else scipy.stats.gamma(0.7)
    return torch.from_numpy(law.ppf(u.numpy()))


CASES = {
    "normal": (lambda x: -0.5 * ((x - 2) / 3) ** 2, scipy.stats.norm(2, 3).cdf),
    "gamma": (log_gamma, scipy.stats.gamma(0.7).cdf),
    "two_modes": (log_mixture, mixture_cdf),
}


@pytest.mark.slow
@pytest.mark.parametrize("width", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("name", CASES)
def test_draws_from_the_density(name, width):
    """Started in it: narrow slices move slowly, and rarely cross from one mode to the other."""
    log_density, cdf = CASES[name]
    generator = torch.Generator().manual_seed(0)
    value = start = exact(name, 4000, generator)
    for _ in range(30):
        value = slice_step(value, lambda x, which: log_density(x), width, generator=generator)
    assert scipy.stats.kstest(value.numpy(), cdf).pvalue > 1e-5
    assert bool((value != start).all())


def test_forgets_where_it_began():
    log_density, cdf = CASES["gamma"]
    generator, value = torch.Generator().manual_seed(0), torch.full((4000,), 0.5, dtype=F64)
    for _ in range(60):
        value = slice_step(value, lambda x, which: log_density(x), 1.0, generator=generator)
    assert scipy.stats.kstest(value.numpy(), cdf).pvalue > 1e-5


def test_asks_only_for_the_chains_that_are_moving():
    asked = torch.zeros(50, dtype=torch.long)

    def log_density(x, which):
        asked.add_(which)
        return torch.where(which, -0.5 * x**2, torch.nan)

    moved = slice_step(torch.zeros(50, dtype=F64), log_density, 1.0, generator=torch.Generator().manual_seed(0))
    assert bool(moved.isfinite().all())
    assert asked.unique().numel() > 2


def test_must_begin_inside():
    with pytest.raises(
        ValueError, match=r"must begin where the density is finite and not zero; got log densities \[-inf"
    ):
        slice_step(torch.tensor([-1.0], dtype=F64), lambda x, which: log_gamma(x), 1.0)
