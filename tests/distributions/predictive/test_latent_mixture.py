"""The common interface of predictive distributions of data with correlated latents."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from torch import Tensor
from torch.distributions import Normal

from gpext import likelihoods
from gpext.distributions import CompoundJointDistribution, LatentMixture, MultitaskLatentNormal
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


@pytest.mark.slow
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
    assert predictive.batch_shape == (N,)  # unchanged
    assert predictive.latent_mean.size(-1) == N


def _at(likelihood, f):
    """Return the prediction where the latents are nearly known."""
    return likelihood(MultitaskLatentNormal(f.unsqueeze(0), 1e-30 * torch.eye(len(f), dtype=F64)))


def test_variances_next_to_certainty():
    """A difference of second moments has no digits here, and may be negative."""
    gap = 40.0
    share = math.exp(-gap) / (1 + 2 * math.exp(-gap))
    f = tensor(0.0, -gap, -gap)
    shares = tensor(2 * share * (1 - 2 * share), share * (1 - share), share * (1 - share))
    counts = _at(likelihoods.MultinomialLogitLikelihood(D, total_count=1000), f).variance
    torch.testing.assert_close(counts, 1000 * shares.unsqueeze(0), rtol=1e-6, atol=0)
    concentrations = torch.nn.functional.softplus(f)
    total = float(concentrations.sum())
    rest = torch.stack([2 * concentrations[1], total - concentrations[1], total - concentrations[2]])
    proportions = _at(likelihoods.DirichletLikelihood(D), f).variance
    expected = concentrations * rest / (total**2 * (total + 1))
    torch.testing.assert_close(proportions, expected.unsqueeze(0), rtol=1e-10, atol=0)


def test_variances_of_targets_far_from_zero():
    def conditional(f: Tensor) -> Normal:
        return Normal(1e9 + f.sum(-2), 0.1)

    mean, covariance = torch.zeros(2, N, dtype=F64), 0.01 * torch.eye(2, dtype=F64).unsqueeze(-1).expand(2, 2, N)
    predictive = CompoundJointDistribution(conditional, mean, covariance, lambda *_: mean[0])
    torch.testing.assert_close(predictive.variance, torch.full((N,), 0.03, dtype=F64), rtol=1e-5, atol=0)


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
