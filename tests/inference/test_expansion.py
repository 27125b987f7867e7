"""Which likelihoods have the curvature that Laplace and Taylor need."""

import pytest
import torch
from gpytorch.distributions import MultivariateNormal

from gpext.inference import Laplace
from gpext.likelihoods import (
    BayesianSVMLikelihood,
    LaplaceLikelihood,
    OrdinalLogitLikelihood,
    OrdinalProbitLikelihood,
)
from tests.members import F64

N = 6


def prior(mean):
    x = torch.arange(N, dtype=F64)
    return MultivariateNormal(torch.full((N,), mean, dtype=F64), torch.exp(-0.5 * (x - x[:, None]).square()))


@pytest.mark.parametrize("kind", [OrdinalLogitLikelihood, OrdinalProbitLikelihood])
@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_cutpoints_far_from_zero_are_those_near_it(kind, shift):
    y = torch.tensor([2.0, 1.0, 0.0, 0.0, 1.0, 2.0], dtype=F64)
    near, far = kind(3).double(), kind(3).double()
    far.cutpoints = near.cutpoints.detach() + shift
    expected = Laplace().infer(prior(0.0), near, y).log_evidence
    for first in (y, y.flip(0) * 0, 2 - y):
        assert Laplace().infer(prior(shift), far, first).log_evidence.isfinite()
    torch.testing.assert_close(Laplace().infer(prior(shift), far, y).log_evidence, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [LaplaceLikelihood, BayesianSVMLikelihood])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_kinks_have_none(kind, label):
    with pytest.raises(TypeError, match="no second derivative"):
        Laplace().infer(prior(0.0), kind().double(), torch.full((N,), label, dtype=F64))
