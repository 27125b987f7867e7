"""Tilted moments of likelihoods with kinks, whose places the adaptive rule has to be given."""

import itertools
import math

import pytest
import torch
from scipy import integrate

from gpext.likelihoods import BayesianSVMLikelihood
from gpext.likelihoods.tilted_moments import tilt
from tests.members import F64


@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize(("mean", "variance"), [(-0.8095123901740626, 4.0504702576503675), (0.9, 1.3), (3.0, 0.2)])
def test_the_hinge(power, mean, variance):
    sd = math.sqrt(variance)

    def density(f):
        return math.exp(-0.5 * (f - mean) ** 2 / variance - 2 * power * max(0.0, 1 - f)) / (sd * math.sqrt(2 * math.pi))

    def integral(function):
        edges = [mean - 12 * sd, 1.0, mean + 12 * sd]
        return sum(
            integrate.quad(function, a, b, epsabs=0, epsrel=1e-13, limit=200)[0] for a, b in itertools.pairwise(edges)
        )

    total = integral(density)
    centre = integral(lambda f: f * density(f)) / total
    spread = integral(lambda f: (f - centre) ** 2 * density(f)) / total
    y, m, v = (torch.tensor([value], dtype=F64) for value in (1.0, mean, variance))
    found = tilt(BayesianSVMLikelihood(), y, power)(m, v)
    assert found.log_normalizer.item() == pytest.approx(math.log(total), abs=1e-11)
    assert found.mean.item() == pytest.approx(centre, abs=1e-11)
    assert found.variance.item() == pytest.approx(spread, abs=1e-11)
