"""Quantiles by Newton's method end where the cdf has no more digits, and are as exact as it is."""

import pytest
import torch

from gpext.distributions.predictive.newton_quantiles import quantile_between
from tests.members import F64, tensor


class Counted:
    """A distribution whose cdf is exact to `rounding`, and counts its evaluations."""

    def __init__(self, distribution, rounding=0.0):
        self.distribution, self.rounding, self.count = distribution, rounding, 0

    def cdf(self, value):
        self.count += 1
        exact = self.distribution.cdf(value)
        return exact + self.rounding * torch.sin(1e17 * value)

    def log_prob(self, value):
        return self.distribution.log_prob(value)


@pytest.mark.parametrize("rounding", [0.0, 1e-16, 1e-13, 1e-10])
def test_a_quantile_near_zero_takes_few_evaluations(rounding):
    location = torch.linspace(-1, 1, 101, dtype=F64)
    probability = torch.special.ndtr(-location * (1 - 1e-6))  # the quantiles are within 1e-6 of zero
    distribution = Counted(torch.distributions.Normal(location, 1), rounding)
    quantile = quantile_between(distribution, probability, location - 8, location + 9)
    assert distribution.count <= 20
    error = distribution.distribution.cdf(quantile) - probability
    assert error.abs().max() <= 4 * rounding + 4 * torch.finfo(F64).eps


@pytest.mark.parametrize("probability", [1e-12, 1e-5, 0.3, 0.999])
def test_a_density_that_jumps_at_the_quantile_is_inverted_to_rounding(probability):
    class Jump:  # density 1e-3 below zero, 1 above
        def cdf(self, value):
            return torch.where(value < 0, probability + 1e-3 * value, probability + value)

        def log_prob(self, value):
            return torch.where(value < 0, 1e-3, 1.0).log()

    quantile = quantile_between(Jump(), tensor(probability), tensor(-0.7e-3), tensor(0.4e-3))
    assert quantile.abs() < 1e-15
