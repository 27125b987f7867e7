"""Taylor's approximation of heavy-tailed noise: regression with the Gaussian noise of its mode."""

import math

import pytest
import torch

from gpext.inference import Taylor
from tests.latent_cases import CASES

N = 12


@pytest.mark.parametrize(
    ("name", "squared_scale"),
    [("student_t", lambda p: p.noise * p.deg_free / (p.deg_free + 1)), ("matern32", lambda p: p.noise / 3)],
)
def test_noise_is_expanded_at_its_mode(name, squared_scale):
    """log p(y | f) = log p(y | y) - (y - f)^2 / (2 s^2): bounded in every hyperparameter, as its value at 0 is not."""
    likelihood, prior, y = CASES[name].problem(N)
    likelihood.requires_grad_(False)
    result = Taylor().infer(prior(), likelihood, y)
    variance = squared_scale(likelihood).expand(N)
    total = prior().covariance_matrix.detach() + variance.diag()
    marginal = torch.distributions.MultivariateNormal(prior().mean.detach(), total).log_prob(y)
    peaks = likelihood.log_prob(y, y) + 0.5 * (2 * math.pi * variance).log()
    torch.testing.assert_close(result.log_evidence.detach(), marginal + peaks.sum(), rtol=1e-9, atol=1e-9)
    assert bool((result.sites.precision > 0).all())
    assert bool(result.log_loo.isfinite().all())
