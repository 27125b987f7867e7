"""Iterations that no longer improve the bound end before `max_steps`."""

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

from gpext.inference import KL, Status
from gpext.inference.drivers.fixed_point import Patience
from gpext.likelihoods import LatentLikelihood
from tests.members import F64


class Cube(LatentLikelihood):
    """log p(y | f) = -|y - f|^3, up to a constant."""

    def unchecked_log_prob(self, targets, f):
        return -((targets - f).abs() ** 3)

    def forward(self, f):
        return torch.distributions.Normal(f, 0.5)


def test_patience_counts_from_the_last_rise_or_the_last_smaller_residual():
    patience, still = Patience(3), torch.ones(2)
    assert not any(patience.is_lost(still, still) for _ in range(4))
    assert patience.is_lost(still, still)
    assert not patience.is_lost(still + torch.tensor([0.0, 1e-6]), still)  # one of a batch is enough
    assert not any(patience.is_lost(still, still) for _ in range(3))
    assert not patience.is_lost(still, 0.5 * still)
    assert not any(patience.is_lost(still, 0.498 * still) for _ in range(3))
    assert patience.is_lost(still, 0.498 * still)


@pytest.mark.slow
def test_targets_so_far_off_that_rounding_hides_every_step():
    prior = MultivariateNormal(torch.zeros(2, dtype=F64), to_linear_operator(1e-12 * torch.eye(2, dtype=F64)))
    result = KL().infer(prior, Cube(), torch.tensor([2e5, -1e5], dtype=F64))
    assert result.status in (Status.STALLED, Status.CONVERGED)
    assert result.num_steps < 800
