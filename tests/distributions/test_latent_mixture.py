"""Predictive distributions of data with correlated latents: what they share."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from torch import Tensor

from gpext import likelihoods
from gpext.distributions import LatentMixture
from tests.members import F64, tensor

D, N = 3, 4
MEMBERS = {
    "beta": (likelihoods.BetaLikelihood(), tensor(0.3).squeeze()),
    "dirichlet": (likelihoods.DirichletLikelihood(D), tensor(0.2, 0.3, 0.5)),
    "multinomial": (likelihoods.MultinomialLogitLikelihood(D, total_count=3), tensor(1.0, 0.0, 2.0)),
    "poisson": (likelihoods.MultivariatePoissonLikelihood(D), tensor(1.0, 0.0, 2.0)),
    "von mises": (likelihoods.VonMisesLikelihood(), tensor(0.7).squeeze()),
}


@pytest.fixture(params=MEMBERS)
def member(request) -> tuple[LatentMixture, Tensor]:
    """Return a predictive distribution of N data, and a value of one."""
    likelihood, value = MEMBERS[request.param]
    latents = likelihood.num_latents
    torch.manual_seed(0)
    root = torch.randn(N, latents, latents, dtype=F64)
    blocks = torch.block_diag(*(root @ root.mT / 4))
    predictive = likelihood.double()(MultitaskMultivariateNormal(torch.randn(N, latents, dtype=F64), blocks))
    assert isinstance(predictive, LatentMixture)
    return predictive, value


def test_expand_repeats_density_moments_and_draws(member):
    predictive, value = member
    before = predictive.log_prob(value.expand(N, *value.shape))
    wide = predictive.expand(torch.Size((2, 3, N)))
    assert type(wide) is type(predictive)
    assert wide.batch_shape == (2, 3, N)
    assert wide.event_shape == predictive.event_shape == value.shape
    torch.testing.assert_close(wide.log_prob(value), before.expand(2, 3, N))  # values repeat over the batch
    for name in ("mean", "variance"):
        narrow = getattr(predictive, name)
        torch.testing.assert_close(getattr(wide, name), narrow.expand(2, 3, *narrow.shape))
    assert wide.sample((5,)).shape == (5, 2, 3, N, *value.shape)
    assert predictive.batch_shape == (N,)  # left as it was
    assert predictive.latent_mean.size(-1) == N


@pytest.mark.parametrize("member", ["beta", "von mises"], indirect=True)
def test_expand_forgets_tables_of_the_old_batch(member):
    predictive, _ = member
    narrow = predictive.icdf(0.3)
    torch.testing.assert_close(predictive.expand(torch.Size((2, N))).icdf(0.3), narrow.expand(2, N))


def test_copies_and_pickles(member):
    predictive, value = member
    for twin in (copy.deepcopy(predictive), pickle.loads(pickle.dumps(predictive))):
        assert torch.equal(twin.log_prob(value), predictive.log_prob(value))


def test_refuses_what_is_outside_its_support(member):
    predictive, value = member
    with pytest.raises(ValueError, match=r"support|sum to"):
        predictive.log_prob(value + torch.nan)
