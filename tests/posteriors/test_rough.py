"""A posterior of few digits is near that of all digits, and what it says of a step belongs together."""

import pytest
import torch

from gpext.posteriors import DensePrior, condition_coupled, condition_roughly
from gpext.sites import BlockSites, CoupledSites, GaussianSites

F64 = torch.float64


def problem(latents, *batch, shared=False, size=30):
    """Prior means, covariances and the sites of a softmax."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 2, dtype=F64, generator=generator)
    lengthscales = torch.linspace(0.5, 1.5, latents, dtype=F64).view(-1, 1, 1)
    K = 4 * torch.exp(-0.5 * torch.cdist(x, x).square() / lengthscales.square())
    mean, shift, logits = torch.randn(3, *batch, latents, size, dtype=F64, generator=generator)
    pi = torch.softmax(logits, -2)
    sites = CoupledSites(shift, pi, torch.full((*batch, size), -1.0, dtype=F64), pi)
    return mean, K[0] if shared else K.expand(*batch, -1, -1, -1), sites


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize(("latents", "shared"), [(2, False), (5, False), (5, True)])
def test_products_are_the_posterior_s_to_few_digits_and_belong_together_to_all(latents, shared, batch):
    mean, K, sites = problem(latents, *batch, shared=shared)
    rough, exact = condition_roughly(mean, K, sites), condition_coupled(mean, K, sites)
    vector = torch.randn(mean.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    product, turned = rough.solve(vector)
    assert product.dtype == turned.dtype == F64
    torch.testing.assert_close((K @ turned.unsqueeze(-1)).squeeze(-1), product, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((K @ rough.weights.unsqueeze(-1)).squeeze(-1), rough.mean - mean, rtol=1e-12, atol=1e-12)
    for found, known in zip((product, turned, rough.mean), (*exact.solve(vector), exact.mean), strict=True):
        torch.testing.assert_close(found, known, rtol=0, atol=1e-4 * float(known.abs().max()))
    assert bool(rough.positive_definite.all())


def test_sites_that_few_digits_do_not_serve_are_left():
    """A negative precision, one far sharper than the prior, none; a positive coupling."""
    mean, K, sites = problem(3)
    for value in (-0.1, 1e5, torch.nan):
        precision = sites.precision.clone()
        precision[1, 3] = value
        assert condition_roughly(mean, K, CoupledSites(sites.shift, precision, sites.coupling, precision)) is None
    assert condition_roughly(mean, 1e4 * K, sites) is None
    positive = CoupledSites(sites.shift, sites.precision, -sites.coupling, sites.direction)
    assert condition_roughly(mean, K, positive) is None


def test_a_covariance_that_is_none_is_left():
    mean, K, sites = problem(3)
    assert condition_roughly(mean, K - 20 * torch.eye(30, dtype=F64), sites) is None


def test_sites_of_another_kind_are_left():
    mean, K, sites = problem(3)
    prior = DensePrior(mean, K)
    assert prior.condition_roughly(sites) is not None
    blocks = torch.eye(3, dtype=F64).unsqueeze(-1).expand(3, 3, 30)
    for other in (BlockSites(sites.shift, blocks), GaussianSites(sites.shift, sites.precision)):
        assert prior.condition_roughly(other) is None
