"""Marginal covariances and derivatives from one triangular solve agree with those from products of whole matrices."""

import pytest
import torch

from gpext.posteriors import condition_coupled
from gpext.sites import CoupledSites

F64 = torch.float64


def posterior(scale, spread, *batch, total=1.0, latents=4, size=30):
    """Softmax sites at latent values of standard deviation `spread`, with a prior variance of `scale`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 4, size, dtype=F64)
    lengthscales = torch.linspace(0.5, 1.5, latents, dtype=F64).view(-1, 1, 1)
    K = scale * torch.exp(-0.5 * ((x.unsqueeze(-1) - x) / lengthscales) ** 2)
    f = spread * torch.randn(*batch, latents, size, dtype=F64, generator=generator)
    probs = f.softmax(-2)
    coupling = torch.full((*batch, size), -total, dtype=F64)
    sites = CoupledSites(f, total * probs, coupling, probs)
    mean = torch.zeros(*batch, latents, size, dtype=F64)
    return condition_coupled(mean, K.expand(*batch, latents, size, size), sites)


def by_products(found):
    """V_ii and R_dd by Z_d = V0_d diag(w_d) and T_d = diag(w_d) - Gamma_d Z_d."""
    w, gamma = found.sites.direction, found.sites.precision.unsqueeze(-1)
    V0, R2 = found.first.covariance, found.second.response.unsqueeze(-3)
    Z = V0 * w.unsqueeze(-2)
    blocks = torch.diag_embed(found.first.variance.mT).movedim(-3, -1)
    blocks = blocks - torch.einsum("...dij,...eij->...dei", Z @ R2, Z)
    T = w.diag_embed() - gamma * Z
    return blocks, found.first.response + T @ R2 @ T.mT


# small precisions beside 1 / scale and large ones, in one posterior
@pytest.mark.parametrize("spread", [0.5, 8.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_agrees_with_products_of_whole_matrices(scale, spread, batch):
    found = posterior(scale, spread, *batch)
    blocks, response = by_products(found)
    torch.testing.assert_close(found.blocks, blocks, rtol=1e-8, atol=1e-10 * scale)
    weights = found.weights
    expected = 0.5 * (weights.unsqueeze(-1) * weights.unsqueeze(-2) - response)
    torch.testing.assert_close(found.gradient[1], expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("spread", [0.0, 8.0])
def test_agrees_for_very_sharp_sites(spread):
    found = posterior(1.0, spread, total=1e6)
    blocks, _ = by_products(found)
    torch.testing.assert_close(found.blocks, blocks, rtol=1e-6, atol=1e-9)


def test_probabilities_that_underflow_are_served():
    """A precision of zero, by which nothing can be divided, leaves the class as uncertain as its neighbours make it."""
    found = posterior(1.0, 400.0)
    assert bool((found.sites.precision == 0).any())
    assert bool(found.positive_definite)
    assert bool(found.blocks.isfinite().all())
    torch.testing.assert_close(found.blocks, by_products(found)[0], rtol=1e-8, atol=1e-10)
