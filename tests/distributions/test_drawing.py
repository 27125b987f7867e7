"""Draws by a generator are the same from the same seed, and leave torch's global generator unchanged."""

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from torch.distributions import Laplace, Normal

from gpext.distributions import BatchMixture, Matern32, Mixture, RadialNoise
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    MultinomialLogitLikelihood,
    MultivariatePoissonLikelihood,
    NegativeBinomialLogitLikelihood,
    OrdinalLogitLikelihood,
    StickBreakingLikelihood,
    StudentTLikelihood,
)
from tests.members import F64


def gaussian(n):
    return MultivariateNormal(torch.zeros(n, dtype=F64), torch.eye(n, dtype=F64))


def latents(n):
    return MultivariateNormal(torch.zeros(3, n, dtype=F64), torch.eye(n, dtype=F64).expand(3, n, n))


def exponential(r):
    return -r.sqrt()


def normal():
    return Normal(torch.zeros(4, 3, dtype=F64), 1.0)


DISTRIBUTIONS = {
    "noise added": lambda: StudentTLikelihood().double()(gaussian(3)),
    "counts": lambda: NegativeBinomialLogitLikelihood().double()(gaussian(3)),
    "joint": lambda: MultivariatePoissonLikelihood(2)(
        MultitaskMultivariateNormal(torch.zeros(3, 2, dtype=F64), torch.eye(6, dtype=F64) + 0.5)
    ),
    "mixture": lambda: Mixture(torch.tensor([0.3, 0.7], dtype=F64), [normal(), Laplace(normal().mean, 1.0)]),
    "batch mixture": lambda: BatchMixture(normal()),
    "mixture of predictions": lambda: BatchMixture(
        StudentTLikelihood().double()(
            MultivariateNormal(torch.zeros(4, 3, dtype=F64), torch.eye(3, dtype=F64).expand(4, 3, 3))
        )
    ),
    "two classes": lambda: BernoulliLogitLikelihood()(gaussian(3)),
    "ordered classes": lambda: OrdinalLogitLikelihood(4).double()(gaussian(3)),
    "classes": lambda: MultinomialLogitLikelihood(3)(latents(3)),
    "pieces of a stick": lambda: StickBreakingLikelihood(4)(latents(3)),
    "independent counts": lambda: MultivariatePoissonLikelihood(3)(latents(3)),
    "Matern-3/2": lambda: Matern32(torch.zeros(3, dtype=F64), 1.0),
    "radial": lambda: RadialNoise(torch.zeros(3, dtype=F64), exponential, torch.ones(3, dtype=F64)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_generator_makes_draws_reproducible(name):
    distribution = DISTRIBUTIONS[name]()
    shape = torch.Size([20])
    state = torch.get_rng_state()
    first, again, other = (
        distribution.sample(shape, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == distribution.sample(shape).shape
    assert not torch.equal(torch.get_rng_state(), state)


def test_one_generator_draws_anew_every_time():
    distribution, generator = DISTRIBUTIONS["noise added"](), torch.Generator().manual_seed(1)
    assert not torch.equal(distribution.sample(generator=generator), distribution.sample(generator=generator))
