"""Gamma draws against the distribution function of SciPy."""

import math

import pytest
import torch
from scipy import stats

from gpext.distributions import Gamma


def test_draws_are_those_of_the_gamma_and_never_zero():
    law = Gamma(torch.tensor([0.01, 3.0], dtype=torch.float64), torch.tensor([2.0, 0.5], dtype=torch.float64))
    draws = law.sample((20_000,), generator=torch.Generator().manual_seed(0))
    assert bool((draws > 0).all())
    for k in range(2):
        exact = stats.gamma(law.concentration[k].item(), scale=1 / law.rate[k].item())
        assert stats.kstest(draws[:, k].numpy(), exact.cdf).statistic * math.sqrt(20_000) < 2.6
    with pytest.raises(ValueError, match="constraint"):
        Gamma(torch.tensor(-1.0), torch.tensor(1.0), validate_args=True)
