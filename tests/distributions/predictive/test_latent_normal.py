"""Variances below gpytorch's floor are those of the covariance; ones that rounding made negative are reported."""

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator
from linear_operator.utils.warnings import NumericalWarning

from gpext.distributions import LatentNormal, MultitaskLatentNormal
from gpext.inference import CAVI, Laplace
from gpext.likelihoods import BernoulliLogitLikelihood, MultinomialLogitLikelihood
from tests.members import F64

TINY = torch.tensor([1e-30, 1e-14, 1e-3, 2.0], dtype=F64)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_small_variances_stay_what_they_are(dtype):
    f = LatentNormal(torch.zeros(4, dtype=dtype), to_linear_operator(torch.diag(TINY).to(dtype)))
    torch.testing.assert_close(f.variance, TINY.to(dtype), rtol=1e-6, atol=0)
    torch.testing.assert_close((f * 2)[..., 1:].variance, 4 * TINY[1:].to(dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("interleaved", [True, False])
def test_tasks_are_where_gpytorch_has_them(interleaved):
    mean = torch.arange(6.0, dtype=F64).view(3, 2)
    covariance = torch.diag(torch.arange(1.0, 7.0, dtype=F64))
    theirs = MultitaskMultivariateNormal(mean, to_linear_operator(covariance), interleaved=interleaved)
    ours = MultitaskLatentNormal(mean, to_linear_operator(1e-20 * covariance), interleaved=interleaved)
    torch.testing.assert_close(ours.variance, 1e-20 * theirs.variance, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.mean, theirs.mean)


def test_a_batch_of_means_shares_a_covariance():
    f = LatentNormal(torch.zeros(3, 4, dtype=F64), to_linear_operator(torch.diag(TINY)))
    torch.testing.assert_close(f.variance, TINY.expand(3, 4), rtol=1e-12, atol=0)


def test_a_negative_variance_is_reported():
    f = LatentNormal(torch.zeros(2, dtype=F64), to_linear_operator(torch.diag(torch.tensor([1.0, -1e-17], dtype=F64))))
    with pytest.warns(NumericalWarning, match="Negative variance"):
        assert float(f.variance[1]) == 1e-10


@pytest.mark.parametrize("scale", [1e-27, 1e-12])
def test_posteriors_of_a_vanishing_function(scale):
    """The posterior is nearly the prior: the likelihood of a datum is of the order of one."""
    K = scale * (torch.eye(3, dtype=F64) + torch.ones(3, 3, dtype=F64))
    classes = torch.tensor([0.0, 1.0, 1.0], dtype=F64)
    one = CAVI().infer(MultivariateNormal(torch.zeros(3, dtype=F64), K), BernoulliLogitLikelihood(), classes)
    torch.testing.assert_close(one.posterior.variance, K.diagonal(), rtol=1e-6, atol=0)
    prior = MultivariateNormal(torch.zeros(2, 3, dtype=F64), to_linear_operator(K.expand(2, 3, 3)))
    several = Laplace().infer(prior, MultinomialLogitLikelihood(2), classes)
    torch.testing.assert_close(several.posterior.variance, K.diagonal().expand(2, 3).mT, rtol=1e-6, atol=0)


def test_a_variance_of_zero_is_no_fault():
    f = LatentNormal(torch.zeros(2, dtype=F64), to_linear_operator(torch.diag(torch.tensor([1.0, 0.0], dtype=F64))))
    assert f.variance.tolist() == [1, 0]
