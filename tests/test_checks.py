"""Whole numbers of Python, NumPy and torch are accepted, truth values are not."""

import numpy as np
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

import gpext
from gpext.checks import whole_number, whole_number_or_none
from gpext.distributions import PolyaGamma
from gpext.likelihoods import (
    DirichletLikelihood,
    MultinomialLogitLikelihood,
    MultivariatePoissonLikelihood,
    OrdinalLogitLikelihood,
    StickBreakingLikelihood,
)
from gpext.samplers import GibbsSampler
from gpext.variational import kmeans_inducing_points

KINDS = [int, np.int64, np.int32, np.uint8, lambda value: torch.tensor(value)]
WRONG = [True, np.True_, 2.5, np.float64(3.0), "3", None]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_become_ints(kind):
    assert type(whole_number("count", kind(3), 1)) is int
    assert whole_number_or_none("count", kind(3), 1) == 3
    assert whole_number_or_none("count", None, 1) is None
    with pytest.raises(ValueError, match=r"count must be at least 4; got 3\. Take four\."):
        whole_number("count", kind(3), 4, remedy="Take four.")
    with pytest.raises(ValueError, match="count must not be negative; got -1"):
        whole_number("count", -1, 0)


@pytest.mark.parametrize("value", WRONG)
def test_others_are_refused(value):
    with pytest.raises(TypeError, match="count must be a whole number; got"):
        whole_number("count", value, 0)


def sampler():
    covariance = torch.eye(3, dtype=torch.float64)
    prior = MultivariateNormal(torch.zeros(3, dtype=torch.float64), covariance)
    return GibbsSampler(prior, gpext.likelihoods.StudentTLikelihood().double(), torch.arange(3.0).double())


X = torch.rand(20, 2, generator=torch.Generator().manual_seed(0))
MEMBERS = {
    "ordinal": lambda n: OrdinalLogitLikelihood(n)(torch.zeros(4)).probs,
    "multinomial": lambda n: MultinomialLogitLikelihood(n)(torch.zeros(3, 4)).probs,
    "trials": lambda n: MultinomialLogitLikelihood(3, total_count=n)(torch.zeros(3, 4)).probs,
    "stick breaking": lambda n: StickBreakingLikelihood(n)(torch.zeros(2, 4)).probs,
    "dirichlet": lambda n: DirichletLikelihood(n)(torch.zeros(3, 4)).mean,
    "outputs": lambda n: MultivariatePoissonLikelihood(n)(torch.zeros(3, 4)).mean,
    "inducing points": lambda n: kmeans_inducing_points(X, n),
    "samples": lambda n: (
        sampler().run(n, 1, warmup=0, generator=torch.Generator().manual_seed(0), progress=False).latent
    ),
    "chains": lambda n: (
        sampler().run(2, n, warmup=0, generator=torch.Generator().manual_seed(0), progress=False).latent
    ),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_numbers_of_numpy_are_as_good_everywhere(name):
    torch.testing.assert_close(MEMBERS[name](np.int64(3)), MEMBERS[name](3), rtol=0.0, atol=0.0)
    for value in (True, 2.5):
        with pytest.raises(TypeError, match=r"must be a whole number( or None)?; got"):
            MEMBERS[name](value)


def test_a_count_of_numpy_is_a_parameter():
    assert PolyaGamma(np.int64(2), torch.zeros(3)).mean.tolist() == [0.5, 0.5, 0.5]
