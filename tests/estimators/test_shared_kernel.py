"""Latents that share a kernel share its matrix: it is evaluated once, and the evidence is that of equal matrices."""

import pytest
import torch
from gpytorch.distributions import MultivariateNormal

from gpext.estimators.models import DenseGP, default_kernel
from gpext.inference import KL, Laplace
from gpext.likelihoods import HeteroscedasticGaussianLikelihood, MultinomialLogitLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from tests.members import F64


class Apart(DenseGP):
    """A matrix for each latent, all of them equal."""

    def forward(self, x):
        prior = super().forward(x)
        covariance = prior.lazy_covariance_matrix.to_dense()
        return MultivariateNormal(prior.mean, covariance.expand(*prior.mean.shape, covariance.size(-1)))


def cases():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, dtype=F64, generator=generator)
    return {
        "classes": (x, torch.arange(30) % 3, lambda: MultinomialLogitLikelihood(3), Laplace()),
        "classes under KL": (x, torch.arange(30) % 3, lambda: MultinomialLogitLikelihood(3), KL()),
        "noise": (x, x[:, 0].sin(), lambda: HeteroscedasticGaussianLikelihood().double(), Laplace()),
    }


@pytest.mark.parametrize("name", cases())
def test_the_evidence_and_its_derivatives_are_those_of_equal_matrices(name):
    x, y, likelihood, rule = cases()[name]
    found = []
    for kind in (DenseGP, Apart):
        model = kind(x, y, likelihood(), rule, default_kernel(2, 1)).double().train()
        prior = model(x)
        assert prior.lazy_covariance_matrix.dim() == (2 if kind is DenseGP else 3)
        value = LatentMarginalLogLikelihood(model.likelihood, model)(prior, y).sum()
        value.backward()
        gradients = [p.grad.flatten() for n, p in model.named_parameters() if p.grad is not None]
        predicted = model.eval()(x[:5] + 0.1)
        found.append((value.detach(), torch.cat(gradients), predicted.mean, predicted.variance))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
