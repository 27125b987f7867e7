"""Predictions of every likelihood in torch's inference mode are those outside it."""

import pytest
import torch
from gpytorch.distributions import MultivariateNormal

from tests.latent_cases import CASES, NO_DISTRIBUTION
from tests.members import F64

N = 6


def latents(num_latents):
    shape = (N,) if num_latents is None else (num_latents, N)
    return MultivariateNormal(torch.full(shape, 0.3, dtype=F64), torch.eye(N, dtype=F64).expand(*shape, N))


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("family", "stock"))])
def test_predictions(name):
    case = CASES[name]
    likelihood, y = case.make(), case.targets(torch.Generator().manual_seed(0), N)
    predicts = not name.startswith(NO_DISTRIBUTION)
    with torch.inference_mode():
        q = latents(case.num_latents)
        found = [method(y, q) for method in (likelihood.log_marginal, likelihood.expected_log_prob)]
        found += [likelihood(q).log_prob(y)] if predicts else []
    q = latents(case.num_latents)
    mean, covariance = q.mean.clone().requires_grad_(), q.covariance_matrix.clone().requires_grad_()
    q = MultivariateNormal(mean, covariance)
    again = [method(y, q) for method in (likelihood.log_marginal, likelihood.expected_log_prob)]
    again += [likelihood(q).log_prob(y)] if predicts else []
    for a, b in zip(found, again, strict=True):
        torch.testing.assert_close(a.clone(), b.detach(), rtol=1e-9, atol=1e-9)
    sum(value.sum() for value in again).backward()
    assert bool(mean.grad.isfinite().all())
    assert bool(covariance.grad.isfinite().all())
