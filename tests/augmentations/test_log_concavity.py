"""Log-concavity of radial likelihoods, against a grid of their second derivatives."""

import pytest
import torch

from gpext import likelihoods
from tests.members import F64

Y = torch.tensor([0.0, 1.0, 1.0], dtype=F64)


def student_t(deg_free):
    likelihood = likelihoods.StudentTLikelihood().double()
    likelihood.initialize(deg_free=torch.tensor(deg_free, dtype=F64), noise=torch.tensor(1e-6, dtype=F64))
    return likelihood


@pytest.mark.parametrize(
    ("likelihood", "is_concave"),
    [
        (student_t(2.1), False),
        (student_t(1e8), False),
        (likelihoods.LaplaceLikelihood().double(), True),
        (likelihoods.Matern32Likelihood().double(), True),
        (likelihoods.BernoulliLogitLikelihood(), True),
        (likelihoods.BayesianSVMLikelihood(), True),
        (likelihoods.NegativeBinomialLogitLikelihood().double(), True),
        (likelihoods.SuperGaussianLikelihood(phi=lambda r: torch.exp(1 - torch.sqrt(1 + r))), True),
        (likelihoods.SuperGaussianLikelihood(phi=lambda r: torch.exp(-r)), True),
        (likelihoods.SuperGaussianLikelihood(phi=lambda r: (1 + r) ** -2), False),
    ],
)
def test_it_is_known(likelihood, is_concave):
    assert likelihood.augmentation(Y).radial.is_log_concave(Y) is is_concave
