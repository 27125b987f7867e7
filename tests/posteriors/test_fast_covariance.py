"""The covariance to six digits, against the one to full precision."""

import pytest
import torch

from gpext.posteriors import condition_dense, fast_covariance
from gpext.sites import GaussianSites


def condition(smallest, num_negative, *, count=60):
    """Sites of precisions from 10^smallest to 10^6 within smooth functions, some of them negative."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 2, generator=generator, dtype=torch.float64)
    prior = 3 * torch.exp(-4 * torch.cdist(x, x).square())
    precision = 10 ** (smallest + (6 - smallest) * torch.rand(count, generator=generator, dtype=torch.float64))
    precision[:num_negative] = -1e-3
    posterior = condition_dense(torch.zeros_like(precision), prior, GaussianSites(precision, precision))
    assert bool(posterior.positive_definite)
    return posterior


@pytest.mark.parametrize("smallest", [2, -4, -20], ids=["all precise", "a few not", "most not"])
@pytest.mark.parametrize("num_negative", [0, 7])
def test_has_six_digits(smallest, num_negative):
    posterior = condition(smallest, num_negative)
    V = posterior.covariance
    deviation = V.diagonal().sqrt()
    error = (fast_covariance(posterior) - V) / (deviation.unsqueeze(-1) * deviation)
    assert float(error.abs().max()) < 1e-6


def test_the_posterior_keeps_its_own():
    posterior = condition(-20, 0)
    before = posterior.covariance.clone()
    fast_covariance(posterior)
    torch.testing.assert_close(posterior.covariance, before, rtol=0, atol=0)
