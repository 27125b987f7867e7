"""The common interface of likelihoods of correlated latents."""

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator

from gpext.likelihoods.joint import correlated_blocks
from gpext.posteriors import condition_blocks, condition_coupled
from tests.latent_cases import CASES
from tests.posteriors.test_block import unstructured
from tests.posteriors.test_coupled import F64, problem


@pytest.mark.parametrize("batch", [(), (2,)])
def test_blocks_are_those_of_the_dense_covariance(batch):
    mean, covariance, sites = problem(3, 7, *batch, kind="mixed")
    posteriors = (
        condition_coupled(mean, covariance, sites),
        condition_blocks(mean, covariance, unstructured(sites)),
    )
    for posterior in posteriors:
        predicted = posterior.predict(mean, covariance, covariance)
        for joint in (posterior.distribution(F64), predicted):
            torch.testing.assert_close(correlated_blocks(joint), posterior.blocks, rtol=1e-8, atol=1e-8)
        dense = predicted.covariance_matrix
        by_datum = dense.view(*batch, 3, 7, 3, 7).transpose(-4, -3).transpose(-2, -1).reshape(*batch, 21, 21)
        interleaved = MultitaskMultivariateNormal(predicted.mean, to_linear_operator(by_datum))
        torch.testing.assert_close(correlated_blocks(interleaved), posterior.blocks, rtol=1e-8, atol=1e-8)


def test_uncorrelated_latents_have_none():
    batch = MultivariateNormal(torch.zeros(2, 4), torch.eye(4).expand(2, 4, 4))
    assert correlated_blocks(batch) is None
    assert correlated_blocks(MultitaskMultivariateNormal.from_batch_mvn(batch)) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["von_mises", "dirichlet", "trials"])
def test_many_data_are_integrated_as_few(name):
    case = CASES[name]
    likelihood, y = case.make(), case.targets(torch.Generator().manual_seed(0), 40)
    generator = torch.Generator().manual_seed(1)
    D = case.num_latents
    mean = torch.randn(D, 40, dtype=F64, generator=generator)
    factor = torch.randn(40, D, D, dtype=F64, generator=generator)
    covariance = (factor @ factor.mT).movedim(0, -1)
    part = slice(30, 35)
    for method in (likelihood.joint_log_density, likelihood.joint_expected_log_density):
        together = method(y, mean, covariance)
        alone = method(y[part], mean[:, part], covariance[..., part])
        torch.testing.assert_close(together[part], alone, rtol=1e-7, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("is_correlated", [True, False])
@pytest.mark.parametrize(
    "name", ["multinomial", "trials", "von_mises", "dirichlet", "beta", "several_counts", "stick_breaking"]
)
def test_a_batch_of_targets_shares_one_distribution(name, is_correlated):
    case = CASES[name]
    likelihood, D = case.make(), case.num_latents
    y = torch.stack([case.targets(torch.Generator().manual_seed(k), 4) for k in range(3)])
    covariance = torch.eye(4 * D, dtype=F64) + (0.3 if is_correlated else 0.0)
    q = MultitaskMultivariateNormal(torch.zeros(4, D, dtype=F64), covariance)
    for method in (likelihood.expected_log_prob, likelihood.log_marginal):
        together = method(y, q)
        assert together.shape == (3, 4)
        torch.testing.assert_close(together, torch.stack([method(row, q) for row in y]), rtol=1e-6, atol=1e-6)
