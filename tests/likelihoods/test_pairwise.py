"""Preferences: integrals by quadrature, symmetry of the two inputs, and invariance to what utilities cannot say."""

import math
import unittest

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.test.base_likelihood_test_case import BaseLikelihoodTestCase
from linear_operator import to_linear_operator
from scipy import integrate, special

import gpext
from gpext import designs
from gpext.inference import EP, KL, Laplace
from gpext.likelihoods import OrdinalLogitLikelihood, PairwiseLogitLikelihood, PairwiseProbitLikelihood
from gpext.likelihoods.tilted_moments import tilt
from gpext.quadrature import tilted_moments
from tests.members import F64, tensor

KINDS = [PairwiseLogitLikelihood, PairwiseProbitLikelihood]
LINKS = {PairwiseLogitLikelihood: special.expit, PairwiseProbitLikelihood: lambda h: special.ndtr(h / math.sqrt(2))}
PAIRS = torch.tensor([[0, 1], [2, 1], [3, 0], [1, 3], [4, 2], [0, 4]])
X = torch.linspace(0, 2, 5, dtype=F64).unsqueeze(-1)


def _suite(kind):
    class Suite(BaseLikelihoodTestCase, unittest.TestCase):
        seed = 1

        def create_likelihood(self, **kwargs):
            return kind()

        def _create_targets(self, batch_shape=()):
            return torch.bernoulli(torch.full((*batch_shape, 5), 0.5))

    return Suite


class TestLogitSuite(_suite(PairwiseLogitLikelihood)):
    pass


class TestProbitSuite(_suite(PairwiseProbitLikelihood)):
    pass


class Model(gpext.models.LatentGP):
    def __init__(self, y, likelihood, rule=None, *, index=PAIRS, constant=0.0):
        super().__init__(X, y, likelihood, rule, design=designs.pairs(index, len(X)))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.double()
        self.mean_module.initialize(constant=constant)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.fixture
def utilities():
    """A joint distribution of f at five inputs."""
    factor = torch.randn(5, 5, dtype=F64, generator=torch.Generator().manual_seed(1))
    return MultivariateNormal(tensor(0.3, -1.0, 2.0, 0.0, 0.5), factor @ factor.mT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mean", "variance"), [(0.0, 1.0), (-8.0, 4.0), (3.0, 0.01), (2.0, 50.0)])
@pytest.mark.parametrize(("y", "sign"), [(0.0, -1), (1.0, 1)])
def test_integrals_are_those_of_quadrature(kind, mean, variance, y, sign):
    sd = math.sqrt(variance)

    def integral(function):
        def integrand(z):
            return function(mean + sd * z) * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)

        return integrate.quad(integrand, -12, 12, epsabs=0, epsrel=1e-12, limit=500)[0]

    m, v = tensor(mean), tensor(variance)
    found = kind().log_density(tensor(y), m, v)
    assert found.item() == pytest.approx(math.log(integral(lambda h: LINKS[kind](sign * h))), rel=1e-8)
    expected = integral(lambda h: float(kind().log_prob(tensor(y), tensor(h)).item()))
    assert kind().expected_log_density(tensor(y), m, v).item() == pytest.approx(expected, rel=1e-8)
    assert kind().log_prob(tensor(y), m).exp().item() == pytest.approx(LINKS[kind](sign * mean), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_of_comparisons_are_those_of_the_design(kind, utilities):
    """One pair at a time, all pairs at once, and the predictive distribution at the design's h agree."""
    likelihood = kind()
    found = likelihood.win_probability(utilities, PAIRS)
    torch.testing.assert_close(found, likelihood(designs.pairs(PAIRS, 5)(utilities)).probs, rtol=1e-10, atol=0)
    matrix = likelihood.win_probability(utilities)
    torch.testing.assert_close(matrix[PAIRS[:, 0], PAIRS[:, 1]], found, rtol=1e-10, atol=0)
    torch.testing.assert_close(matrix + matrix.mT, torch.ones_like(matrix), rtol=1e-12, atol=0)
    assert bool((matrix.diagonal() == 0.5).all())
    batch = MultivariateNormal(utilities.mean.expand(2, 5), utilities.covariance_matrix.expand(2, 5, 5))
    torch.testing.assert_close(likelihood.win_probability(batch), matrix.expand(2, 5, 5), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_correlation_counts(kind):
    """Two inputs whose utilities move together are told apart by the difference of their means alone."""
    same = MultivariateNormal(tensor(1.0, 0.0), to_linear_operator(4 * torch.ones(2, 2, dtype=F64)))
    expected = LINKS[kind](1.0)
    assert kind().win_probability(same, torch.tensor([[0, 1]])).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rule", [KL(tolerance=1e-9), EP(tolerance=1e-9), Laplace(tolerance=1e-9)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_a_pair_and_a_constant_do_not_matter(kind, rule):
    y = tensor(1, 0, 1, 1, 0, 0)
    model = Model(y, kind(), rule)
    flipped = Model(1 - y, kind(), rule, index=PAIRS.flip(-1))
    shifted = Model(y, kind(), rule, constant=7.0)
    for other in (flipped, shifted):
        torch.testing.assert_close(other.result.log_evidence, model.result.log_evidence, rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            mine, theirs = (kind().win_probability(each.eval()(X)) for each in (model, other))
        torch.testing.assert_close(theirs, mine, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("mean", "variance"), [(0.0, 1.0), (-6.0, 2.0), (4.0, 30.0)])
def test_tilted_moments_are_those_of_quadrature(mean, variance):
    y, m, v = tensor(1.0, 0.0), tensor(mean, mean), tensor(variance, variance)
    likelihood = PairwiseProbitLikelihood()
    found = tilt(likelihood, y, 1.0)(m, v)
    expected = tilted_moments(lambda f: likelihood.log_prob(y, f), m, v)
    for name in ("log_normalizer", "mean", "variance", "third", "fourth"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-7, atol=1e-8)


def test_a_draw_is_a_class_of_its_own():
    with pytest.raises(ValueError, match=r"got 0.5 at index 2. If that is a draw take OrdinalLogitLikelihood\(3\)"):
        Model(tensor(1, 0, 0.5, 1, 1, 1), PairwiseLogitLikelihood())
    model = Model(tensor(2, 0, 1, 2, 1, 0), OrdinalLogitLikelihood(3).double()).eval()
    with torch.no_grad():
        draws = model.likelihood(designs.pairs(PAIRS, 5)(model(X))).probs
    torch.testing.assert_close(draws.sum(-1), torch.ones(6, dtype=F64))


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_is_refused(kind, utilities):
    with pytest.raises(ValueError, match=r"got \{-1\}, first at index 1. Convert with \(y \+ 1\) / 2"):
        kind().check(tensor(1, -1))
    with pytest.raises(ValueError, match="finite; got nan at index 0"):
        kind().check(tensor(math.nan, 1))
    with pytest.raises(ValueError, match="row 0 compares 2 with itself"):
        kind().win_probability(utilities, torch.tensor([[2, 2]]))
    with pytest.raises(ValueError, match="must be from 0 to 4; got 5"):
        kind().win_probability(utilities, torch.tensor([[2, 5]]))
    with pytest.raises(TypeError, match="expected the joint distribution of one latent function"):
        kind().win_probability(torch.zeros(5))
    with pytest.raises(TypeError, match="got MultitaskMultivariateNormal"):
        kind().win_probability(MultitaskMultivariateNormal(torch.zeros(2, 2), torch.eye(4)))


@pytest.mark.parametrize("kind", KINDS)
def test_integers_truth_values_and_float32(kind):
    f = torch.tensor([0.5, -3.0])
    expected = kind().log_prob(tensor(1, 0), f.double())
    for y in (torch.tensor([1, 0]), torch.tensor([True, False]), torch.tensor([1.0, 0.0])):
        found = kind().log_prob(y, f)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)
