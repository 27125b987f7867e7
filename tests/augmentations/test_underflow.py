"""Radial functions that underflow where they have no mass: predictions by phi against those by log phi."""

import pytest
import torch
from gpytorch.distributions import MultivariateNormal

from gpext.distributions import InversionError
from gpext.likelihoods import SuperGaussianLikelihood
from tests.members import F64


def test_predictions_with_a_phi_that_underflows_far_from_the_target():
    """There it has no mass; an error is raised only if there is no mass anywhere."""
    wide = MultivariateNormal(torch.zeros(2, dtype=F64), 1e6 * torch.eye(2, dtype=F64))
    y = torch.tensor([0.5, -1.0], dtype=F64)

    def log_phi(r):
        return 1 - torch.sqrt(1 + 140 * r)

    by_phi, by_log = SuperGaussianLikelihood(phi=lambda r: log_phi(r).exp()), SuperGaussianLikelihood(log_phi=log_phi)
    torch.testing.assert_close(by_phi(wide).log_prob(y), by_log(wide).log_prob(y), rtol=1e-8, atol=1e-8)
    offset = SuperGaussianLikelihood(
        phi=lambda r: log_phi(r).exp(),
        alpha=lambda y: 1e6 + y.square(),
        beta=lambda y: 2 * y,
        gamma=torch.ones_like,
        log_constant=torch.zeros_like,
    )
    with pytest.raises(InversionError, match="give log_phi"):
        offset.log_density(y, wide.mean, wide.variance)
